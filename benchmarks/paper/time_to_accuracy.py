"""Time to accuracy: seconds of training until held-out accuracy first reaches a level.

    level = a_0 + share (a_best - a_0)     of the BF16 runs of an experiment, their mean

Between two evaluations accuracy is taken to be linear in steps. Seconds count the parts of a step,
without evaluations and checkpoints. The first step counts as a median one: it compiles kernels,
which a later run finds compiled, and starts graders. Runs that shared the GPU have no times of
their own; for them each step counts its tokens times the seconds per token that the speed
experiment measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from benchmarks.measured import table
from benchmarks.paper.arms import MATH, SPEED, TABLE_1, Experiment
from benchmarks.paper.figure_8 import PARTS, has_timed_steps, seconds_per_token
from benchmarks.paper.page import MISSING, Section, of_arm
from benchmarks.paper.results import Result, Results

REFERENCE = "bf16"
SHARES = (0.5, 0.9)
PPO_SPEEDS = {REFERENCE: "bf16", "int8-tis": "int8", "int8-acr": "int8"}
"""The arm of the speed experiment for each arm of Table 1."""


def levels(results: Sequence[Result]) -> list[float]:
    """Accuracies to reach, by share; none without a trained BF16 run."""
    found = [[e.accuracy for e in r.evals()] for r in of_arm(results, REFERENCE)]
    found = [accuracies for accuracies in found if len(accuracies) > 1]
    if not found:
        return []
    start, best = fmean(a[0] for a in found), fmean(max(a) for a in found)
    return [start + share * (best - start) for share in SHARES]


def steps_to(result: Result, level: float) -> float | None:
    """Steps, in fractions, until accuracy first reaches the level."""
    for before, after in pairwise(result.evals()):
        if before.accuracy < level <= after.accuracy:
            share = (level - before.accuracy) / (after.accuracy - before.accuracy)
            return before.step + share * (after.step - before.step)
    return None


def own_seconds(result: Result) -> list[float]:
    """Seconds of each step as the run itself took them."""
    parts = [dict(result.curve(f"timing_s/{part}")) for part in PARTS]
    each = [sum(part.get(step, 0.0) for part in parts) for step in range(result.steps)]
    return [median(each[1:]), *each[1:]] if len(each) > 1 else each


def seconds_by_tokens(result: Result, timed: Result) -> list[float]:
    """Seconds of each step, had it the speed per token of a run that was timed alone."""
    per_token = seconds_per_token(timed)
    return [per_token * length for _, length in result.curve("response_length/mean")]


def seconds_until(each: Sequence[float], steps: float) -> float:
    """Seconds of the first `steps`, the last of which may be a fraction."""
    whole = int(steps)
    return sum(each[:whole]) + (steps - whole) * sum(each[whole : whole + 1])


def time_table(experiment: Experiment, speeds: Mapping[str, str], results: Results) -> str:
    """`speeds` names the arm whose speed counts for each arm; timed experiments have their own."""
    of_experiment = results.get(experiment.name, ())
    wanted, rows = levels(of_experiment), []
    for arm in (experiment.arm(name) for name in speeds):
        runs = of_arm(of_experiment, arm.name) if wanted else []
        for run in runs:
            if experiment.is_timed:
                each = own_seconds(run)
            else:
                alone = of_arm(results[SPEED.name], speeds[arm.name])
                each = seconds_by_tokens(run, next(filter(has_timed_steps, alone)))
            cells = [cell for level in wanted for cell in _cells(run, level, each)]
            rows.append([arm.label, str(run.seed), *cells])
        if not runs:
            rows.append([arm.label, "", MISSING, *[""] * (2 * len(SHARES) - 1)])
    names = [f"{100 * level:.1f} %" for level in wanted] or [f"{s:.0%} of the gain" for s in SHARES]
    head = [cell for name in names for cell in (f"steps to {name}", "seconds")]
    return table(["arm", "seed", *head], rows)


def _cells(run: Result, level: float, each: Sequence[float]) -> list[str]:
    steps = steps_to(run, level)
    if steps is None:
        return ["not reached", ""]
    return [f"{steps:.0f}", f"{seconds_until(each, steps):.0f}"]


def render(results: Results) -> str:
    return "\n\n".join(
        [
            "PPO on GSM8K, 0.5B, 3e-6 (Table 1), seconds by tokens:",
            time_table(TABLE_1, PPO_SPEEDS, results),
            "GRPO on MATH, 1.5B:",
            time_table(MATH, {arm.name: arm.name for arm in MATH.arms}, results),
        ]
    )


SECTION = Section("time_to_accuracy", render)
