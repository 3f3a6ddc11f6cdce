"""HistoPipe: problems of like length go to one engine, and long and short ones take turns.

    odd step    engine j gets the j-th of the groups from short to long
    even step   engine j gets the j-th from long to short

The ranks of response lengths change little from epoch to epoch, so history foretells them. An
engine that was late in one step is early in the next. That pays if engines need not wait for each
other between two steps. Ours do wait, also with `rollout.ahead = 1` (docs/systems.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qurl.config import Config
from qurl.errors import ConfigError
from qurl.sampling.history import History


def check_repeats(config: Config, num_problems: int) -> None:
    """Raise if no problem comes a second time, so that there is no history to rank by."""
    if config.parallel.deal == "free" or config.sampling.select != "shuffle" or config.task.mix:
        return  # others may ask a problem again within an epoch
    algo, size = config.algo, config.batch.problems
    rounds = algo.max_gen_rounds * algo.gen_multiple if algo.dynamic_sampling else 1
    if config.steps * size * rounds <= num_problems:
        raise ConfigError(
            f"parallel.deal = 'histopipe' ranks problems by their earlier answers, and steps = "
            f"{config.steps} with batch.problems = {size} ask each of {num_problems} problems once "
            "at most; raise steps, or use 'free'"
        )


def plan(
    indices: Sequence[int], history: History, num_engines: int, step: int
) -> tuple[list[float], list[int]]:
    """Expected length and engine of each problem; nothing if none was ever answered."""
    if not any(index in history for index in indices):
        return [], []
    lengths = expected_lengths(indices, history)
    return lengths, assign(lengths, num_engines, step)


def expected_lengths(indices: Sequence[int], history: History) -> list[float]:
    """The mean length of each problem's last groups; that of all known ones if it has none."""
    known = {}
    for index in indices:
        if outcomes := history.outcomes(index):
            total = math.fsum(outcome.count * outcome.length for outcome in outcomes)
            known[index] = total / sum(outcome.count for outcome in outcomes)
    typical = math.fsum(known.values()) / max(len(known), 1)
    return [known.get(index, typical) for index in indices]


def assign(lengths: Sequence[float], num_engines: int, step: int) -> list[int]:
    """The engine of each problem, by its expected length.

    Steps count from 0, so the first is even. Groups differ by one problem at most:

        assign([30, 10, 20, 40], num_engines=2, step=1) == [1, 0, 0, 1]
        assign([30, 10, 20, 40], num_engines=2, step=2) == [0, 1, 1, 0]
    """
    engines = [0] * len(lengths)
    for rank, index in enumerate(np.argsort(lengths, kind="stable")):
        group = rank * num_engines // len(lengths)
        engines[index] = group if step % 2 else num_engines - 1 - group
    return engines


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of the lengths of the same problems in two epochs; NaN if one has no spread."""
    mean = (len(first) - 1) / 2
    a, b = (_ranks(side) - mean for side in (first, second))
    spread = math.sqrt((a @ a) * (b @ b))
    return float(a @ b) / spread if spread else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray:
    """From 0; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts + 1) / 2)[place]
