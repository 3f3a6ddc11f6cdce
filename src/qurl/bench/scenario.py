"""A recipe on hardware: what its model, prompts and completions are, and how long a step takes.

What is not here, a GPU, a model, data or a run, is replaced by an assumption that a note states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from qurl.bench import probe
from qurl.bench.arms import Arm
from qurl.bench.cluster import ASSUMPTIONS
from qurl.bench.forecast import (
    StepSeconds,
    Work,
    kv_bytes,
    rollout_seconds,
    skips_prox,
    step_seconds,
)
from qurl.bench.limits import Speed, find_speed, speed_of
from qurl.bench.plan import Planner, Prediction
from qurl.bench.shapes import SHAPES
from qurl.config import Config
from qurl.errors import ConfigError, QurlError, first_line
from qurl.objectives import ADVANTAGES, Advantage
from qurl.ops.device import pick_device
from qurl.ops.target import Target
from qurl.run.budget import GIB, memory_rows, peak_memory
from qurl.run.cards import Card, find_card
from qurl.run.directory import METRICS, read_jsonl
from qurl.run.shape import Shape, measure_model
from qurl.run.shares import CACHE
from qurl.run.splits import load_split
from qurl.tasks.task import Task
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.policy import load_model_config, load_tokenizer

BASE = "none"
"""The arm that others are compared with."""
PROMPTS_READ = 64


@dataclass(frozen=True)
class Hardware:
    """Where the recipe is to run."""

    name: str
    memory: float  # bytes of one GPU
    speed: Speed
    has_fp8: bool
    card: Card | None = None  # None = measured here
    num_gpus: int = 1
    notes: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        return self.card is None


def find_hardware(gpu: str | None, gpus: int | None) -> Hardware:
    """A named card, the GPU that is here, or the one that was measured."""
    if gpu is None and gpus is None and torch.cuda.is_available():
        device = pick_device("cuda")
        target, memory = Target.of(device), torch.cuda.get_device_properties(device).total_memory
        speed = find_speed(device)
        return Hardware(target.name, memory, speed, target.has_fp8)
    card = find_card(gpu or "H200")
    notes = [f"computed, not measured: rates are those of an H200{_not_here(gpu)}"]
    if card.name != "H200":
        notes.append(
            f"extrapolated: {card.name} is taken at the share of its data sheet that an H200 "
            "reaches (bandwidth 90 %, products 80 %), with the H200's launch times; the range "
            "does not cover this"
        )
    gpus = gpus or 1
    if gpus > 1:
        notes.append(
            f"extrapolated: nothing was ever timed on {gpus} GPUs, and the range does not cover "
            "it. The table of arms has each on its fastest placement without ahead"
        )
        notes += [f"{source}: {text}" for source, text in ASSUMPTIONS]
    return Hardware(card.name, card.memory, speed_of(card), card.has_fp8, card, gpus, tuple(notes))


def _not_here(gpu: str | None) -> str:
    if gpu:
        return ""
    reason = "--gpus plans elsewhere" if torch.cuda.is_available() else "there is no GPU here"
    return f"; {reason}, so one is assumed (--gpu names another)"


def find_shape(config: Config, name: str | None) -> Shape:
    """The shape of model.path, or a named one of Qwen2.5."""
    if name is not None:
        if name not in SHAPES:
            raise ConfigError(f"--shape {name!r} is not one of {', '.join(SHAPES)}")
        return SHAPES[name]
    try:
        shape = measure_model(config)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{first_line(error)}. To plan with a shape of Qwen2.5: --shape {'|'.join(SHAPES)}"
        ) from error
    check_family(shape)
    return shape


def check_family(shape: Shape) -> None:
    """Forecasts know the products of the Llama family only."""
    num_known = shape.num_layers * sum(n * k for n, k in shape.products.values())
    if abs(num_known - shape.num_quantized) > 0.01 * shape.num_quantized:
        raise ConfigError(
            "qurl advise knows dense models of the Llama family (Llama, Mistral, Qwen2, Qwen3); "
            "measure this one with qurl bench step"
        )


def open_task(config: Config, is_shape: bool) -> tuple[Task | None, list[str]]:
    """The training problems if tokenizer and data are here; else None, and a note."""
    path, longest = config.model.path, config.task.max_prompt_tokens
    if is_shape:
        return None, [f"prompts are taken to have task.max_prompt_tokens = {longest}"]
    try:
        is_scratch = path == "scratch"
        tokenizer = build_tokenizer() if is_scratch else load_tokenizer(path, retries_hub=False)
        model = None if is_scratch else load_model_config(path, retries_hub=False)
        return load_split(config, "train", tokenizer, model), []
    except (QurlError, OSError) as error:
        return None, [f"prompts are taken to have {longest} tokens: {first_line(error)}"]


def count_prompt_tokens(config: Config, task: Task | None) -> int:
    """The mean of the first prompts."""
    if task is None:
        return config.task.max_prompt_tokens
    lengths = [len(task[i].prompt_ids) for i in range(min(PROMPTS_READ, len(task)))]
    return max(1, round(sum(lengths) / len(lengths)))


def find_tokens(config: Config) -> tuple[int, str]:
    """Mean tokens of a completion, of the run so far or the most there may be, and a note."""
    most, metrics = config.sampling.max_tokens, Path(config.run_dir, METRICS).expanduser()
    try:
        rows = read_jsonl(metrics)
    except (OSError, ValueError):
        rows = []
    means = [row["response_length/mean"] for row in rows if "response_length/mean" in row]
    if not means:
        return most, (
            "all completions are taken to have sampling.max_tokens; shorter ones make rollouts "
            "a larger part of the step: give their mean length as --tokens N"
        )
    return max(1, round(median(means))), f"completions are as long as in {config.run_dir} so far"


@dataclass(frozen=True)
class Scenario:
    """A recipe on hardware."""

    config: Config
    hardware: Hardware
    shape: Shape
    prompt_tokens: int
    new_tokens: int

    @property
    def planner(self) -> Planner:
        hardware = self.hardware
        assert hardware.card is not None, "several GPUs are planned, not measured"
        return Planner(self.config, self.shape, hardware.card, hardware.num_gpus)

    def place(self, arm: Arm) -> Prediction:
        """The fastest placement that fits and trains on what was just sampled."""
        found = self.planner.best(arm, self.work(arm))
        found = [p for p in found if not p.placement.ahead]
        return min(found, key=lambda p: (not p.fits, p.step))

    def memory(self, arm: Arm) -> tuple[float, float]:
        """Bytes at the peak of one GPU, and of its KV cache."""
        if self.hardware.num_gpus > 1:
            found = self.place(arm)
            return GIB * max(found.trainer_gib, found.engine_gib), 0.0
        config = arm.apply(self.config)
        rows = memory_rows(config, self.shape, self.hardware.memory, is_cuda=True)
        return peak_memory(config, rows), rows.get(CACHE, 0.0)

    def work(self, arm: Arm) -> Work:
        """The work of one GPU. The planner decides how several share sequences and caches."""
        config, num_gpus = self.config, self.hardware.num_gpus
        sequences = config.sequences_per_step / num_gpus
        cache = self.memory(arm)[1] if num_gpus == 1 else 0.0
        tokens = cache / kv_bytes(self.shape, arm)
        # Sequences of a batch have all lengths up to the longest, about.
        capacity = max(1.0, tokens / (self.prompt_tokens + self.new_tokens / 2))
        advantage = ADVANTAGES.get(config.algo.advantage, Advantage())
        mode, prox = config.correction.mode, 0.0
        if mode == "decoupled" or (mode == "auto" and not skips_prox(arm)):
            prox = 1.0 if advantage.needs_prox else 1 - 1 / config.batch.minibatches
        return Work(
            sequences=sequences,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            together=min(sequences, config.rollout.max_batch, capacity),
            longest=max(config.sampling.max_tokens, self.new_tokens),
            num_updates=config.updates_per_step,
            num_passes=config.batch.epochs,
            num_forwards=prox + (config.algo.kl_coef > 0) + advantage.needs_critic,
            num_networks=1 + advantage.needs_critic,
            has_checkpointing=config.model.gradient_checkpointing,
            has_lora=config.model.lora_rank > 0,
            microbatch_tokens=config.batch.microbatch_tokens,
        )

    def forecast(self, arm: Arm) -> StepSeconds:
        if self.hardware.num_gpus == 1:
            return step_seconds(self.shape, arm, self.hardware.speed, self.work(arm))
        found = self.place(arm)
        rest = found.rest + found.sync + found.driver
        return StepSeconds(found.rollout, 0.0, found.train, rest)

    def measure(self, arms: Sequence[Arm], device: torch.device) -> dict[str, StepSeconds]:
        """Forecasts, scaled so that they hit what a shorter step takes here.

        What does not fit the memory is not trained, so its time stays computed.
        """
        work, shape = self.work(arms[0]), self.shape
        alike = replace(work, sequences=work.together, longest=0)
        group = min(self.config.sampling.group_size, int(work.together))
        rollout_arms = [arm for arm in arms if not arm.is_unified]
        rollouts = probe.measure_rollouts(shape, rollout_arms, alike, group, device)
        fitting = [arm for arm in arms if self.memory(arm)[0] < self.hardware.memory]
        trained = [arm for arm in fitting if arm.name == BASE or arm.is_unified]
        done, training = probe.measure_training(shape, trained, work, self.config, device)
        seconds = {}
        for arm in arms:
            forecast, speed = self.forecast(arm), self.hardware.speed
            rollout = rollouts.get(arm.name) or rollouts[arm.format]
            rollout *= forecast.rollout / rollout_seconds(shape, arm, speed, alike)
            if found := training.get(arm.name if arm.is_unified else BASE):
                part = step_seconds(shape, arm, speed, done)
                forecast = replace(
                    forecast,
                    forwards=found.forwards * forecast.forwards / part.forwards,
                    update=found.update * forecast.update / part.update,
                )
            seconds[arm.name] = replace(forecast, rollout=rollout)
        return seconds

    def describe(self) -> str:
        work, hardware = self.work(Arm.of(BASE)), self.hardware
        gpus = f"{hardware.num_gpus} x {hardware.name}" if hardware.num_gpus > 1 else hardware.name
        total = work.sequences * hardware.num_gpus
        how = "measured" if hardware.is_here else "computed"
        return (
            f"{self.shape.num_parameters / 1e9:.2g}B parameters, {total:.0f} sequences of "
            f"{work.prompt_tokens} + {work.new_tokens} tokens, on {gpus} ({how})"
        )

    def notes(self) -> list[str]:
        notes = []
        if self.config.algo.dynamic_sampling:
            notes.append("dynamic sampling: only one round of rollouts is counted")
        if self.config.correction.mode == "auto":
            notes.append(
                'with correction.mode = "auto" BF16 and unified arms skip the prox forward; int8 '
                "and fp8 need it"
            )
        if self.config.model.lora_rank:
            notes.append(
                "extrapolated: training with adapters is forecast from two steps (1.5B and 7B, "
                "rank 32); the range does not cover this"
            )
        if self.hardware.is_here and self.memory(Arm.of(BASE))[0] > self.hardware.memory:
            notes.append("training does not fit this GPU by estimate, so its time is computed")
        return notes
