"""Which settings go together: what is refused at start-up, and what is only warned of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from qurl.config.schema import Config

WEIGHTED = ("decoupled", "tis", "acr")
"""Objectives that multiply with an importance weight."""

TASKS = ("arithmetic", "countdown", "gsm8k", "math", "file")

NEEDS_EVAL_PATH = "set task.eval_path, for a file has no held-out problems of its own"

_DIVERGENCES = ("k1", "k2", "k3")
_REJECTIONS = (
    *(f"token_{k}" for k in _DIVERGENCES),
    *(f"seq_{how}_{k}" for how in ("sum", "mean", "max") for k in _DIVERGENCES),
)


def find_mistakes(config: Config) -> list[str]:
    """Combinations that cannot work, each with what to do about it."""
    parts = (
        *(_sampling_mistakes, _algorithm_mistakes, _correction_mistakes, _task_mistakes),
        *(_engine_mistakes, _save_mistakes, _dither_mistakes),
    )
    return [mistake for part in parts for mistake in part(config)]


def find_warnings(config: Config) -> list[str]:
    """Choices that work but probably do not do what was meant."""
    return [*_method_warnings(config), *_ignored_settings(config)]


def _sampling_mistakes(config: Config) -> Iterator[str]:
    sampling, algo = config.sampling, config.algo
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield (
            f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: training "
            "rollouts must be drawn from the whole distribution (top_p = 1, top_k = 0), or the "
            "importance weights measure the filter; use eval.top_p for evaluation"
        )
    if sampling.group_size < 2 and algo.advantage in ("grpo", "dr_grpo", "rloo"):
        yield (
            f"sampling.group_size = {sampling.group_size}: algo.advantage = {algo.advantage!r} "
            "compares completions of one problem and needs at least 2"
        )
    if sampling.group_size < 2 and algo.dynamic_sampling:
        yield f"sampling.group_size = {sampling.group_size}: dynamic sampling needs at least 2"
    num_sequences = config.batch.problems * sampling.group_size
    if config.batch.minibatches > num_sequences:
        yield (
            f"batch.minibatches = {config.batch.minibatches} is more than the {num_sequences} "
            "sequences of a step"
        )


def _algorithm_mistakes(config: Config) -> Iterator[str]:
    algo = config.algo
    if algo.name == "ppo" and algo.advantage != "gae":
        yield f"algo.advantage = {algo.advantage!r}: algo.name = 'ppo' means 'gae'"
    if algo.kl_in_reward and algo.advantage != "gae":
        yield "algo.kl_in_reward = true needs algo.advantage = 'gae'; use the loss term instead"
    if algo.kl_is_correct and algo.objective not in WEIGHTED:
        yield (
            f"algo.kl_is_correct = true needs a weighted objective ({', '.join(WEIGHTED)}), not "
            f"{algo.objective!r}"
        )


def _correction_mistakes(config: Config) -> Iterator[str]:
    correction, objective = config.correction, config.algo.objective
    if correction.mode == "bypass" and objective != "ppo_behav":
        yield (
            f"correction.mode = 'bypass' sets prox := behav, so algo.objective = {objective!r} has "
            "nothing to correct; set algo.objective = 'ppo_behav'"
        )
    if correction.mode == "bypass" and (correction.reject or correction.veto is not None):
        yield (
            "correction.mode = 'bypass' computes no mismatch, so correction.reject and "
            "correction.veto have nothing to look at"
        )
    if correction.kind == "icepop" and objective not in ("tis", "acr"):
        yield f"correction.kind = 'icepop' needs objective 'tis' or 'acr', not {objective!r}"
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


def is_generated(task: str) -> bool:
    """Whether a task draws its problems, and has no file."""
    return task in ("arithmetic", "countdown") or task.startswith("gym:")


def _task_mistakes(config: Config) -> Iterator[str]:
    task, scratch = config.task, config.model.scratch
    if not (task.name in TASKS or task.name.startswith("gym:") or "." in task.name):
        yield f"task.name = {task.name!r} is not one of {', '.join(TASKS)}, gym:<name>, nor a file"
        return
    if task.name == "file" and not (task.path or task.eval_path):
        yield "task.name = 'file' needs task.path"
    for key in ("path", "eval_path"):
        if is_generated(task.name) and getattr(task, key):
            yield (
                f"task.{key} = {getattr(task, key)!r}, but task.name = {task.name!r} draws its "
                "problems and reads no file; set task.name = 'file', 'gsm8k' or 'math'"
            )
    if config.eval.every and not is_generated(task.name) and not task.eval_path:
        yield f"eval.every = {config.eval.every}: {NEEDS_EVAL_PATH}"
    if ":" not in task.reward and task.reward not in ("auto", "math", "exact", "countdown"):
        yield (
            f"task.reward = {task.reward!r} is not one of auto, math, exact, countdown, "
            "gym:<name>, module:function"
        )
    if config.model.path == "scratch" and scratch.hidden_size % (2 * scratch.heads) != 0:
        yield (
            f"model.scratch.hidden_size = {scratch.hidden_size} must be a multiple of "
            f"2 x model.scratch.heads = {2 * scratch.heads}"
        )


def _engine_mistakes(config: Config) -> Iterator[str]:
    if config.quant.kv != "none" and config.rollout.engine != "local":
        yield (
            f"quant.kv = {config.quant.kv!r} needs rollout.engine = 'local': transformers keeps "
            "its cache in the compute precision"
        )


def _save_mistakes(config: Config) -> Iterator[str]:
    if config.save.every > 0 and config.save.keep == 0:
        yield (
            f"save.every = {config.save.every} asks for checkpoints, save.keep = 0 for none; set "
            "save.every = 0 or save.keep >= 1"
        )


def _dither_mistakes(config: Config) -> Iterator[str]:
    if config.optim.dither and config.model.compute_dtype == "float32":
        yield (
            'optim.dither = true needs model.compute_dtype = "bfloat16": a trainer in FP32 sees '
            "every update"
        )


def _method_warnings(config: Config) -> Iterator[str]:
    algo, quant = config.algo, config.quant
    if algo.objective == "acr" and config.updates_per_step == 1:
        yield (
            "ACR cannot act: with one update per rollout batch the ratio is 1 everywhere and acr "
            "equals tis; raise batch.minibatches or batch.epochs"
        )
    if algo.objective == "acr" and algo.cap is None:
        yield "ACR cannot act: with algo.cap = none nothing is truncated and acr equals decoupled"
    if algo.objective == "acr" and config.correction.kind == "icepop":
        yield "ACR cannot act: correction.kind = 'icepop' truncates nothing, and acr equals tis"
    if config.critic.pretrain_steps >= config.steps and algo.advantage == "gae":
        yield (
            f"critic.pretrain_steps = {config.critic.pretrain_steps} of steps = {config.steps}: "
            "the policy is never trained"
        )
    if quant.format == "none" and quant.update_scale > 1:
        yield "UAQ without quantization is little more than a learning rate for the scaled layers"
    if quant.update_scale > 1 and config.optim.lr >= 1e-5:
        yield f"UAQ with optim.lr = {config.optim.lr}: the paper turns it off from 1e-5 up"
    if quant.format == "none" and quant.kv != "none" and config.eval.every:
        yield (
            f"evaluations named full answer with quant.kv = {quant.kv!r}: without quant.format the "
            "actor itself is evaluated"
        )
    if (quant.format, quant.kv) != ("none", "none") and algo.objective not in WEIGHTED:
        yield (
            f"quantized rollouts with algo.objective = {algo.objective!r} are not corrected for "
            "the mismatch; use 'acr' or 'tis' unless you compare objectives"
        )


def _ignored_settings(config: Config) -> Iterator[str]:
    algo, correction = config.algo, config.correction
    if algo.kl_coef == 0 and (algo.kl_in_reward or algo.kl_is_correct):
        yield "algo.kl_in_reward and algo.kl_is_correct do nothing while algo.kl_coef = 0"
    if algo.kl_in_reward and algo.kl_is_correct:
        yield "algo.kl_is_correct does nothing with algo.kl_in_reward, which has no loss term"
    if algo.kl_in_reward and algo.kl_estimator != "k3":
        yield f"algo.kl_estimator = {algo.kl_estimator!r} does nothing with algo.kl_in_reward"
    if config.rollout.engine == "hf":
        for name in _changed(config.rollout, but="engine"):
            yield f"rollout.{name} does nothing with rollout.engine = 'hf'"
    if algo.advantage != "gae":
        names = [f"critic.{name}" for name in _changed(config.critic)]
        names += [f"algo.{name}" for name in ("gamma", "lam") if getattr(algo, name) != 1]
        for name in names:
            yield f"{name} does nothing with algo.advantage = {algo.advantage!r}"
    quant = config.quant
    if quant.update_scale == 1 and (quant.scale_o_proj or quant.scale_down_proj):
        yield "quant.scale_o_proj and scale_down_proj do nothing while quant.update_scale = 1"
    if "cap" in _changed(algo) and algo.objective not in ("tis", "acr"):
        yield f"algo.cap does nothing with algo.objective = {algo.objective!r}"
    if not algo.dynamic_sampling:
        for name in _changed(algo):
            if name in ("gen_multiple", "max_gen_rounds"):
                yield f"algo.{name} does nothing without algo.dynamic_sampling"
    if algo.kl_coef == 0 and algo.kl_estimator != "k3":
        yield "algo.kl_estimator does nothing while algo.kl_coef = 0"
    if config.optim.warmup_steps > config.steps:
        yield (
            f"optim.warmup_steps = {config.optim.warmup_steps} is more than steps = "
            f"{config.steps}: the learning rate never reaches optim.lr"
        )
    if algo.acr_max_bound is not None and algo.objective != "acr":
        yield f"algo.acr_max_bound does nothing with algo.objective = {algo.objective!r}"
    is_shaped = correction.level != "token" or correction.batch_normalize
    if is_shaped and algo.objective not in WEIGHTED:
        yield (
            "correction.level and correction.batch_normalize do nothing with algo.objective = "
            f"{algo.objective!r}, which has no importance weight"
        )


def _changed(section: Any, but: str = "") -> list[str]:
    """Keys of a section that are not at their defaults."""
    defaults = vars(type(section)())
    return [k for k, value in vars(section).items() if k != but and value != defaults[k]]


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
