"""`qurl validate`: finds what `qurl train` would refuse. Loads no model, leaves no file behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from qurl.config import Config
from qurl.config.rules import find_warnings
from qurl.errors import ConfigError, MissingExtra, ModelError, QurlError
from qurl.ops.device import pick_device
from qurl.ops.families import FAMILIES
from qurl.plugins import is_users_own, load_plugin
from qurl.quant.linear import check_quantizable, quantized_projections
from qurl.quant.scaling import uaq_scale
from qurl.rollout.engine import check_prompts_for
from qurl.rollout.local.architecture import read_architecture
from qurl.rollout.stop import StopRule
from qurl.run.assembly import build_pool
from qurl.run.budget import (
    GIB,
    engine_rows,
    find_savings,
    loaded_bytes,
    machine_memory,
    memory_rows,
    peak_memory,
    total_memory,
)
from qurl.run.checkpoint import check_untrained, newest_sound
from qurl.run.choices import Choices
from qurl.run.directory import INITIAL, check_logs, find_changes
from qurl.run.inputs import check_model_path
from qurl.run.rehearsal import compare_splits, rehearse
from qurl.run.shape import empty_model, measure
from qurl.run.splits import held_out_problems, load_split, spread_problems
from qurl.run.trial import try_advantage
from qurl.sampling import ProblemStream, Setup
from qurl.sampling.histopipe import check_repeats
from qurl.tasks.task import Task
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.folder import check_folder
from qurl.trainer.lora import base_of
from qurl.trainer.policy import load_tokenizer
from qurl.trainer.weight_files import check_finite, check_shapes
from qurl.types import SamplingParams

NUM_PROMPTS = 32
"""Prompts that are made of real rows, spread over the task."""


def validate(config: Config) -> bool:
    """Check a recipe as far as possible without training; print a line per check."""
    recipe = Recipe(config)
    print("ok    keys and values")
    for warning in find_warnings(config):
        print(f"note  {warning}")
    checks: dict[str, Callable[[], str]] = {
        "device": lambda: str(pick_device(config.device)),
        "parts": recipe.check_parts,
        "run directory": recipe.check_run_dir,
        "packages": recipe.check_packages,
        "model": recipe.check_model,
        "precision": recipe.check_precision,
        "weights": recipe.check_weights,
        "memory": recipe.check_memory,
        "training problems": recipe.check_training_task,
        "held-out problems": recipe.check_held_out,
        "stops": recipe.check_stops,
        "grader": recipe.check_grader,
    }
    mistakes: list[str] = []
    for name, check in checks.items():
        try:
            if result := check():
                print(f"ok    {name}: {result}")
        except QurlError as error:
            if str(error) not in mistakes:  # several checks read the same file
                print(f"FAIL  {name}: {error}")
            mistakes.append(str(error))
    for note in recipe.notes:
        print(f"note  {note}")
    if recipe.prompt:
        print(f"\nThe first prompt:\n{recipe.prompt}")
    return not mistakes


class Recipe:
    """A recipe and what the checks so far have read; None if that failed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.model: Any = None  # on the meta device, without weights
        self.task: Task | None = None
        self.prompt = ""
        self.notes: list[str] = []

    @property
    def model_config(self) -> Any:
        return getattr(self.model, "config", None)

    def check_parts(self) -> str:
        choices = Choices.of(self.config)
        if is_users_own(episode := self.config.rollout.episode):
            load_plugin(episode, "rollout.episode")
        parts = (choices.objective, choices.advantage, choices.engine, choices.episode)
        return ", ".join(part.__name__ for part in parts if part is not None)

    def check_run_dir(self) -> str:
        path = Path(self.config.run_dir).expanduser()
        place = path
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not os.path.isdir(place):
            raise ConfigError(f"run_dir = {str(path)!r}: {place} is no folder; choose another")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(
                f"run_dir = {str(path)!r} cannot be written: no permission in {place}"
            )
        try:
            # A file system may refuse what its permissions allow.
            with TemporaryDirectory(dir=place, prefix=".qurl-"):
                changes = find_changes(path, self.config)
        except OSError as error:
            if isinstance(error, QurlError):
                raise
            raise ConfigError(f"run_dir = {str(path)!r}: {error.strerror}") from error
        check_logs(path)
        if self.config.model.path == "scratch":
            check_untrained(path / INITIAL)
        _, damaged = newest_sound(path / "checkpoints")
        self.notes += [f"{found} is damaged: {damage}" for found, damage in damaged.items()]
        return f"{self.config.run_dir}, {'a new run' if changes is None else 'a run to resume'}"

    def check_packages(self) -> str:
        """The optional packages that the recipe needs, by what needs them."""
        parallel, track = self.config.parallel, self.config.track
        by_ray = parallel.engines or (parallel.address and parallel.trainers > 1)
        purposes = {
            "ray": "parallel.engines or parallel.address" if by_ray else "",
            "vllm": "rollout.engine = 'vllm'" if self.config.rollout.engine == "vllm" else "",
            "tensorboard": "track.tensorboard" if track.tensorboard else "",
            "wandb": "track.wandb" if track.wandb else "",
        }
        names = [name for name, purpose in purposes.items() if purpose]
        for name in names:
            if find_spec(name) is None:
                raise MissingExtra(name, name, purposes[name])
        return ", ".join(names) or "no optional ones"

    def check_model(self) -> str:
        check_model_path(self.config)
        path = self.config.model.path
        self.model = empty_model(self.config)
        is_scratch = path == "scratch"
        self.tokenizer = (
            build_tokenizer() if is_scratch else load_tokenizer(path, retries_hub=False)
        )
        num_tokens = len(self.tokenizer)
        tokens = f"{num_tokens} tokens, end of sequence {self.tokenizer.eos_token!r}"
        if is_scratch:
            return f"made from scratch, {tokens}"
        kind = self.model_config.model_type
        vocabulary = self.model_config.get_text_config().vocab_size
        if num_tokens > vocabulary:  # prompts that hold the others are refused by themselves
            sizes = f"its tokenizer has {num_tokens} tokens, and the model only {vocabulary}"
            self.notes.append(f"model.path = {path!r}: {sizes}")
        return f"{kind}, {tokens}"

    def check_precision(self) -> str:
        """What engine, quantizer and UAQ need of the model's layers."""
        config, model = self.config, self.model
        quant, device = config.quant, pick_device(config.device)
        dtype = config.model.compute_dtype
        is_bf16 = dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
        if config.experimental.dither and not is_bf16:
            raise ConfigError("experimental.dither = true needs model.compute_dtype = 'bfloat16'")
        if config.optim.masters == "bf16" and not is_bf16:
            raise ConfigError("optim.masters = 'bf16' needs model.compute_dtype = 'bfloat16'")
        num_threads = 1 if device.type == "cuda" else config.threads or torch.get_num_threads()
        if config.rollout.deterministic and num_threads > 1:
            raise ConfigError("rollout.deterministic = true needs threads = 1 on a CPU")
        if model is None:
            return ""
        uaq_scale(model)
        if config.rollout.engine == "local":
            read_architecture(model)
        if quant.format != "none":
            check_quantizable(model)
            quantized_projections(model, quant.full_layers)
        uaq = quant.update_scale > 1 or config.experimental.norm_fed_lr_scale != 1
        if uaq and (kind := model.config.model_type) not in FAMILIES:
            raise ModelError(f"UAQ does not know model type {kind!r}; set quant.update_scale = 1")
        return f"{quant.format} of {type(model).__name__}"

    def check_weights(self) -> str:
        path = self.config.model.path
        if self.model is None:
            return ""
        if path == "scratch" or not os.path.isdir(path):
            return "made at the start" if path == "scratch" else "not read, they are on the hub"
        check_folder(path)
        base = base_of(path)  # of adapters; it may be on the hub
        if os.path.isdir(base):
            check_shapes(base, self.model)
        folders = [folder for folder in dict.fromkeys((base, path)) if os.path.isdir(folder)]
        return "; ".join(map(check_finite, folders))

    def check_memory(self) -> str:
        """Check the fuller GPU, and main memory, which all processes share on a CPU."""
        if self.model is None:
            return ""
        config, device = self.config, pick_device(self.config.device)
        shape, total = measure(self.model), total_memory(device)
        if device.type != "cuda":
            peaks = [machine_memory(config, shape)]
        else:
            peaks = [peak_memory(config, memory_rows(config, shape, total))]
        if config.parallel.engines and device.type == "cuda":
            peaks.append(sum(engine_rows(config, shape, total).values()))
        sizes = f"about {max(peaks) / GIB:.2f} of {total / GIB:.1f} GiB at the peak"
        if max(peaks) > total:
            savings = " or ".join(find_savings(config))
            raise ConfigError(f"{sizes}, too much for {device}; {savings} saves memory")
        loaded, main = loaded_bytes(config, shape), total_memory(torch.device("cpu"))
        if device.type == "cuda" and config.parallel.is_sharded and loaded > main:
            raise ConfigError(
                f"the driver loads FP32 models of {loaded / GIB:.2f} GiB into main memory, and "
                f"this machine has {main / GIB:.1f} GiB; use one with more"
            )
        return sizes

    def check_training_task(self) -> str:
        self.task = task = load_split(self.config, "train", self.tokenizer, self.model_config)
        check_repeats(self.config, len(task))
        problems = spread_problems(task, NUM_PROMPTS)
        setup = Setup(self.config, task, len(self.tokenizer or ()))
        choices = Choices.of(self.config)
        try_advantage(choices.advantage, self.config, task)
        hooks = choices.build_hooks(setup)
        ProblemStream(task, self.config.seed, hooks.select).take(1)
        first = ""
        if self.tokenizer:
            self.prompt = problems[0].extra.get("prompt", "")
            first = f"the first has {len(problems[0].prompt_ids)} tokens"
        if self.model is not None:
            params = SamplingParams(max_tokens=self.config.sampling.max_tokens)
            vocabulary = self.model_config.get_text_config().vocab_size
            check_prompts_for(self.model_config, vocabulary, problems, params)
        return "; ".join(filter(None, [f"{len(task)} of {task.name}", first, *task.notes]))

    def check_held_out(self) -> str:
        if not self.config.eval.every:
            return "not used (eval.every = 0)"
        task = load_split(self.config, "eval", self.tokenizer, self.model_config)
        if self.task is not None and (note := compare_splits(self.task, task)):
            self.notes.append(note)
        return f"{len(held_out_problems(self.config, task))}"

    def check_stops(self) -> str:
        """The tokens and strings that end a completion; empty if the tokenizer is not there."""
        if self.tokenizer is None:
            return ""
        files: Any = SimpleNamespace(
            config=self.model_config, generation_config=self._generation_config()
        )
        rule = StopRule.of(files, self.tokenizer, SamplingParams(stop=self.config.sampling.stops))
        if not rule.token_ids and not rule.strings:
            self.notes.append("nothing ends a completion before sampling.max_tokens: set stop_ids")
        ids = [f"{id} {self.tokenizer.decode([id])!r}" for id in sorted(rule.token_ids)]
        return ", ".join([*ids, *map(repr, rule.strings)]) or "none"

    def _generation_config(self) -> Any:
        from transformers import GenerationConfig

        if not os.path.isfile(Path(self.config.model.path, "generation_config.json")):
            return None
        try:
            return GenerationConfig.from_pretrained(self.config.model.path)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"generation_config.json cannot be read: {error}") from error

    def check_grader(self) -> str:
        """Grade right answers and a wrong one; your own reward may want others, and must run."""
        task = self.task or load_split(self.config, "train")
        with build_pool(self.config, task.reward, task) as pool:
            rehearsal = rehearse(task, pool)
        return rehearsal.check(self.config.task.grade_timeout) or str(rehearsal)
