"""Options of `QurlGRPOTrainer` beside TRL's own, and which of TRL's it refuses; free of TRL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from qurl.errors import ConfigError, QurlError
from qurl.integrations.loss import find_objective
from qurl.losses import Surrogate, facts_of
from qurl.quant.formats import FORMATS
from qurl.types import COLDEST

AGGREGATIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "token-mean",
    "grpo": "seq-mean-token-mean",
}
"""The loss types that we have; the others are no clipped surrogates of single tokens."""

_IGNORED = "the engine does not sample like that"
_NO_TERM = "the loss has no such term"
_ROUNDS = "evaluate() would round the trained weights for good"
ALLOWED: Mapping[str, tuple[Sequence[Any], str]] = {
    "loss_type": (tuple(AGGREGATIONS), "the others are no clipped surrogates of single tokens"),
    "importance_sampling_level": (("token",), "our objectives clip tokens, not sequences"),
    "use_liger_kernel": ((False,), "it replaces the loss, or is deprecated, depending on TRL"),
    "use_vllm": ((False,), "the local engine samples; TRL would correct a second time"),
    "use_transformers_continuous_batching": ((False,), "the local engine samples"),
    "top_p": ((1.0,), "a truncated distribution biases the mismatch"),
    "top_k": ((0, None), "a truncated distribution biases the mismatch"),
    "min_p": ((None, 0.0), "a truncated distribution biases the mismatch"),
    "repetition_penalty": ((1.0,), _IGNORED),
    "generation_kwargs": ((None, {}), _IGNORED),
    "cache_implementation": ((None,), _IGNORED),
    "vllm_structured_outputs_regex": ((None,), _IGNORED),
    "neftune_noise_alpha": ((None,), _IGNORED),
    "off_policy_mask_threshold": ((None,), _NO_TERM),
    "top_entropy_quantile": ((1.0,), _NO_TERM),
    "entropy_coef": ((0.0,), _NO_TERM),
    "use_adaptive_entropy": ((False,), _NO_TERM),
    "fp16": ((False,), "the engine computes in BF16 or FP32"),
    "fp16_full_eval": ((False,), _ROUNDS),
    "bf16_full_eval": ((False,), _ROUNDS),
}
"""Fields of GRPOConfig: what they may be, and why."""
LEAST = {"temperature": COLDEST, "max_completion_length": 1}
"""Fields of GRPOConfig that must be numbers, and how large."""
ABSENT = {
    "rollout_func": "the local engine is the rollout function",
    "tools": "completions are single turns",
    "environment_factory": "completions are single turns",
    "peft_config": "the engine reads whole weights, not adapters",
    "quantization_config": "the engine quantizes; the trained weights stay in full precision",
}
"""Arguments of the trainer that must not be given, and why."""
ENGINE = (
    *("kv", "full_layers", "max_batch", "page_size", "kv_tokens", "kv_memory_frac"),
    *("release_kv", "deterministic", "dtype"),
)
"""Options of the local engine that the trainer does not set itself."""
_OPTION = "|".join(ENGINE)
_WORDS = (
    (rf"\b(?:quant|rollout)\.({_OPTION})\b|(?<![.\w])({_OPTION})(?= = )", r"engine['\1\2']"),
    (r'(, or set|\. Set) rollout\.engine = "hf"( to sample with transformers instead)?', ""),
    (r"\b(sampling\.)?max_tokens\b", "max_completion_length"),
    (r"\bquant\.format\b", "quant"),
    (r"\bquant\.update_scale = 1\b", "update_scale = None"),
    (r"\boptim\.lr\b", "learning_rate"),
    (r" at model\.path\b", ""),
    (r"\bthreads = 1\b", "torch.set_num_threads(1)"),
    (r"= true\b", "= True"),
)
"""What errors of the engine and of UAQ call keys of a recipe, and what it is called here."""


@dataclass(frozen=True)
class QurlOptions:
    """What a GRPOConfig has no field for; its `epsilon`, `epsilon_high` and `delta` clip."""

    quant: str = "int8"
    """Format of the copy that samples: none, int8, fp8, ..."""
    objective: str | Surrogate = "acr"
    """ppo_prox, ppo_behav, decoupled, tis, acr, the `module:name` of your own, or the function."""
    cap: float | None = 2.0
    """C, where importance weights are truncated; None: nowhere."""
    update_scale: float | None = None
    """s of UAQ, such as 1.5; None: without. `save_model` undoes it, checkpoints keep it."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """More options of the local engine: kv, full_layers, max_batch, kv_memory_frac, ..."""

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap >= 1:
            raise ConfigError(f"cap = {self.cap} must be at least 1, or None")
        if self.update_scale is not None and not self.update_scale > 1:
            raise ConfigError(f"update_scale = {self.update_scale} must exceed 1, or be None")
        if self.quant not in (known := ("none", *FORMATS)):
            raise ConfigError(f"quant = {self.quant!r} is not one of {', '.join(known)}")
        if unknown := [name for name in self.engine if name not in ENGINE]:
            raise ConfigError(f"engine[{unknown[0]!r}] is not one of {', '.join(ENGINE)}")
        dtype = self.engine.get("dtype")
        if not isinstance(dtype, torch.dtype | None):
            raise ConfigError(f"engine['dtype'] = {dtype!r} must be a torch.dtype or None")
        facts_of(self.surrogate)

    @property
    def surrogate(self) -> Surrogate:
        """The objective's function."""
        return find_objective(self.objective, "objective")


def refusals(given: Mapping[str, Any]) -> Iterator[str]:
    """What stands in the way, of the arguments of a GRPOTrainer."""
    for name, why in ABSENT.items():
        if given.get(name) is not None:
            yield f"{name} is given, but {why}"
    if hasattr(given["model"], "peft_config"):
        yield f"model has adapters, but {ABSENT['peft_config']}"
    for name in ("train_dataset", "eval_dataset"):
        columns = set(getattr(given.get(name), "column_names", None) or ())
        if images := sorted(columns & {"image", "images"}):
            yield f"{name} has the column {images[0]!r}, but the local engine samples from text"
    args = given.get("args")
    for name, (allowed, why) in ALLOWED.items():
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            listed = " or ".join(repr(x) for x in allowed)
            yield f"{name} = {value!r} must be {listed}, because {why}"
    for name, least in LEAST.items():
        value = getattr(args, name, least)
        if value is None or not value >= least:
            yield f"{name} = {value} must be at least {least:g}"
    if args is not None and args.delta is not None:
        upper = 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)
        if args.delta <= upper:
            yield f"delta = {args.delta} must exceed 1 + epsilon_high = {upper:g}"


@contextmanager
def named_as_options() -> Iterator[None]:
    """Let errors inside name options of this trainer and of TRL, not keys of a recipe."""
    try:
        yield
    except QurlError as error:
        error.args = (as_options(str(error)),)
        raise


def as_options(message: str) -> str:
    """A message about keys of a recipe, in the words of this trainer's user."""
    for key, option in _WORDS:
        message = re.sub(key, option, message)
    return message
