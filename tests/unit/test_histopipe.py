"""HistoPipe: who gets which problems, and what that saves in a simulation."""

import math
from collections import Counter

import pytest
from models import group

from benchmarks.histopipe import Setting, decode_seconds, epoch_correlation, makespan, simulate
from qurl.sampling import History
from qurl.sampling.histopipe import assign, expected_lengths, rank_correlation


def test_groups_by_length_take_turns():
    """Three engines, six problems: the shortest two are 10 and 15, the longest 50 and 60."""
    lengths = [50, 10, 30, 60, 15, 20]
    assert assign(lengths, 3, step=1) == [2, 0, 1, 2, 0, 1]
    assert assign(lengths, 3, step=2) == [0, 2, 1, 0, 2, 1]


@pytest.mark.parametrize(("num_problems", "num_engines"), [(10, 3), (7, 8), (1, 4), (64, 8)])
def test_groups_are_as_large_as_each_other(num_problems, num_engines):
    lengths = [float(7 * i % 11) for i in range(num_problems)]
    for step in range(2):
        sizes = Counter(assign(lengths, num_engines, step))
        counts = [sizes[engine] for engine in range(num_engines)]
        assert sum(counts) == num_problems
        assert max(counts) - min(counts) <= 1
    assert assign([], 3, 0) == []


def test_expected_lengths_are_means_of_the_history():
    """Problem 4: (2 x 3 + 1 x 6) / 3 tokens. Problem 9 is unknown: the mean of the others."""
    history = History(10)
    history.record(4, group([1], [[2] * 3, [2] * 3], [0, 1]))
    history.record(4, group([1], [[2] * 6], [0]))
    history.record(5, group([1], [[2] * 8], [1]))
    assert expected_lengths([4, 9, 5], history) == [4.0, 6.0, 8.0]
    assert expected_lengths([1, 2], History(10)) == [0.0, 0.0]


def test_rank_correlation_worked_by_hand():
    """Ranks 0 1 2 3 and 1 0 2 3: 1 - 6 x 2 / (4 x 15) = 0.8. Ties share their rank."""
    assert rank_correlation([1, 2, 3, 4], [20, 10, 30, 40]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 3], [9, 8, 7]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 6]) == pytest.approx(1)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))


# The simulator


def test_an_engine_worked_by_hand():
    """Ten steps of two sequences and twenty of one."""
    assert decode_seconds([10, 30]) == pytest.approx((10 * 2.0946 + 20 * 2.0773) / 1000)


def test_makespans_worked_by_hand():
    """Two engines, long and short in turns, one second of training. Fresh: 4 + 1 + 4 + 1. One step
    old: both engines end step 1 at 5, and training of step 0 ends at 5, of step 1 at 6."""
    seconds = [[4, 1], [1, 4]]
    assert makespan(seconds, 1.0, stale=0) == 10
    assert makespan(seconds, 1.0, stale=1) == 6


def test_trends():
    """Ranks are stable; groups by length with turns win if a step may be stale, and only then."""
    setting = Setting(engines=4, problems=64, steps_per_epoch=6)
    assert epoch_correlation(setting, 0) > 0.95
    for run in (simulate(setting, seed) for seed in range(2)):
        seconds = {arm: figures["seconds"] for arm, figures in run.items()}
        assert seconds["fifo, stale 0"] > 1.3 * seconds["histopipe, stale 1"]
        assert seconds["histopipe, stale 1"] < min(
            seconds[f"{other}, stale 1"] for other in ("fifo", "longest", "without turns")
        )
        assert seconds["histopipe, stale 0"] > seconds["fifo, stale 0"]
        # Sequences of like length end together, so few are decoded alone.
        assert run["histopipe, stale 1"]["busy"] < 0.8 * run["fifo, stale 1"]["busy"]
        assert run["longest, stale 0"]["bubbles"] < run["fifo, stale 0"]["bubbles"]
