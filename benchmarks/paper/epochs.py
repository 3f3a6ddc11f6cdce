"""Do rewards jump when an epoch begins? Then the policy remembers the problems it was trained on.

Every epoch asks all problems once, in a new random order, so nothing but memory sets the first
steps of an epoch apart from the last steps of the one before:

    jump = (line through some steps after the boundary) - (line through as many before it), there

The middle of an epoch has no such boundary and serves as a control. A run counts once, by the mean
over its boundaries; runs without correction collapse and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from statistics import fmean, linear_regression

from benchmarks.measured import student_interval, table
from benchmarks.paper.arms import LOW_RATE, TABLE_1
from benchmarks.paper.page import Section, points
from benchmarks.paper.results import Result, Results

PER_EPOCH = 7473 / 256
"""Steps: problems of GSM8K's training file by those of a step (gsm8k-ppo.toml)."""
WINDOWS = (10, 12, 14)
"""Steps on each side, less than half an epoch of 29. No number is right, so there are three."""
REWARD = "reward/accuracy"


def render(results: Results) -> str:
    runs = [r for e in (TABLE_1, LOW_RATE) for r in results.get(e.name, ()) if is_corrected(r)]
    head = ["steps on each side", "runs", "boundaries"]
    head += ["jump where an epoch begins, points (95 % over runs)", "in the middle of an epoch"]
    return table(head, [cells(runs, window) for window in WINDOWS])


def is_corrected(result: Result) -> bool:
    return "ppo_prox" not in result.arm


def cells(runs: Sequence[Result], window: int) -> list[str]:
    found, control = ([jumps(run, offset, window) for run in runs] for offset in (0.0, 0.5))
    counts = [str(sum(map(bool, found))), str(sum(map(len, found)))]
    return [str(window), *counts, *map(mean_jump, (found, control))]


def mean_jump(found: Sequence[Sequence[float]]) -> str:
    means = [fmean(jumps) for jumps in found if jumps]
    if len(means) < 3:
        return "too few runs"
    return points(fmean(means), student_interval(means))


def jumps(result: Result, offset: float, window: int) -> list[float]:
    """At each boundary (so many epochs plus the offset) with whole windows on both sides."""
    rewards = [value for _, value in result.curve(REWARD)]
    num_epochs = ceil(len(rewards) / PER_EPOCH)
    places = [(epoch + offset) * PER_EPOCH for epoch in range(num_epochs + 1)]
    found = (jump_at(rewards, place, window) for place in places)
    return [jump for jump in found if jump is not None]


def jump_at(rewards: Sequence[float], place: float, window: int) -> float | None:
    """At a place between steps, or within one, which then counts on neither side."""
    first, last = floor(place) - window, ceil(place) + window
    if first < 0 or last > len(rewards):
        return None
    before, after = range(first, floor(place)), range(ceil(place), last)
    return value_at(rewards, after, place) - value_at(rewards, before, place)


def value_at(rewards: Sequence[float], steps: range, place: float) -> float:
    """Of the line through the rewards of these steps; a step lasts from its number to the next."""
    middles = [step + 0.5 for step in steps]
    slope, intercept = linear_regression(middles, [rewards[step] for step in steps])
    return intercept + slope * place


SECTION = Section("epochs", render)
