"""The arms of each experiment, in the order they run, and the metrics that are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qurl.errors import ConfigError
from qurl.quant.tracking import GROUPS

ROOT = Path(__file__).parents[2]
PPO = "benchmarks/paper/recipes/gsm8k-ppo.toml"
DAPO = "benchmarks/paper/recipes/gsm8k-dapo.toml"
GRPO = "benchmarks/paper/recipes/gsm8k-grpo.toml"
MATH_GRPO = "benchmarks/paper/recipes/math-grpo.toml"
TOY = "recipes/arithmetic-cpu.toml"
UNSAVED = {"save.every": 0, "save.keep": 0}
PLAIN = {"algo.objective": "ppo_prox"}
FULL_PRECISION = {"quant.format": "none", **PLAIN}
UNCORRECTED_FP8 = {"quant.format": "fp8", **PLAIN}
UNIFIED = {"quant.unified": True, "quant.backward": "dgrad"}
FAST_INT8 = {"quant.format": "int8", "optim.lr": 3e-6}
SIGNED = {"task.reward": "benchmarks.rewards:signed_math"}
"""Rewards of -1 and +1, as in DAPO's script."""
GROUPED = {"algo.name": "grpo", "batch.problems": 32, "sampling.group_size": 8}
"""GRPO with as many completions as the PPO recipe."""


@dataclass(frozen=True)
class Arm:
    """One recipe with a few keys changed."""

    name: str
    label: str
    """Name on the page."""
    recipe: str
    """Path relative to the repository root."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    paper: float | None = None
    """The paper's accuracy, in percent."""
    tier: int = 0
    """All seeds of a lower tier run before the next tier."""


@dataclass(frozen=True)
class Experiment:
    """A set of arms to compare."""

    name: str
    arms: Sequence[Arm]
    seeds: Sequence[int] = (0, 1)
    is_timed: bool = False
    """Measures time, so its arms run one at a time."""

    def arm(self, name: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = ", ".join(arm.name for arm in self.arms)
        raise ConfigError(f"{self.name} has no arm {name!r}; it has {names}")


def _ppo(format: str, objective: str, label: str, paper: float | None, tier: int = 0) -> Arm:
    name = "bf16" if format == "none" else f"{format}-{objective}"
    overrides = {"quant.format": format, "algo.objective": objective}
    return Arm(name, label, PPO, overrides, paper, tier)


def _at_rate(rate: str, format: str, objective: str, label: str) -> Arm:
    arm = _ppo(format, objective, f"{label}, lr {rate}", None)
    overrides = {**arm.overrides, "optim.lr": float(rate)}
    return replace(arm, name=f"{arm.name}-lr{rate}", overrides=overrides)


def _fast(format: str, objective: str, label: str) -> Arm:
    """An arm at the paper's learning rate, where our BF16 arm fails too."""
    return _at_rate("1e-5", format, objective, label)


def _signed(arm: Arm) -> Arm:
    """An arm of DAPO with the paper's rewards, evaluated in both precisions."""
    overrides = {**arm.overrides, **SIGNED, "eval.precision": "both"}
    return replace(arm, recipe=DAPO, overrides=overrides)


def _timed(name: str, label: str, format: str, changes: Mapping[str, Any] | None = None) -> Arm:
    few_steps = {"steps": 16, "eval.every": 0, **UNSAVED}
    return Arm(name, label, PPO, {"quant.format": format, **few_steps, **(changes or {})})


TABLE_1 = Experiment(
    "table1",
    (
        _ppo("none", "ppo_prox", "BF16", 55.35),
        _ppo("int8", "ppo_prox", "INT8, uncorrected, Eq. (1)", 48.78),
        _ppo("int8", "tis", "INT8, TIS", 51.40),
        _ppo("int8", "acr", "INT8, ACR", 53.55),
        _ppo("fp8", "ppo_prox", "FP8, uncorrected, Eq. (1)", 0.0, tier=1),
        _ppo("fp8", "tis", "FP8, TIS", 53.60, tier=1),
        _ppo("fp8", "acr", "FP8, ACR", 54.28, tier=1),
        _ppo("int8", "ppo_behav", "INT8, Eq. (3)", None, tier=2),
    ),
)
DAPO_UAQ = Experiment(
    "dapo",
    (
        Arm("int8", "INT8", DAPO, {}, 30.63),
        Arm("int8-uaq1.5", "INT8, UAQ s = 1.5", DAPO, {"quant.update_scale": 1.5}, 31.25),
        Arm(
            "int8-layers1.5",
            "INT8, lr x 1.5 on UAQ's layers",
            DAPO,
            {"experimental.norm_fed_lr_scale": 1.5},
        ),
        Arm("int8-lr1.5", "INT8, lr x 1.5 everywhere", DAPO, {"optim.lr": 1.5e-6}, 29.06),
        Arm("int8-dither", "INT8, dithered masters", DAPO, {"experimental.dither": True}, tier=1),
        Arm("int8-uaq2", "INT8, UAQ s = 2", DAPO, {"quant.update_scale": 2.0}, 29.15, tier=1),
        Arm("int8-lr2", "INT8, lr x 2 everywhere", DAPO, {"optim.lr": 2e-6}, 26.66, tier=1),
    ),
)
DAPO_CORRECTION = Experiment(
    "dapo_correction",
    (
        _signed(_ppo("int8", "ppo_prox", "INT8, uncorrected", 0.0)),
        _signed(_ppo("int8", "tis", "INT8, TIS", 30.29)),
        _signed(_ppo("int8", "acr", "INT8, ACR", 30.63)),
        _signed(_ppo("none", "ppo_prox", "BF16", 31.67)),
        _signed(_ppo("fp8", "ppo_prox", "FP8, uncorrected", 0.0, tier=1)),
        _signed(_ppo("fp8", "tis", "FP8, TIS", 32.60, tier=1)),
        _signed(_at_rate("3e-6", "int8", "ppo_prox", "INT8, uncorrected")),
        _signed(_at_rate("3e-6", "int8", "tis", "INT8, TIS")),
    ),
)
"""The main claim of Table 2: without correction DAPO ends at 0; at 3e-6 GRPO does in 50 steps."""
LONG_HORIZON = Experiment(
    "long_horizon",
    (
        _fast("none", "ppo_prox", "BF16"),
        _fast("int8", "ppo_prox", "INT8, uncorrected"),
        _fast("int8", "tis", "INT8, TIS"),
        _fast("int8", "acr", "INT8, ACR"),
        _ppo("int6", "ppo_prox", "INT6, uncorrected", None),
        _ppo("int6", "tis", "INT6, TIS", None),
        _ppo("int6", "acr", "INT6, ACR", None),
    ),
)
LOW_RATE = Experiment(
    "low_rate",
    (
        _at_rate("1e-6", "int8", "ppo_prox", "INT8, uncorrected"),
        _at_rate("1e-6", "int8", "tis", "INT8, TIS"),
        _at_rate("1e-6", "int8", "acr", "INT8, ACR"),
        _at_rate("1e-6", "none", "ppo_prox", "BF16"),
    ),
)
"""At the actor's rate in FlashRL's public script."""
JET_RL = Experiment(
    "jetrl",
    (
        Arm("bf16", "BF16", GRPO, FULL_PRECISION),
        Arm("fp8-unified", "one FP8 flow", GRPO, {**UNCORRECTED_FP8, **UNIFIED}),
        Arm("fp8-ppo_prox", "FP8 rollouts, uncorrected", GRPO, UNCORRECTED_FP8),
        Arm("fp8-acr", "FP8 rollouts, ACR", GRPO, {"quant.format": "fp8", "algo.objective": "acr"}),
        Arm("bf16-8bit", "BF16, 8-bit moments", GRPO, {**FULL_PRECISION, "optim.moments": "8bit"}),
        Arm("int8-ppo_prox", "INT8 rollouts, uncorrected", GRPO, {"quant.format": "int8"} | PLAIN),
        Arm("int8-tis", "INT8, TIS", GRPO, {"quant.format": "int8", "algo.objective": "tis"}),
    ),
)
"""GRPO: one flow against two, in FP8; and whether GRPO needs correction in INT8."""
GRPO_RATE = Experiment(
    "grpo_rate",
    (
        Arm("int8-ppo_prox", "INT8, uncorrected", GRPO, {**FAST_INT8, **PLAIN}),
        Arm("int8-tis", "INT8, TIS", GRPO, {**FAST_INT8, "algo.objective": "tis"}),
    ),
)
"""GRPO at the rate of Table 1, where PPO without correction has collapsed after 75 steps."""
MATH = Experiment(
    "math",
    (
        Arm("bf16", "BF16", MATH_GRPO, FULL_PRECISION),
        Arm(
            "int8-kv-acr",
            "INT8 + FP8 KV, ACR",
            MATH_GRPO,
            {
                "quant.format": "int8",
                "quant.kv": "fp8",
                "algo.objective": "acr",
                "correction.mode": "decoupled",
            },
        ),
        Arm("fp8-unified", "one FP8 flow", MATH_GRPO, {**UNCORRECTED_FP8, **UNIFIED}),
    ),
    seeds=(0,),
    is_timed=True,
)
"""A harder task and a larger model; what counts is the time to the same accuracy."""
SPEED = Experiment(
    "speed",
    (
        _timed("bf16", "PPO, BF16", "none"),
        _timed("int8", "PPO, INT8", "int8"),
        _timed("fp8", "PPO, FP8", "fp8"),
        _timed("grpo-bf16", "GRPO, BF16", "none", GROUPED),
        _timed("grpo-int8", "GRPO, INT8", "int8", GROUPED),
        _timed(
            "grpo-int8-compile",
            "GRPO, INT8, compiled",
            "int8",
            {**GROUPED, "model.compile": True},
        ),
    ),
    seeds=(0,),
    is_timed=True,
)
TOY_CHECK = Experiment(
    "toy", tuple(Arm(f"int8-{o}", f"INT8, {o}", TOY, {"algo.objective": o}) for o in ("tis", "acr"))
)
"""Not in the paper: checks on any machine that arms stop, resume and get collected."""

EXPERIMENTS: Mapping[str, Experiment] = {
    e.name: e
    for e in (
        *(TABLE_1, DAPO_UAQ, DAPO_CORRECTION, LONG_HORIZON, LOW_RATE, JET_RL, GRPO_RATE, MATH),
        *(SPEED, TOY_CHECK),
    )
}

LAYER_GROUPS = tuple(dict.fromkeys(GROUPS.values()))
LAYER_SUFFIXES = ("", *(f"/{group}" for group in LAYER_GROUPS))
VISIBILITY = ("update_norm", "quant_error", "code_flip_frac", "update_cosine", "update_proj")
COLUMNS = (
    *("reward/mean", "reward/accuracy", "response_length/mean", "response_length/clip_ratio"),
    *("actor/entropy", "actor/grad_norm", "actor/ppo_kl", "critic/vf_explained_var"),
    *("actor/pg_clipfrac", "actor/clip_frac_high", "actor/clip_frac_low"),
    *("acr/rescued_frac", "acr/max_upper"),
    *("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/rollout_is_max"),
    *("rollout_corr/truncated_frac", "rollout_corr/rollout_is_eff_sample_size"),
    *("correction/gap_tail", "correction/prox_skipped"),
    *("sampling/rounds", "sampling/groups_kept_frac", "uaq/unscaled_grad_norm"),
    *(f"uaq/{metric}{group}" for metric in VISIBILITY for group in LAYER_SUFFIXES),
    "perf/rollout_tokens_per_s",
    *(f"timing_s/{part}" for part in ("sync", "track", "rollout", "grade", "prox", "update")),
    *("timing_s/eval", "timing_s/save"),
)
"""Metrics copied from a run; the others stay in its metrics.jsonl."""
