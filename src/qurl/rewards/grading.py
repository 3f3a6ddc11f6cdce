"""From answers to rewards: one by one, or a step's rollouts at once."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from qurl.errors import RewardTimeout
from qurl.rewards.pool import Grade, GradingPool, failure
from qurl.rewards.shaping import overlong_penalty

if TYPE_CHECKING:
    from qurl.types import Completion, Graded, Rollout


def grade_math(answer_text: str, truth: str, *, timeout: float = 10.0) -> float:
    """1.0 if the answer in a text equals the truth, else 0.0; RewardTimeout at the deadline.

    A grading process is started by the first call and kept for the next ones.
    """
    item = (answer_text, truth, {})
    [grade] = _math_pool(timeout).grade([item])
    if grade.timed_out:
        raise failure(f"killed after {timeout} s", item, kind=RewardTimeout)
    return grade.score


@functools.cache
def _math_pool(timeout: float) -> GradingPool:
    pool = GradingPool("math", workers=1, timeout=timeout)
    atexit.register(pool.close)
    return pool


def grade_rollouts(
    rollouts: Sequence[Rollout], pool: GradingPool, *, overlong_cache: int, max_tokens: int
) -> list[Graded]:
    """Grade every completion; reward = score + overlong penalty.

    `accuracy` of the details is the score before any shaping, `timed_out` is 1 where the grader
    was killed.
    """
    from qurl.types import Graded  # here, because it imports torch and the workers must not

    groups = grade_groups(rollouts, pool)
    grades = [grade for group in groups for grade in group]
    if grades and all(grade.timed_out for grade in grades):
        raise RewardTimeout(
            f"reward {pool.reward!r} was killed on all {len(grades)} completions after "
            f"{pool.timeout:g} s each; raise task.grade_timeout, or mend it"
        )
    graded = []
    for rollout, group in zip(rollouts, groups, strict=True):
        rewards = [
            grade.score + overlong_penalty(len(c.token_ids), max_tokens, overlong_cache)
            for grade, c in zip(group, rollout.completions, strict=True)
        ]
        graded.append(Graded(rollout, rewards, [_details(grade) for grade in group]))
    return graded


def grade_groups(rollouts: Sequence[Rollout], pool: GradingPool) -> list[list[Grade]]:
    """The grades of each rollout's completions, unshaped."""
    items = [(c.text, r.problem.answer, r.problem.extra) for r in rollouts for c in r.completions]
    grades = iter(pool.grade(items))
    return [[next(grades) for _ in rollout.completions] for rollout in rollouts]


def _details(grade: Grade) -> dict[str, float]:
    return {**grade.details, "accuracy": grade.accuracy, "timed_out": float(grade.timed_out)}


def _detail_means(graded: Sequence[Graded]) -> dict[str, float]:
    """Means of what a reward returned beside its score."""
    details = [d for g in graded for d in g.details]
    names = dict.fromkeys(name for d in details for name in d)
    return {
        f"reward/{name}": fmean(d[name] for d in details if name in d)
        for name in names
        if name not in ("accuracy", "timed_out")
    }


def reward_metrics(graded: Sequence[Graded]) -> dict[str, float]:
    """What a step's answers were worth, and how long they were."""
    rewards = [reward for g in graded for reward in g.rewards]
    completions: list[Completion] = [c for g in graded for c in g.rollout.completions]
    lengths = [len(c.token_ids) for c in completions]
    return {
        "reward/timeouts": sum(d["timed_out"] for g in graded for d in g.details),
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/accuracy": fmean(a for g in graded for a in g.accuracies),
        "reward/frac_all_correct": fmean(all(a >= 1 for a in g.accuracies) for g in graded),
        "reward/frac_all_wrong": fmean(all(a <= 0 for a in g.accuracies) for g in graded),
        **_detail_means(graded),
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": fmean(c.finish == "length" for c in completions),
    }
