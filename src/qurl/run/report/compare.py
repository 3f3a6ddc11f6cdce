"""Several runs side by side: what differs in their recipes, and what that did."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from qurl.run.directory import is_among
from qurl.run.intervals import paired_difference, unpaired_difference
from qurl.run.report.reader import RunReader
from qurl.run.report.samples import printable
from qurl.run.report.verdict import Facts

FILES = ("task.eval_path", "task.eval_sets")
PROBLEMS = ("task.name", "task.difficulty", *FILES, "task.instruction", "eval.problems")
"""Runs that agree in these keys, and for generated tasks in the seed, answer the same problems."""


def compare(runs: Sequence[RunReader]) -> dict[str, Any] | None:
    """Differences of recipes, numbers, and a verdict of each run against the first."""
    if len(runs) < 2:
        return None
    return {
        "differences": find_differences([run.config for run in runs]),
        "numbers": [_numbers(run.facts) for run in runs],
        "verdicts": [verdict for run in runs[1:] for verdict in judge_pair(runs[0], run)],
    }


def find_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{"quant.format": ["none", "int8"], ...}; run_dir differs anyway."""
    keys = dict.fromkeys(key for config in configs for key in config if key != "run_dir")
    table = {key: [printable(str(c.get(key, "absent"))) for c in configs] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def judge_pair(first: RunReader, second: RunReader) -> list[dict[str, Any]]:
    """Held-out accuracy of the second run against the first, at their last common evaluation."""
    verdicts = []
    pairs = [(p, p) for p in first.facts.evals if p in second.facts.evals]
    if not pairs and first.facts.evals and second.facts.evals:
        pairs = [(list(first.facts.evals)[-1], list(second.facts.evals)[-1])]
    for a, b in pairs:
        before, after = dict(first.facts.evals[a]), dict(second.facts.evals[b])
        common = before.keys() & after.keys() - {0}  # untrained models say nothing about recipes
        if not common:
            continue
        step = max(common)
        x, y = before[step], after[step]
        is_paired = _has_same_problems(first, second) and len(x) == len(y)
        change = (paired_difference if is_paired else unpaired_difference)(x, y)
        better = "better" if change.value > 0 else "worse"
        told = f"is {better} than" if change.is_clear else "cannot be told apart from"
        value, low, high = (100 * z for z in change)
        number = " and ".join(map(str, dict.fromkeys((len(x), len(y)))))
        kind = "the same problems" if is_paired else "different problems"
        precision = a if a == b else f"{b} against {a}"
        text = (
            f"{second.name} {told} {first.name} ({precision}, step {step}): "
            f"{statistics.fmean(x):.1%} → {statistics.fmean(y):.1%}, {value:+.1f} points "
            f"(95%: {low:+.1f} to {high:+.1f}; {number} held-out problems, {kind})."
        )
        level = ("good" if change.value > 0 else "bad") if change.is_clear else "info"
        verdicts.append({"level": level, "text": text})
    text = f"{first.name} and {second.name} have no evaluation of trained weights at a common step."
    return verdicts or [{"level": "info", "text": text}]


def _has_same_problems(first: RunReader, second: RunReader) -> bool:
    def values(run: RunReader) -> dict[str, Any]:
        has_files = any(value for key, value in run.config.items() if is_among(key, FILES))
        keys = PROBLEMS if has_files else (*PROBLEMS, "seed")
        return {key: value for key, value in run.config.items() if is_among(key, keys)}

    return values(first) == values(second)


def _numbers(facts: Facts) -> dict[str, float | None]:
    """The last values of a run, for a table."""

    def last(name: str) -> float | None:
        ends = facts.ends(name)
        return ends[1] if ends else None

    def median(name: str) -> float | None:
        values = facts.series.get(name)
        return statistics.median(values) if values else None

    return {
        "steps": float(facts.last_step + 1),
        "reward (last steps)": last("reward/mean"),
        "mismatch KL (last steps)": last("rollout_corr/k3_kl"),
        "effective sample size (last steps)": last("rollout_corr/rollout_is_eff_sample_size"),
        "rollout tokens per second (median)": median("perf/rollout_tokens_per_s"),
        "seconds per step (median)": median("timing_s/step"),
        "minutes in all": sum(facts.seconds.values()) / 60,
    }
