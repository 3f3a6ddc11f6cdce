"""The order of problems, dynamic sampling, and what a step's sampler measures."""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
from models import group

from qurl.config import AlgoConfig, Config, build_config
from qurl.errors import ConfigError, DataError, EngineError, ModelError, TrainingError
from qurl.plugins import naming_failures
from qurl.rewards import GradingPool
from qurl.sampling import Hooks, ProblemStream, Sampler, Setup, collect, has_signal
from qurl.sampling.parts import build_part
from qurl.seeds import derive_seed
from qurl.types import Completion, Graded, Problem, Rollout


class Numbers:
    """A task whose i-th problem is "i"."""

    name, reward, notes = "numbers", "exact", ()

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Problem(id=str(index), prompt_ids=(5, 6), answer="right")


class Script:
    """An engine that writes "right" for the first `num_right` completions of each group."""

    def __init__(self, num_right):
        self.num_right = num_right
        self.calls, self.syncs = [], 0

    def sync(self, model, *, version):
        self.syncs += 1

    @contextmanager
    def stream(self, params):
        yield ScriptStream(self, params)

    def _group(self, problem, params):
        texts = ["right" if i < self.num_right else "wrong" for i in range(params.group_size)]
        return [
            Completion((7,) * (2 + i), (-1.0,) * (2 + i), text, "stop")
            for i, text in enumerate(texts)
        ]


class ScriptStream:
    """Finishes the problems in the reverse of their order."""

    def __init__(self, engine, params):
        self.engine, self.params, self.problems = engine, params, []

    def submit(self, problems):
        self.engine.calls.append(([p.id for p in problems], self.params))
        self.problems += problems

    def __iter__(self):
        while self.problems:
            problem = self.problems.pop()
            group = self.engine._group(problem, self.params)
            yield Rollout(problem, group, 0, self.params.temperature)


def ids(problems):
    return [p.id for p in problems]


def test_every_epoch_is_another_permutation():
    stream = ProblemStream(Numbers(10), seed=0)
    first = ids(stream.take(10))
    second = [id.removesuffix("@1") for id in ids(stream.take(10))]
    assert sorted(first) == sorted(second) == sorted(map(str, range(10)))
    assert first != second
    assert first != [str(i) for i in range(10)]


def test_the_position_is_all_of_the_state():
    stream = ProblemStream(Numbers(7), seed=3)
    everything = ids(stream.take(30))
    for position in (0, 1, 6, 7, 8, 20):
        resumed = ProblemStream(Numbers(7), seed=3)
        resumed.load_state_dict({"position": position})
        assert ids(resumed.take(30 - position)) == everything[position:]
        assert resumed.position == 30


def test_another_seed_is_another_order():
    assert ids(ProblemStream(Numbers(20), 0).take(20)) != ids(
        ProblemStream(Numbers(20), 1).take(20)
    )


def test_an_empty_task_is_refused():
    with pytest.raises(DataError, match="task 'numbers' has no problems"):
        ProblemStream(Numbers(0), seed=0)


def test_problems_that_share_an_id_are_refused():
    """Engines draw by id, and rollouts are told apart by it: both would get the same answers."""

    class Nameless(Numbers):
        def __getitem__(self, index):
            return replace(super().__getitem__(index), id="sum")

    with pytest.raises(DataError, match=r"several problems with the id 'sum'; give each its own"):
        ProblemStream(Nameless(8), seed=1).take(2)


def test_a_problem_taken_twice_has_two_ids():
    """Engines draw by id: the same one twice in a step would be answered alike."""
    taken = ids(ProblemStream(Numbers(4), seed=0).take(12))
    assert len(set(taken)) == 12
    assert set(Counter(id.partition("@")[0] for id in taken).values()) == {3}


def test_seeds_differ_by_purpose_and_fit_torch():
    seeds = {derive_seed(0, "rollout", step, round) for step in range(20) for round in range(20)}
    assert len(seeds) == 400
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(0, "a", 1) == derive_seed(0, "a", 1) != derive_seed(1, "a", 1)
    assert derive_seed(0, 1, 23) != derive_seed(0, 12, 3)


MIXED = group([5], [[7], [8]], [1.0, 0.0], id="mixed")
RIGHT = group([5], [[7], [8]], [1.0, 1.0], id="right")
WRONG = group([5], [[7], [8]], [0.0, 0.0], id="wrong")
SHAPED = group([5], [[7], [8]], [0.0, -0.5], accuracies=[0, 0], id="shaped")
"""All wrong; a length penalty makes its rewards differ."""


def test_signal_is_mixed_accuracy_not_mixed_reward():
    assert [has_signal(g) for g in (MIXED, RIGHT, WRONG, SHAPED)] == [True, False, False, False]


class Supply:
    """Serves groups from a list, and remembers what it was asked for."""

    def __init__(self, *groups):
        self.groups, self.requests = list(groups), []

    def __call__(self, round, count):
        self.requests.append((round, count))
        served, self.groups = self.groups[:count], self.groups[count:]
        return served


def test_without_dynamic_sampling_everything_is_kept():
    supply = Supply(RIGHT, SHAPED, MIXED)
    collected = collect(supply, 3, AlgoConfig())
    assert collected.graded == [RIGHT, SHAPED, MIXED]
    assert supply.requests == [(0, 3)]
    assert collected.metrics() == {"sampling/rounds": 1.0, "sampling/groups_kept_frac": 1.0}


def test_dynamic_sampling_refills_and_cuts_the_surplus():
    """Rounds of 2: (mixed, right), (shaped, wrong), (mixed, mixed): 3 kept of 6, one too many."""
    supply = Supply(MIXED, RIGHT, SHAPED, WRONG, MIXED, MIXED, MIXED)
    collected = collect(supply, 2, AlgoConfig(dynamic_sampling=True))
    assert collected.graded == [MIXED, MIXED]
    assert supply.requests == [(0, 2), (1, 2), (2, 2)]
    assert collected.metrics() == {
        "sampling/rounds": 3.0,
        "sampling/groups_kept_frac": pytest.approx(3 / 6),
    }


def test_gen_multiple_asks_for_more_per_round():
    supply = Supply(*[RIGHT, MIXED] * 6)
    collected = collect(supply, 3, AlgoConfig(dynamic_sampling=True, gen_multiple=4))
    assert supply.requests == [(0, 12)]
    assert len(collected.graded) == 3
    assert collected.metrics()["sampling/groups_kept_frac"] == 0.5


def test_dynamic_sampling_gives_up():
    supply = Supply(*[RIGHT] * 50, MIXED)
    with pytest.raises(TrainingError) as error:
        collect(supply, 4, AlgoConfig(dynamic_sampling=True, max_gen_rounds=3))
    assert len(supply.requests) == 3
    message = str(error.value)
    assert "0 groups with mixed outcomes among 12 in algo.max_gen_rounds = 3 rounds" in message
    assert "4 are needed" in message
    assert "Raise algo.max_gen_rounds and resume" in message


def make_sampler(engine, pool, *, overlong=0.0, step=5):
    config = build_config(
        {
            "seed": 1,
            "batch": {"problems": 2},
            "sampling": {"group_size": 4, "max_tokens": 5, "temperature": 0.5, "stop": ["!"]},
            "algo": {"overlong_frac": overlong, "dynamic_sampling": True},
        }
    )
    return Sampler(config, ProblemStream(Numbers(6), 1), engine, pool, step)


def test_the_sampler_takes_generates_and_grades():
    engine = Script(num_right=1)
    with GradingPool("exact") as pool:
        sampler = make_sampler(engine, pool)
        collected = collect(sampler, 2, sampler.config.algo)
    [(asked, params)] = engine.calls
    assert asked == ids(ProblemStream(Numbers(6), 1).take(2))
    assert (params.group_size, params.max_tokens, params.temperature) == (4, 5, 0.5)
    assert params.stop == ("!",)
    assert params.top_p == 1.0
    assert params.seed == derive_seed(1, "rollout", 5, 0)
    assert [g.rewards for g in collected.graded] == [[1.0, 0.0, 0.0, 0.0]] * 2
    assert sampler.stream.position == 2


def test_overlong_punishment_shapes_the_reward_and_not_the_accuracy():
    """max_tokens 5, the last 2 punished: lengths 2, 3, 4, 5 cost 0, 0, -1/2, -1."""
    with GradingPool("exact") as pool:
        sampler = make_sampler(Script(num_right=3), pool, overlong=0.4)
        [first, _] = sampler(0, 2)
    assert first.rewards == pytest.approx([1.0, 1.0, 0.5, -1.0])
    assert first.accuracies == [1.0, 1.0, 1.0, 0.0]
    assert sampler.metrics()["reward/overlong"] == 0.5


def test_a_refill_samples_new_problems_from_the_same_weights():
    engine = Script(num_right=4)  # all right: no signal
    with GradingPool("exact") as pool:
        sampler = make_sampler(engine, pool)
        with pytest.raises(TrainingError):
            collect(sampler, 2, AlgoConfig(dynamic_sampling=True, max_gen_rounds=3))
    assert engine.syncs == 0
    asked = [problem for problems, _ in engine.calls for problem in problems]
    assert asked == ids(ProblemStream(Numbers(6), 1).take(6))
    assert len({params.seed for _, params in engine.calls}) == 3


def test_metrics_speak_of_all_that_was_sampled():
    """Two groups of lengths 2, 3, 4, 5 with one right answer each, in two rounds."""
    engine = Script(num_right=1)
    with GradingPool("exact") as pool:
        sampler = make_sampler(engine, pool)
        sampler(0, 1)
        sampler(1, 1)
    metrics = sampler.metrics()
    assert metrics["reward/mean"] == 0.25
    assert metrics["reward/accuracy"] == 0.25
    assert metrics["response_length/mean"] == 3.5
    assert metrics["response_length/max"] == 5
    assert metrics["perf/rollout_tokens"] == 28
    assert "reward/overlong" not in metrics
    assert metrics["timing_s/grade"] >= 0
    assert metrics["perf/rollout_tokens_per_s"] == pytest.approx(28 / metrics["timing_s/rollout"])


def test_grading_overlaps_generation_and_groups_keep_the_order_of_their_problems(tmp_path):
    """The engine waits until its first group was graded before it finishes the second."""
    graded = tmp_path / "graded"

    def note(text, answer, extra):
        graded.write_text(text)
        return len(text)

    class Waiting(Script):
        def _group(self, problem, params):
            assert graded.exists() == (len(self.seen) > 0)
            self.seen.append(problem.id)
            return super()._group(problem, params)

    engine = Waiting(num_right=1)
    engine.seen = []
    with GradingPool(note) as pool:
        sampler = make_sampler(engine, pool)
        groups = sampler(0, 2)
    asked = ids(ProblemStream(Numbers(6), 1).take(2))
    assert engine.seen == asked[::-1]
    assert [g.rollout.problem.id for g in groups] == asked


def hardest(count, num_problems, num_taken, accuracies, seed):
    """The problems with the lowest last accuracy, those never asked first."""
    return sorted(range(num_problems), key=lambda i: accuracies.get(i, [-1.0])[-1])[:count]


def solve(stream, problems, accuracy):
    def group_of(problem):
        accuracies = [float(accuracy(problem)), 0.0]
        rollout = Rollout(problem, [Completion([7], [-1.0], "", "stop")] * 2, 0, 1.0)
        return Graded(rollout, accuracies, [{"accuracy": a} for a in accuracies])

    stream.record([group_of(p) for p in problems])


def test_a_selector_of_your_own_sees_the_history():
    stream = ProblemStream(Numbers(4), seed=0, select=hardest)
    first = stream.take(2)
    assert ids(first) == ["0", "1@1"]
    solve(stream, first, lambda p: p.id == "0")  # means 0.5 and 0
    second = stream.take(2)
    assert ids(second) == ["2@2", "3@3"]
    solve(stream, second, lambda p: True)
    state = stream.state_dict()
    assert state["position"] == 4
    assert dict(stream.history) == {0: [0.5], 1: [0.0], 2: [0.5], 3: [0.5]}
    third = ids(stream.take(2))
    assert third == ["1@4", "0@5"]
    resumed = ProblemStream(Numbers(4), seed=0, select=hardest)
    resumed.load_state_dict(state)
    assert ids(resumed.take(2)) == third


def test_the_history_of_a_problem_is_bounded():
    stream = ProblemStream(Numbers(1), seed=0)
    for i in range(12):
        solve(stream, stream.take(1), lambda _, i=i: i % 2)
    assert dict(stream.history) == {0: [0.0, 0.5] * 4}
    assert stream.history.total(0).count == 24


@pytest.mark.parametrize("indices", [[0], [0, 4], [-1, 0], None, "ab", [0.5, 1.0], 3])
def test_a_selector_that_returns_nonsense_is_an_error(indices):
    stream = ProblemStream(Numbers(4), seed=0, select=lambda *_: indices)
    with pytest.raises(ConfigError, match="it must return 2 indices from 0 to 3"):
        stream.take(2)


def test_a_selector_that_raises_is_an_error_with_its_place():
    stream = ProblemStream(Numbers(4), seed=0, select=lambda *_: 1 // 0)
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: .*test_sampling\.py, line \d+"):
        stream.take(2)


def test_a_selector_is_loaded_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_select.py").write_text(
        "def last(count, size, *_):\n    return [size - 1] * count"
    )
    monkeypatch.chdir(tmp_path)
    key, setup = "sampling.select", Setup(Config(), Numbers(4), 100)
    stream = ProblemStream(Numbers(4), 0, build_part(key, "my_select:last", {}, setup))
    assert ids(stream.take(3)) == ["3", "3@1", "3@2"]
    with pytest.raises(ConfigError, match=r"sampling\.select = 'my_select:first': .*it has last"):
        build_part(key, "my_select:first", {}, setup)


class SizedScript(Script):
    """Writes "right" first, in every piece, in groups of the sizes that it is asked for."""

    @contextmanager
    def stream(self, params):
        yield SizedStream(self, params)


class SizedStream(ScriptStream):
    def submit(self, problems, sizes=()):
        self.engine.calls.append(([p.id for p in problems], list(sizes)))
        pairs = zip(problems, sizes or [self.params.group_size] * len(problems), strict=True)
        self.problems += pairs

    def __iter__(self):
        while self.problems:
            problem, size = self.problems.pop()
            group = self.engine._group(problem, self.params)[:size]
            yield Rollout(problem, group, 0, self.params.temperature)


def sample_with(hooks, engine, **sampling):
    keys = {"group_size": 4, "max_tokens": 5, **sampling}
    config = build_config({"batch": {"problems": 2}, "sampling": keys})
    with GradingPool("exact") as pool:
        stream = ProblemStream(Numbers(6), 1, hooks.select)
        sampler = Sampler(config, stream, engine, pool, 0, hooks)
        return sampler, sampler.collect()


def test_a_group_in_pieces_is_one_group():
    """4 in pieces of 3: every piece has a seed of its own, and begins with a right answer."""
    engine = SizedScript(num_right=1)
    sampler, collected = sample_with(Hooks(), engine, chunk=3)
    [(asked, sizes)] = engine.calls
    names = [asked[0].removesuffix("@@0"), asked[2].removesuffix("@@0")]
    assert asked == [f"{name}@@{start}" for name in names for start in (0, 3)]
    assert sizes == [3, 1, 3, 1]
    assert ids(g.rollout.problem for g in collected.graded) == names
    assert [g.rewards for g in collected.graded] == [[1.0, 0.0, 0.0, 1.0]] * 2
    assert [len(g.rollout.completions) for g in collected.graded] == [4, 4]
    assert list(sampler.stream.history.values()) == [[0.5], [0.5]]


def test_a_budget_gives_each_problem_its_own_number():
    engine = SizedScript(num_right=1)

    def budget(indices, history, group_size):
        assert (len(indices), history.num_taken, group_size) == (2, 2, 4)
        return [3, 2]

    _, collected = sample_with(Hooks(budget=budget), engine)
    assert [len(g.rewards) for g in collected.graded] == [3, 2]


def test_budgets_that_cannot_be_met_are_errors():
    with pytest.raises(ConfigError, match=r"sampling.budget returned \[4\]; it must return 2"):
        sample_with(Hooks(budget=lambda *_: [4]), SizedScript(num_right=1))
    with pytest.raises(ConfigError, match=r"sampling.budget returned \[0, 4\]"):
        sample_with(Hooks(budget=lambda *_: [0, 4]), SizedScript(num_right=1))
    with pytest.raises(EngineError, match=r"asks for groups of 2 to 4, .* takes no sizes"):
        sample_with(Hooks(budget=lambda *_: [2, 4]), Script(num_right=1))


class DraftingScript(SizedScript):
    """Also takes earlier responses."""

    @contextmanager
    def stream(self, params):
        yield DraftingStream(self, params)


class DraftingStream(SizedStream):
    def submit(self, problems, sizes=(), earlier=()):
        super().submit(problems, sizes)
        self.engine.calls[-1] += ([[r.tolist() for r in known] for known in earlier],)


@pytest.mark.parametrize("chunk", [0, 3])
def test_the_last_responses_to_a_problem_reach_the_engine(chunk):
    """Two problems in two epochs: the first has no history, the second that of the first."""
    sampling = {"group_size": 4, "max_tokens": 5, "keep_responses": True, "chunk": chunk}
    tree = {"batch": {"problems": 2}, "sampling": sampling, "rollout": {"drafts": "histospec"}}
    config, engine = build_config(tree), DraftingScript(num_right=1)
    with GradingPool("exact") as pool:
        stream = ProblemStream(Numbers(2), 1, keeps_responses=True)
        for step in range(2):
            Sampler(config, stream, engine, pool, step).collect()
        with pytest.raises(EngineError, match=r"rollout\.drafts .* earlier\) .* takes none; use"):
            Sampler(config, stream, SizedScript(num_right=1), pool, 2).collect()
    num_pieces = 2 if chunk else 1
    lengths = [2, 3, 4, 2] if chunk else [2, 3, 4, 5]
    group = [[7] * length for length in lengths]
    assert [earlier for *_, earlier in engine.calls] == [
        [[]] * 2 * num_pieces,
        [group] * 2 * num_pieces,
    ]


def test_a_thermostat_sets_the_temperature_of_a_step():
    _, collected = sample_with(
        Hooks(thermostat=lambda step, temperature: temperature + 0.25), Script(num_right=1)
    )
    assert {g.rollout.temperature for g in collected.graded} == {1.25}


@pytest.mark.parametrize("returned", [0.0, -1.0, math.inf, None, "warm"])
def test_a_thermostat_that_returns_no_temperature_is_an_error(returned):
    """At 0 the engine would take the likeliest token, and the trainer divide its logits by 0."""
    with pytest.raises(ConfigError, match=r"sampling.thermostat returned .*; it must return a"):
        sample_with(Hooks(thermostat=lambda *_: returned), Script(num_right=1))


class Hoarding:
    """A replay that samples nothing, or trains on nothing."""

    def __init__(self, num_fresh, groups=()):
        self.num_fresh, self.groups = lambda num_groups: num_fresh, groups

    def merge(self, fresh, num_groups, seed):
        return self.groups


def test_a_replay_without_groups_is_an_error():
    with pytest.raises(ConfigError, match=r"sampling.replay: num_fresh returned 0"):
        sample_with(Hooks(replay=Hoarding(0)), Script(num_right=1))
    for groups in ([], [None]):
        with pytest.raises(ConfigError, match=r"sampling.replay: merge returned .* 1 or more"):
            Hooks(replay=Hoarding(2, groups)).merge([], 2, seed=0)
    with pytest.raises(ConfigError, match=r"sampling.replay failed: TypeError"):
        Hooks(replay=Hoarding(2, None)).merge([], 2, seed=0)


class Probing:
    """Asks problem 5 first, and then what the history has."""

    def probe(self, step, history, seed):
        return [5]

    def __call__(self, count, num_problems, num_taken, history, seed):
        assert dict(history) == {5: [0.25]}
        return [0, 1]


def test_a_selector_can_ask_before_it_chooses():
    sampler, collected = sample_with(Hooks(select=Probing()), Script(num_right=1))
    assert len(collected.graded) == len(sampler.graded) == 2
    assert len(sampler.probed) == 1
    assert sampler.metrics()["perf/rollout_tokens"] == 3 * 14
    assert sampler.stream.position == 3


def test_an_error_of_ours_within_a_part_is_left_as_it_is():
    with pytest.raises(ModelError) as error, naming_failures("sampling.select"):
        raise ModelError("systems.dots.encoder = 'x' cannot be loaded")
    assert str(error.value) == "systems.dots.encoder = 'x' cannot be loaded"


def test_a_part_of_ones_own_that_raises_is_named():
    with pytest.raises(ConfigError, match=r"algo.advantage failed: ZeroDivision.*, line \d+"):
        naming_failures("algo.advantage")(lambda: 1 / 0)()


@pytest.mark.parametrize("state", [lambda: 1, {"a": Numbers(1)}], ids=["lambda", "object"])
def test_a_state_that_no_checkpoint_could_hold_is_refused_before_the_run(state):
    class Remembers:
        def __call__(self, *arguments):
            return []

        def state_dict(self):
            return {"state": state}

    with pytest.raises(ConfigError, match=r"state_dict of select\..*Remembers cannot be saved"):
        Hooks(select=Remembers()).check_state()


def test_a_method_of_a_part_that_raises_is_named():
    class Observes:
        def observe(self, step, graded, metrics):
            raise KeyError("gone")

        def metrics(self, trained):
            return {"my/name": "text"}

    hooks = Hooks(subselect=Observes())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"batch.subselect: observe failed: KeyError: 'gone'"):
        hooks.observe(0, [], {})
    with pytest.raises(ConfigError, match=r"batch.subselect: metrics failed: ValueError: .*text"):
        hooks.metrics(lambda: None)  # type: ignore[arg-type, return-value]
