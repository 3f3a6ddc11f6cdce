"""From answers to rewards: one at a time, or rollouts as they arrive."""

from __future__ import annotations

import atexit
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from qurl.errors import RewardTimeout
from qurl.rewards.pool import GradingPool, Pool, wait_for
from qurl.rewards.reward import Grade
from qurl.types import Graded, Rollout


def grade_math(answer_text: str, truth: str, *, timeout: float = 10.0) -> float:
    """1.0 if the answer in a text equals the truth, else 0.0; RewardTimeout at the deadline.

    The first call starts a grading process, and later calls use it again.
    """
    [grade] = _math_pool(timeout, os.getpid()).grade([(answer_text, truth, {})])
    if grade.timed_out:
        error = RewardTimeout(f"killed after {timeout} s while grading {answer_text[-300:]!r}")
        error.text, error.answer = answer_text, truth
        raise error
    return grade.score


@functools.cache
def _math_pool(timeout: float, pid: int) -> GradingPool:
    """For each process its own: a forked one has neither the threads nor the sockets to itself."""
    pool = GradingPool("math", workers=1, timeout=timeout)
    atexit.register(pool.close)
    return pool


class Grading:
    """Grades rollouts from the moment they are submitted, while others are still generated."""

    def __init__(self, pool: Pool, rollouts: Iterable[Rollout] = ()) -> None:
        self._pool = pool
        self._rollouts: list[Rollout] = []
        self._futures: list[Future[list[Grade]]] = []
        self._failed: list[Future[list[Grade]]] = []
        for rollout in rollouts:
            self.submit(rollout)

    def submit(self, rollout: Rollout) -> None:
        """Start to grade its completions; raises if an earlier grade failed."""
        if self._failed:
            wait_for([*self._failed, *self._futures])
        problem, texts = rollout.problem, [c.text for c in rollout.completions]
        self._rollouts.append(rollout)
        for future in self._pool.submit(texts, problem.answer, problem.extra):
            self._futures.append(future)
            future.add_done_callback(self._watch)

    def _watch(self, future: Future[list[Grade]]) -> None:
        if not future.cancelled() and future.exception():
            self._failed.append(future)

    def grades(self) -> list[list[Grade]]:
        """The grades of each rollout's completions, in the order of submission."""
        grades = iter(wait_for(self._futures))
        groups = [[next(grades) for _ in rollout.completions] for rollout in self._rollouts]
        return _count_killed_as_wrong([r.problem.extra for r in self._rollouts], groups)

    def rewards(self, *, overlong_cache: int, max_tokens: int) -> list[Graded]:
        """Every rollout with its rewards, in the order of submission.

        reward = score + overlong penalty. In the details, `accuracy` is the score before shaping,
        and `timed_out` is 1 if the grader was killed.
        """
        groups = self.grades()
        if groups and all(grade.timed_out for group in groups for grade in group):
            raise RewardTimeout(
                f"reward {self._pool.reward!r} was killed on all {sum(map(len, groups))} "
                f"completions after {self._pool.timeout:g} s, or ran out of memory; raise "
                "task.grade_timeout or task.grade_memory, or fix the reward"
            )
        graded = []
        for rollout, group in zip(self._rollouts, groups, strict=True):
            rewards = [
                grade.score + overlong_penalty(len(c.token_ids), max_tokens, overlong_cache)
                for grade, c in zip(group, rollout.completions, strict=True)
            ]
            details = [
                {**g.details, "accuracy": g.accuracy, "timed_out": float(g.timed_out)}
                for g in group
            ]
            graded.append(Graded(rollout, rewards, details))
        return graded


def _count_killed_as_wrong(
    extras: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Grade]]
) -> list[list[Grade]]:
    """The groups, with an accuracy of 0 for killed answers where the reward shapes its score.

    Elsewhere their score counts, as it does for other wrong answers.
    """
    pairs = [(extra.get("qurl_reward"), group) for extra, group in zip(extras, groups, strict=True)]
    shaping = {name for name, group in pairs for grade in group if "accuracy" in grade.details}
    wrong = {"accuracy": 0.0}
    return [
        [replace(g, details=wrong) if g.timed_out and name in shaping else g for g in group]
        for name, group in pairs
    ]


def reward_metrics(graded: Sequence[Graded]) -> dict[str, float]:
    """Rewards and lengths of a step's completions, and means of the other values of a reward."""
    rewards = [reward for g in graded for reward in g.rewards]
    completions = [c for g in graded for c in g.rollout.completions]
    lengths = [len(c.token_ids) for c in completions]
    details = [d for g in graded for d in g.details]
    names = dict.fromkeys(name for d in details for name in d)  # a set would not keep the order
    means = {f"reward/{name}": fmean(d[name] for d in details if name in d) for name in names}
    del means["reward/timed_out"]
    return {
        "reward/timeouts": sum(d["timed_out"] for d in details),
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/accuracy": fmean(a for g in graded for a in g.accuracies),
        "reward/frac_equal": fmean(
            len(g.rewards) > 1 and min(g.rewards) == max(g.rewards) for g in graded
        ),
        "reward/frac_all_correct": fmean(all(a >= 1 for a in g.accuracies) for g in graded),
        "reward/frac_all_wrong": fmean(all(a <= 0 for a in g.accuracies) for g in graded),
        **_pass_curve(graded),
        **means,
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": fmean(c.finish == "length" for c in completions),
    }


def _pass_curve(graded: Sequence[Graded]) -> dict[str, float]:
    """pass@k for k = 2, 4, ... up to the size of the smallest group."""
    counts = [(len(g.accuracies), sum(a >= 1 for a in g.accuracies)) for g in graded]
    smallest = min(size for size, _ in counts)
    ks = [2**i for i in range(1, smallest.bit_length())]
    return {f"reward/pass@{k}": fmean(pass_at_k(n, c, k) for n, c in counts) for k in ks}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of n samples hold a correct one: 1 - C(n - c, k) / C(n, k), exactly."""
    draws = math.comb(num_samples, k)
    return (draws - math.comb(num_samples - num_correct, k)) / draws


def overlong_cache(fraction: float, max_tokens: int) -> int:
    """Lcache in tokens; any fraction above 0 punishes at least the last token."""
    return max(1, round(fraction * max_tokens)) if fraction else 0


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """DAPO's soft overlong punishment, which falls over the last `cache` tokens.

        pen(L) = 0                                   L <= Lmax - Lcache
               = ((Lmax - Lcache) - L) / Lcache      Lmax - Lcache < L <= Lmax
               = -1                                  L > Lmax

    `cache = 0` turns it off.
    """
    start = max_tokens - cache
    if cache == 0 or length <= start:
        return 0.0
    return max(-1.0, (start - length) / cache)
