"""Which settings go together: what is refused at start-up, and what only gets a warning.

Rules read facts about objectives and advantages (`qurl.objectives`), never their names. Facts of
your own parts are known once those are loaded; without them, the rules that need them are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qurl.config.schema import Config, Section
from qurl.errors import ConfigError
from qurl.objectives import ADVANTAGES, OBJECTIVES, Advantage, Objective
from qurl.plugins import check_plugin, is_users_own

GENERATED = ("arithmetic", "countdown")
BUILT_IN: Mapping[str, Sequence[str]] = {
    "algo.objective": tuple(OBJECTIVES),
    "algo.advantage": tuple(ADVANTAGES),
    "rollout.engine": ("local", "hf"),
    "rollout.episode": ("",),
    "sampling.select": ("shuffle",),
    "task.name": (*GENERATED, "gsm8k", "math", "file", "gym:<name>", "<path>.jsonl"),
    "task.reward": ("auto", "math", "exact", "countdown", "gym:<name>"),
}
"""Keys that name a part, and their built-in parts; `module:name` is one of your own."""

NEEDS_EVAL_PATH = "set task.eval_path, because a file has no held-out problems of its own"

_DIVERGENCES = ("k1", "k2", "k3")
_REJECTIONS = (
    *(f"token_{k}" for k in _DIVERGENCES),
    *(f"seq_{how}_{k}" for how in ("sum", "mean", "max") for k in _DIVERGENCES),
)


def find_mistakes(
    config: Config, objective: Objective | None = None, advantage: Advantage | None = None
) -> list[str]:
    """Combinations that cannot work, each with what to do about it."""
    objective = objective or OBJECTIVES.get(config.algo.objective)
    advantage = advantage or ADVANTAGES.get(config.algo.advantage)
    return [
        *_part_mistakes(config),
        *_algorithm_mistakes(config, objective, advantage),
        *_correction_mistakes(config, objective),
        *_other_mistakes(config),
    ]


def find_warnings(
    config: Config, objective: Objective | None = None, advantage: Advantage | None = None
) -> list[str]:
    """Choices that work but are probably not what was meant."""
    objective = objective or OBJECTIVES.get(config.algo.objective)
    advantage = advantage or ADVANTAGES.get(config.algo.advantage)
    facts = (objective, advantage)
    return [*_doubts(config, *facts), *_idle_settings(config, *facts)]


def needs_file(task: str) -> bool:
    """Does a built-in task read its problems from a file?"""
    return not _is_generated(task) and not is_users_own(task)


def _is_generated(task: str) -> bool:
    return task in GENERATED or task.startswith("gym:")


def _part_mistakes(config: Config) -> Iterator[str]:
    for key, names in BUILT_IN.items():
        section, _, field = key.partition(".")
        value = getattr(getattr(config, section), field)
        is_gym = value.startswith("gym:") and "gym:<name>" in names
        is_file = key == "task.name" and "." in value
        if is_users_own(value):
            try:
                check_plugin(value, key)
            except ConfigError as error:
                yield str(error)
        elif value not in names and not is_gym and not is_file:
            known = f"one of {', '.join(names)}" if any(names) else "empty"
            yield f"{key} = {value!r} is not {known}, nor module:name"


def _algorithm_mistakes(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    algo, size = config.algo, config.sampling.group_size
    if size < 2 and advantage and advantage.needs_group:
        yield (
            f"sampling.group_size = {size}: algo.advantage = {algo.advantage!r} compares "
            "completions of one problem and needs at least 2"
        )
    if size < 2 and algo.dynamic_sampling:
        yield f"sampling.group_size = {size}: algo.dynamic_sampling needs at least 2"
    if config.batch.minibatches > config.batch.problems * size:
        yield (
            f"batch.minibatches = {config.batch.minibatches} is more than the "
            f"{config.batch.problems * size} sequences of a step"
        )
    if advantage and not advantage.needs_critic:
        critics = " or ".join(repr(name) for name, a in ADVANTAGES.items() if a.needs_critic)
        if algo.name == "ppo":
            yield f"algo.advantage = {algo.advantage!r}: algo.name = 'ppo' means {critics}"
        if algo.kl_in_reward:
            yield f"algo.kl_in_reward = true needs algo.advantage = {critics}; use the loss term"
    if config.experimental.weighted_kl and objective and not objective.is_weighted:
        yield f"experimental.weighted_kl = true: {algo.objective!r} has no importance weight"
    if config.experimental.dither and config.model.compute_dtype == "float32":
        yield (
            'experimental.dither = true needs model.compute_dtype = "bfloat16": a trainer in FP32 '
            "sees every update"
        )


def _correction_mistakes(config: Config, objective: Objective | None) -> Iterator[str]:
    correction, name = config.correction, config.algo.objective
    if correction.mode == "bypass":
        if objective and objective.against != "behav":
            yield (
                f"correction.mode = 'bypass' sets prox := behav, so algo.objective = {name!r} has "
                "nothing to correct; set algo.objective = 'ppo_behav'"
            )
        if correction.reject or correction.veto is not None:
            yield (
                "correction.mode = 'bypass' computes no mismatch, so correction.reject and "
                "correction.veto have nothing to look at"
            )
    if correction.kind == "icepop" and objective and not objective.is_truncated:
        truncated = " or ".join(repr(n) for n, o in OBJECTIVES.items() if o.is_truncated)
        yield f"correction.kind = 'icepop' needs algo.objective = {truncated}, not {name!r}"
    if correction.icepop_low >= correction.icepop_high:
        yield (
            f"correction.icepop_low = {correction.icepop_low} must lie below "
            f"correction.icepop_high = {correction.icepop_high}"
        )
    for rule in correction.reject:
        try:
            parse_rejection(rule)
        except ValueError as error:
            yield f"correction.reject: {error}"


def _other_mistakes(config: Config) -> Iterator[str]:
    task, scratch, save = config.task, config.model.scratch, config.save
    if task.name == "file" and not (task.path or task.eval_path):
        yield "task.name = 'file' needs task.path"
    for key, path in {"path": task.path, "eval_path": task.eval_path}.items():
        if path and _is_generated(task.name):
            yield (
                f"task.{key} = {path!r}, but task.name = {task.name!r} draws its problems and "
                "reads no file; set task.name = 'file', 'gsm8k' or 'math'"
            )
    if config.eval.every and needs_file(task.name) and not task.eval_path:
        yield f"eval.every = {config.eval.every}: {NEEDS_EVAL_PATH}"
    if config.model.path == "scratch" and scratch.hidden_size % (2 * scratch.heads) != 0:
        yield (
            f"model.scratch.hidden_size = {scratch.hidden_size} must be a multiple of "
            f"2 x model.scratch.heads = {2 * scratch.heads}"
        )
    if config.quant.kv != "none" and config.rollout.engine == "hf":
        yield (
            f"quant.kv = {config.quant.kv!r} needs rollout.engine = 'local': transformers keeps "
            "its cache in the compute precision"
        )
    if save.every > 0 and save.keep == 0:
        yield (
            f"save.every = {save.every} asks for checkpoints, save.keep = 0 for none; set "
            "save.every = 0 or save.keep >= 1"
        )


def _doubts(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    algo, quant, optim = config.algo, config.quant, config.optim
    if objective and objective.is_widened:
        if config.updates_per_step == 1:
            yield (
                "ACR cannot act: with one update per rollout batch the ratio is 1 everywhere and "
                "acr equals tis; raise batch.minibatches or batch.epochs"
            )
        if algo.cap is None:
            yield "ACR cannot act: algo.cap = none truncates nothing, so acr equals decoupled"
        if config.correction.kind == "icepop":
            yield "ACR cannot act: correction.kind = 'icepop' truncates nothing; acr equals tis"
    if objective and not objective.is_weighted and (quant.format, quant.kv) != ("none", "none"):
        yield (
            f"algo.objective = {algo.objective!r} does not correct the mismatch of quantized "
            "rollouts; use 'acr' or 'tis' unless you compare objectives"
        )
    if advantage and advantage.needs_critic and config.critic.pretrain_steps >= config.steps:
        yield (
            f"critic.pretrain_steps = {config.critic.pretrain_steps} of steps = {config.steps}: "
            "the policy is never trained"
        )
    if quant.format == "none" and quant.update_scale > 1:
        yield "UAQ without quantization only changes the learning rate of the scaled layers"
    if quant.update_scale > 1 and optim.lr >= 1e-5:
        yield f"UAQ with optim.lr = {optim.lr}: the paper turns it off from 1e-5 up"
    if quant.format == "none" and quant.kv != "none" and config.eval.every:
        yield (
            f"evaluations named full answer with quant.kv = {quant.kv!r}: with quant.format = "
            "'none' they use the actor itself"
        )
    if optim.warmup_steps > config.steps:
        yield (
            f"optim.warmup_steps = {optim.warmup_steps} is more than steps = {config.steps}: the "
            "learning rate never reaches optim.lr"
        )


def _idle_settings(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    """Keys that are set but have no effect beside the others."""
    o, a, algo, rollout = objective, advantage, config.algo, config.rollout
    chosen = f"with algo.objective = {algo.objective!r}"
    kl = ("algo.kl_estimator", "experimental.weighted_kl")
    paging = ("rollout.max_", "rollout.kv_", "rollout.release_", "rollout.determ")
    cases: list[tuple[Any, tuple[str, ...], str]] = [  # (when, keys or their beginnings, why)
        (o and not o.is_truncated, ("algo.cap",), chosen),
        (o and not o.is_widened, ("experimental.acr_",), chosen),
        (o and not o.is_weighted, ("correction.level", "correction.batch_"), chosen),
        (
            a and not a.needs_critic,
            ("critic.", "algo.gamma", "algo.lam"),
            f"with algo.advantage = {algo.advantage!r}",
        ),
        (algo.kl_coef == 0, (*kl, "algo.kl_in_reward"), "while algo.kl_coef = 0"),
        (algo.kl_coef and algo.kl_in_reward, kl, "with algo.kl_in_reward"),
        (not algo.dynamic_sampling, ("algo.gen_", "algo.max_gen_"), "without dynamic sampling"),
        (config.quant.update_scale == 1, ("experimental.scale_",), "while quant.update_scale = 1"),
        (rollout.engine == "hf", paging, "with rollout.engine = 'hf'"),
    ]
    changed = _changed(config)
    for is_idle, keys, why in cases:
        if is_idle:
            yield from (f"{key} does nothing {why}" for key in changed if key.startswith(keys))


def _changed(config: Config) -> list[str]:
    """Keys that are not at their defaults."""
    return [
        f"{name}.{key}"
        for name, section in vars(config).items()
        if isinstance(section, Section)
        for key, default in vars(type(section)()).items()
        if getattr(section, key) != default
    ]


def parse_rejection(rule: str) -> tuple[str, float | None, float]:
    """ "seq_mean_k1:0.999_1.001" -> (name, low, high); "token_k3:0.01" -> (name, None, high)."""
    name, _, bounds = rule.partition(":")
    if name not in _REJECTIONS:
        raise ValueError(f"{rule!r} does not start with one of {', '.join(_REJECTIONS)}")
    try:
        numbers = [float(x) for x in bounds.split("_")]
    except ValueError:
        numbers = []
    has_band = name.endswith("k1")
    if len(numbers) != (2 if has_band else 1):
        wanted = "a band, like 0.999_1.001" if has_band else "one upper bound, like 0.01"
        raise ValueError(f"{rule!r} needs {wanted} after the colon")
    if has_band and not 0 < numbers[0] < numbers[1] < math.inf:
        raise ValueError(f"{rule!r} needs 0 < low < high")
    if not has_band and not 0 < numbers[0] < math.inf:
        raise ValueError(f"{rule!r} needs a bound above 0: as it is, no token would be kept or all")
    return (name, numbers[0], numbers[1]) if has_band else (name, None, numbers[0])
