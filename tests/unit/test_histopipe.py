"""HistoPipe: who gets which problems, and what that saves in a simulation."""

import math
import pickle
from collections import Counter
from statistics import fmean

import pytest
from models import group, tiny_llama
from test_engine_group import PARAMS, PROBLEMS, Yard, texts

from benchmarks.histopipe import Setting, decode_seconds, epoch_correlation, makespan, simulate
from qurl.config import Config, build_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.errors import ConfigError, EngineError
from qurl.rewards import GradingPool
from qurl.rollout import build_engine
from qurl.rollout.group.worker import EngineWorker
from qurl.rollout.local.requests import LengthHistory
from qurl.sampling import History, ProblemStream, Sampler
from qurl.sampling.histopipe import assign, check_repeats, expected_lengths, plan, rank_correlation


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


# A group of two engines


class Noting(EngineWorker):
    """Notes the ids of the problems that it gets."""

    def __init__(self, threads):
        super().__init__(threads)
        self.asked = []

    def submit(self, stream, asked):
        self.asked += [one.problem.id for one in pickle.loads(asked)]
        super().submit(stream, asked)


@pytest.fixture(scope="module")
def yard():
    yard = Yard(Noting)
    yard.engine = yard.group(tiny_llama(), max_batch=16)
    yard.engine.sync(tiny_llama(), version=0)
    yield yard
    for handle in yard.handles:
        handle.kill()


@pytest.fixture(scope="module")
def expected():
    engine = build_engine("local", tiny_llama(), quant="int8", max_batch=4, deterministic=True)
    return texts(engine.generate(PROBLEMS, PARAMS))


def ask(yard, engines):
    """What each engine was asked, and the rollouts in the order of the problems."""
    for handle in yard.handles:
        handle.worker.asked = []
    with yard.engine.stream(PARAMS) as stream:
        stream.submit(PROBLEMS, engines=engines)
        found = {rollout.problem.id: rollout for rollout in stream}
    asked = [sorted(handle.worker.asked) for handle in yard.handles]
    return asked, texts(found[problem.id] for problem in PROBLEMS)


@pytest.mark.parametrize("engines", [[0, 1, 1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
def test_problems_go_where_they_should_and_are_answered_alike(yard, expected, engines):
    asked, found = ask(yard, engines)
    assert asked == [
        [p.id for p, e in zip(PROBLEMS, engines, strict=True) if e == i] for i in (0, 1)
    ]
    assert found == expected


def test_an_idle_engine_helps_a_full_one(yard, expected, monkeypatch):
    """Room for two problems each: with all eight for engine 1, engine 0 gets two at once."""
    monkeypatch.setattr(yard.engine, "_capacity", 4)
    asked, found = ask(yard, [1] * 8)
    assert len(asked[0]) >= 2
    assert len(asked[1]) >= 2
    assert sorted(asked[0] + asked[1]) == [p.id for p in PROBLEMS]
    assert found == expected


def test_what_a_dead_engine_should_get_goes_to_the_other(expected):
    yard = Yard(Noting)
    yard.engine = yard.group(tiny_llama(), max_batch=16)
    yard.engine.sync(tiny_llama(), version=0)
    yard.handles[1].kill()
    asked, found = ask(yard, [0, 1] * 4)
    assert found == expected
    assert set(asked[0]) == {p.id for p in PROBLEMS}
    for handle in yard.handles:
        handle.kill()


class Prompts:
    """The problems of the group's tests, as a task."""

    name, reward, notes = "prompts", "exact", ()

    def __len__(self):
        return len(PROBLEMS)

    def __getitem__(self, index):
        return PROBLEMS[index]


def sample(yard, deal, num_steps=6):
    """What was sampled and what each engine was asked, in steps of half an epoch."""
    sampling = {"group_size": 2, "max_tokens": 40, "stop_ids": [*range(5)]}  # of any length
    tree = {"batch": {"problems": 4}, "sampling": sampling}
    config = build_config(tree | {"parallel": {"engines": 2, "deal": deal}})
    stream, steps = ProblemStream(Prompts(), 1), []
    yard.engine._lengths = LengthHistory()  # the group's own, by which it deals freely
    with GradingPool("exact") as pool:
        for step in range(num_steps):
            for handle in yard.handles:
                handle.worker.asked = []
            sampled = Sampler(config, stream, yard.engine, pool, step).collect()
            steps.append((sampled, [{*handle.worker.asked} for handle in yard.handles]))
    return steps


def test_a_run_deals_by_length_from_the_second_epoch_on_and_samples_the_same(yard):
    plain, piped = sample(yard, "free"), sample(yard, "histopipe")
    history = History(len(PROBLEMS))
    for step, ((free, free_portions), (sampled, portions)) in enumerate(
        zip(plain, piped, strict=True)
    ):
        assert texts(g.rollout for g in sampled.graded) == texts(g.rollout for g in free.graded)
        ids = [g.rollout.problem.id for g in sampled.graded]
        indices = [int(id.partition("@")[0]) for id in ids]
        lengths, engines = plan(indices, history, 2, step)
        assert bool(engines) == (step >= 2)
        if engines:
            assert portions == [
                {id for id, engine in zip(ids, engines, strict=True) if engine == i} for i in (0, 1)
            ]
            by_length = sorted(zip(lengths, engines, strict=True), key=lambda pair: pair[0])
            assert [e for _, e in by_length] == ([0, 0, 1, 1] if step % 2 else [1, 1, 0, 0])
            actual = [
                fmean(len(c.token_ids) for c in g.rollout.completions) for g in sampled.graded
            ]
            agreement = sampled.metrics["sampling/length_rank_corr"]
            assert agreement == pytest.approx(rank_correlation(lengths, actual))
        else:
            assert portions == free_portions
            assert "sampling/length_rank_corr" not in sampled.metrics
        for index, graded in zip(indices, sampled.graded, strict=True):
            history.record(index, graded)


def test_an_engine_that_is_no_group_is_refused():
    tree = {"batch": {"problems": 8}, "sampling": {"group_size": 2, "max_tokens": 12}}
    config = build_config(tree | {"parallel": {"engines": 2, "deal": "histopipe"}})
    engine = build_engine("local", tiny_llama(), quant="int8", max_batch=4)
    stream = ProblemStream(Prompts(), 1)
    with GradingPool("exact") as pool:
        Sampler(config, stream, engine, pool, 0).collect()  # nothing is known yet
        with pytest.raises(EngineError, match=r"parallel.deal = 'histopipe' .* no group .* 'free'"):
            Sampler(config, stream, engine, pool, 1).collect()


def test_recipes_that_leave_nothing_to_deal_are_refused():
    def mistakes(**tree):
        return [*find_mistakes(build_config(tree))]

    piped = {"engines": 2, "deal": "histopipe"}
    assert not mistakes(parallel=piped)
    for engines in (0, 1):
        [mistake] = mistakes(parallel=piped | {"engines": engines})
        assert mistake.startswith(f"parallel.deal = 'histopipe': parallel.engines = {engines} ")
    [mistake] = mistakes(parallel=piped, rollout={"episode": "json:loads"})
    assert "rollout.episode = 'json:loads' asks turn by turn" in mistake
    assert any(
        "slower than 'free'" in note for note in find_warnings(build_config({"parallel": piped}))
    )
    assert not any("slower than 'free'" in note for note in find_warnings(Config()))


def test_a_run_without_a_second_epoch_is_refused():
    """10 steps of 8 problems ask 80: of 80 each once, of 79 one twice."""
    tree = {"steps": 10, "batch": {"problems": 8}, "parallel": {"engines": 2, "deal": "histopipe"}}
    check_repeats(build_config(tree), 79)
    with pytest.raises(ConfigError, match="ask each of 80 problems once at most; raise steps"):
        check_repeats(build_config(tree), 80)
    check_repeats(build_config(tree | {"sampling": {"select": "dots"}}), 80)
    check_repeats(build_config(tree | {"algo": {"dynamic_sampling": True}}), 80)
    check_repeats(build_config({}), 10**6)


# The simulator


def test_an_engine_worked_by_hand():
    """Ten steps of two sequences and twenty of one."""
    assert decode_seconds([10, 30]) == pytest.approx((10 * 2.0946 + 20 * 2.0773) / 1000)


def test_makespans_worked_by_hand():
    """Two engines, long and short in turns, one second of training. Fresh: 4 + 1 + 4 + 1. One step
    old: both engines end step 1 at 5, and training of step 0 ends at 5, of step 1 at 6. If all
    engines wait for step 0, they end step 1 at 8."""
    seconds = [[4, 1], [1, 4]]
    assert makespan(seconds, 1.0, stale=0) == 10
    assert makespan(seconds, 1.0, stale=1) == 6
    assert makespan(seconds, 1.0, stale=1, waits=True) == 9


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
        for mode in ("stale 0", "ahead"):
            assert seconds[f"histopipe, {mode}"] > seconds[f"fifo, {mode}"]
        # Sequences of like length end together, so few are decoded alone.
        assert run["histopipe, stale 1"]["busy"] < 0.8 * run["fifo, stale 1"]["busy"]
        assert run["longest, stale 0"]["bubbles"] < run["fifo, stale 0"]["bubbles"]
