"""TRL's GRPOTrainer, sampling from a quantized copy of its model and trained by our objectives.

    from qurl.integrations.trl import QurlGRPOTrainer as GRPOTrainer

`rollout_func` gives it the local engine, `_compute_loss` our loss. Datasets, rewards, advantages,
schedules, checkpoints and trackers stay TRL's. Shapes: B sequences, T completion tokens.

TRL does not promise `_compute_loss`, `_get_per_token_logps_and_entropies`, `_tokenize_prompts` and
`current_gradient_accumulation_steps`; nor does transformers `_save`, `_save_checkpoint` and
`_load_from_checkpoint`. tests/trl holds them to their meaning in the oldest and the newest TRL.
"""

from __future__ import annotations

import inspect
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl.config.schema import QuantConfig
from qurl.correction import mismatch_metrics
from qurl.errors import ConfigError
from qurl.integrations.loss import corrected_loss
from qurl.integrations.trl_options import AGGREGATIONS, QurlOptions, named_as_options, refusals
from qurl.losses import Surrogate, aggregate, facts_of, kl_penalty
from qurl.objectives import with_facts
from qurl.plugins import import_extra
from qurl.quant import rescale_, unscale_
from qurl.quant.scaling import uaq_scale
from qurl.quant.tracking import UpdateTracker
from qurl.rollout import Engine, build_engine
from qurl.rollout.engine import check_prompts
from qurl.seeds import derive_seed
from qurl.trainer.meter import Meter
from qurl.trainer.policy import disable_dropout_
from qurl.types import Completion, Problem, SamplingParams

__all__ = ["QurlGRPOTrainer", "QurlOptions"]

GRPOTrainer: Any = import_extra("trl", "trl", "trl", "QurlGRPOTrainer").GRPOTrainer
MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of accelerate's mixed precisions."""
NUM_SHOWN = 60
"""Characters of a prompt in an error."""
MOST_CHECKED = 100_000
"""Rows of a dataset that are checked before training."""


class QurlGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with `options: QurlOptions`. Each process has an engine of its own."""

    def __init__(self, *args: Any, options: QurlOptions | None = None, **kwargs: Any) -> None:
        self.options = options or QurlOptions()
        self._surrogate = self.options.surrogate
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments
        if found := list(refusals(given)):
            raise ConfigError("QurlGRPOTrainer cannot train like this: " + "; ".join(found))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(*args, **kwargs, rollout_func=self._roll_out)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigError("FSDP and DeepSpeed cut weights, and the engine reads whole ones")
        self._check_datasets()
        self._meters = {"train": Meter(), "eval": Meter()}
        self._num_rollouts: Counter[tuple[str, int]] = Counter()  # at each (mode, step)
        self._is_checkpointing, self._tracked_step = False, -1
        model = self._plain_model
        disable_dropout_(model)  # the engine has none; TRL's disable_dropout misses F.dropout
        self._prepare(model)
        if self.args.sync_ref_model and self.ref_model is not None:
            # TRL averages weights of the two: they must be scaled alike.
            self._prepare(self.accelerator.unwrap_model(self.ref_model))
        dtype = self._computed_in()
        full_layers = self.options.engine.get("full_layers", 0)
        self._tracker = UpdateTracker(
            self.options.quant, QuantConfig.track_rows, dtype, full_layers
        )
        sampled = {"quant": self.options.quant, "compute_dtype": dtype, **self.options.engine}
        with named_as_options():
            self.engine: Engine = build_engine("local", model, self.processing_class, **sampled)
        self._warn_if_ratio_is_one()

    @property
    def _plain_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_completion_length, temperature=self.temperature)

    @named_as_options()
    def _check_datasets(self) -> None:
        """Raise if the engine would refuse a prompt, which TRL may draw only after hours."""
        model = self._plain_model
        for name, dataset in named_datasets(self.train_dataset, self.eval_dataset):
            for start in range(0, min(len(dataset), MOST_CHECKED), 1000):
                prompts = dataset[start : start + 1000]["prompt"]
                names = [f"{name}[{row}]: {shown(p)}" for row, p in enumerate(prompts, start)]
                problems = map(Problem, names, self._tokenize(prompts))
                check_prompts(list(problems), self._params, model)

    def _tokenize(self, prompts: list[Any]) -> list[list[int]]:
        prompt_ids, images, _ = self._tokenize_prompts(prompts)
        if images is not None:
            raise ConfigError("the prompts hold images; the local engine samples from text alone")
        return prompt_ids

    def _computed_in(self) -> torch.dtype:
        """Dtype that weights are rounded to when the trainer uses them."""
        autocast = self.accelerator.mixed_precision  # GRPOConfig's, else its launcher's
        dtype = MIXED.get(autocast, next(self._plain_model.parameters()).dtype)
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"the model would be trained in {dtype} (mixed_precision = {autocast!r}), but the "
                "engine computes in BF16 or FP32: set bf16 = True in GRPOConfig, and load the "
                "model in float32 or bfloat16"
            )
        return dtype

    def _prepare(self, model: Any) -> None:
        """Apply UAQ, once, before the optimizer exists."""
        if (carried := uaq_scale(model)) != 1:
            warnings.warn(
                f"the model carried UAQ with s = {carried:g}; it was folded back", stacklevel=3
            )
            unscale_(model)
        if self.options.update_scale is not None:
            with named_as_options():
                rescale_(model, self.options.update_scale)

    def _warn_if_ratio_is_one(self) -> None:
        every = self.args.steps_per_generation * self.num_iterations
        is_one = self.args.gradient_accumulation_steps % every == 0
        if is_one and facts_of(self._surrogate).against == "prox":
            warnings.warn(
                "each generation gets one update, so R = pi / pi_prox is always 1: nothing is "
                "clipped, and acr equals tis. Set steps_per_generation to a multiple of "
                f"gradient_accumulation_steps = {self.args.gradient_accumulation_steps}, or "
                "num_iterations > 1",
                stacklevel=3,
            )

    def _next_seed(self) -> int:
        """Seed of the next rollout; a resumed run draws what an unbroken one does."""
        place = (self._mode, self.state.global_step)
        self._num_rollouts[place] += 1
        numbers = (self._num_rollouts[place], self.accelerator.process_index)
        return derive_seed(self.args.seed, "trl", *place, *numbers)

    @named_as_options()
    def _roll_out(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: sync, then sample."""
        del trainer
        prompt_ids = self._tokenize(prompts)
        # Always: weights may also change between updates, by load_best_model_at_end for example.
        synced = self.engine.sync(self._plain_model, version=self.state.global_step)
        params = replace(self._params, seed=self._next_seed())
        start = time.perf_counter()
        completions = sample(self.engine, prompt_ids, params, [shown(p) for p in prompts])
        seconds = time.perf_counter() - start
        num_tokens = sum(len(c.token_ids) for c in completions)
        metrics = {
            "sync/canary_gap": synced.canary_gap,
            "sync/bytes": float(synced.bytes),
            "sync/seconds": synced.seconds,
            "timing_s/rollout": seconds,
            "perf/rollout_tokens": float(num_tokens),
            "perf/rollout_tokens_per_s": num_tokens / seconds,
        }
        if self._mode == "train" and self._tracked_step != self.state.global_step:
            self._tracked_step = self.state.global_step
            metrics |= self._tracker.measure(self._plain_model)
        self._meters[self._mode].add(metrics)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(c.token_ids) for c in completions],
            "logprobs": [list(c.logprobs) for c in completions],
        }

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        mask, advantages = inputs["completion_mask"], inputs["advantages"]  # [B, T], [B]
        logp, entropy, *_ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], mask], dim=1),
            mask.shape[1],
            compute_entropy=True,
        )
        # Without it, this is the first forward after the rollout: prox is the present policy.
        prox = inputs.get("old_per_token_logps")
        prox, behav = logp.detach() if prox is None else prox, inputs["sampling_per_token_logps"]
        surrogate, stats = self._surrogate, {"actor/entropy": aggregate(entropy.detach(), mask)}
        if self.beta != 0.0:
            kl = kl_penalty(logp, inputs["ref_per_token_logps"], "k3")
            surrogate = penalized(surrogate, kl, self.beta, self.args.use_bias_correction_kl)
            stats["actor/ref_kl"] = aggregate(kl.detach(), mask)
        total, found = corrected_loss(
            *(logp, prox, behav),
            advantages.reshape(len(mask), -1).expand_as(logp),
            mask,
            objective=surrogate,
            cap=self.options.cap,
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            dual_clip=self.args.delta,
            aggregation=AGGREGATIONS[self.loss_type],
            denominator=1.0,
        )
        cap = facts_of(surrogate).cap(self.options.cap)
        self._note(stats | found | mismatch_metrics(prox, behav, mask, cap=cap), mask)
        return self._normalized(total, mask, inputs["num_items_in_batch"])

    def _normalized(self, total: Tensor, mask: Tensor, num_items: Tensor) -> Tensor:
        """A sum over tokens, or over means of sequences, divided as TRL's loss of this type is."""
        num_parts = self.current_gradient_accumulation_steps if self._mode == "train" else 1.0
        if self.loss_type == "dapo":
            whole = num_items.clamp(min=1.0) / self.accelerator.num_processes
            if self._mode == "train":  # of the generation batch; an update has a part of it
                whole = whole * num_parts / self.args.steps_per_generation
            return total / whole
        divisors = {
            "grpo": len(mask),
            "bnpo": mask.sum().clamp(min=1.0),
            "dr_grpo": len(mask) * self.max_completion_length,
        }
        return total / divisors[self.loss_type] / num_parts

    def _note(self, stats: Mapping[str, Tensor | float], mask: Tensor) -> None:
        """Remember statistics of this micro-batch on all processes, each weighted by its tokens."""
        from accelerate.utils import gather_object

        own = ({name: float(value) for name, value in stats.items()}, float(mask.sum()))
        for found, num_tokens in gather_object([own]):
            if num_tokens:
                self._meters[self._mode].add(found, num_tokens)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode, prefix = self._mode, "" if self._mode == "train" else "eval_"
        found, self._meters[mode] = self._meters[mode].summary(), Meter()
        logs |= {f"{prefix}{name}": value for name, value in found.items()}  # evaluate returns it
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._is_checkpointing = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_checkpointing = False

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save with UAQ undone; a checkpoint keeps it, as its optimizer has moments of it."""
        model = self._plain_model
        if self._is_checkpointing or uaq_scale(model) == 1 or not self.args.should_save:
            return super()._save(output_dir, state_dict)
        with unscaled(model):
            super()._save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint, "config.json")
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        saved = config.get("qurl_uaq")
        if saved != (own := getattr(self._plain_model.config, "qurl_uaq", None)):
            raise ConfigError(
                f"{path} has qurl_uaq = {saved}, and this trainer {own}: resume with the "
                "update_scale that the checkpoint was trained with"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def sample(
    engine: Engine,
    prompt_ids: Sequence[Sequence[int]],
    params: SamplingParams,
    texts: Sequence[str],
) -> list[Completion]:
    """One completion per prompt. Equal neighbours are one problem, prefilled once.

    Errors of the engine name a problem by its row and text.
    """
    runs = [list(run) for _, run in groupby(range(len(prompt_ids)), lambda row: prompt_ids[row])]
    found: dict[int, Completion] = {}
    for size in sorted({len(run) for run in runs}):
        firsts = [run[0] for run in runs if len(run) == size]
        problems = [Problem(f"{row}: {texts[row]}", prompt_ids[row]) for row in firsts]
        rollouts = engine.generate(problems, replace(params, group_size=size))
        for first, rollout in zip(firsts, rollouts, strict=True):
            found |= enumerate(rollout.completions, start=first)
    return [found[row] for row in range(len(prompt_ids))]


def named_datasets(train: Any, evaluated: Any) -> Iterator[tuple[str, Any]]:
    """The datasets with rows that can be looked at, by the names of the arguments."""
    kind = import_extra("datasets", "datasets", "trl", "QurlGRPOTrainer").Dataset
    named = {"train_dataset": train}
    if isinstance(evaluated, Mapping):
        named |= {f"eval_dataset[{key!r}]": dataset for key, dataset in evaluated.items()}
    else:
        named["eval_dataset"] = evaluated
    for name, dataset in named.items():
        if isinstance(dataset, kind) and "prompt" in dataset.column_names:
            yield name, dataset.select_columns("prompt")


def shown(prompt: Any) -> str:
    """The beginning of a prompt, or of its last message."""
    text = prompt if isinstance(prompt, str) else "".join(str(m["content"]) for m in prompt[-1:])
    return text if len(text) <= NUM_SHOWN else text[:NUM_SHOWN] + "..."


def penalized(surrogate: Surrogate, kl: Tensor, beta: float, is_weighted: bool) -> Surrogate:
    """An objective minus beta KL, where TRL has it; weighted by the ratio, if TRL does so."""

    @with_facts(facts_of(surrogate))
    def objective(tokens: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found = surrogate(tokens)
        value, stats = (found, {}) if isinstance(found, Tensor) else found
        return value - beta * (kl * tokens.ratio if is_weighted else kl), stats

    return objective


@contextmanager
def unscaled(model: Any) -> Iterator[None]:
    """The model without UAQ; afterwards its weights are what they were, to the bit."""
    record = model.config.qurl_uaq
    kept = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
    unscale_(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), kept, strict=True):
                parameter.copy_(values)
        model.config.qurl_uaq = record
