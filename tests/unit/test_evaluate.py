import io
import itertools
import random
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from qurl.config import build_config
from qurl.errors import DataError
from qurl.rewards.grading import pass_at_k
from qurl.rewards.reward import Grade
from qurl.run.evaluation import evaluate, mean_score, print_results, wilson_interval
from qurl.seeds import derive_seed
from qurl.types import Completion, Problem, Rollout


def test_pass_at_k_worked_by_hand():
    # n = 4, c = 1, k = 2: of C(4,2) = 6 pairs C(3,2) = 3 miss the correct one.
    assert pass_at_k(4, 1, 2) == 0.5
    # n = 5, c = 2, k = 3: of C(5,3) = 10 triples only the C(3,3) = 1 of wrong ones misses.
    assert pass_at_k(5, 2, 3) == 0.9
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3, abs=1e-15)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        share = sum(any(s) for s in subsets) / len(subsets)
        assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_keeps_its_digits_for_large_n():
    # c = 1: the correct sample is among the k drawn with chance k / n.
    assert pass_at_k(20_000, 1, 3) == 3 / 20_000
    assert pass_at_k(1024, 1, 512) == 0.5


def test_wilson_known_values():
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=5e-5)
    # p = 0: low = 0, high = z^2 / (n + z^2) = 3.8416 / 13.8416
    assert wilson_interval(0, 10) == pytest.approx((0.0, 3.8416 / 13.8416))
    assert wilson_interval(10, 10) == pytest.approx((10 / 13.8416, 1.0))


def test_wilson_covers_the_truth_about_95_times_in_100():
    rng = random.Random(0)
    truth, trials, repeats = 0.3, 40, 2000
    covered = 0
    for _ in range(repeats):
        low, high = wilson_interval(sum(rng.random() < truth for _ in range(trials)), trials)
        covered += low <= truth <= high
    assert 0.93 < covered / repeats < 0.975


def test_mean_score():
    # mean 0.5, sample std of (0.25, 0.75) is 0.35355, / sqrt(2) = 0.25, times 1.96 = 0.49
    assert mean_score([0.25, 0.75]) == pytest.approx((0.5, 0.01, 0.99))
    assert mean_score([0.0, 1.0]) == (0.5, 0.0, 1.0)  # 0.5 -+ 0.98, clipped
    assert mean_score([0.4]) == (0.4, 0.0, 1.0)


def test_mean_score_of_equal_values_is_not_a_point():
    assert mean_score([1.0] * 10)[1:] == wilson_interval(10, 10)
    assert mean_score([0.0] * 10)[1:] == wilson_interval(0, 10)


class FakePool:
    """A text that equals the answer is worth 1, "half" 0.5, and "slow" times out."""

    def submit(self, texts, answer, extra):
        future = Future()
        future.set_result(
            [
                Grade(1.0 if text == answer else 0.5 if text == "half" else 0.0, {}, text == "slow")
                for text in texts
            ]
        )
        return [future]


@dataclass
class FakeEngine:
    greedy: list[str]
    sampled: list[list[str]] = field(default_factory=list)
    asked: list = field(default_factory=list)

    def sync(self, model, *, version):
        raise AssertionError("evaluation must not change the weights")

    def generate(self, problems, params):
        self.asked.append(params)
        texts = [[t] for t in self.greedy] if params.temperature == 0 else self.sampled
        return [
            Rollout(p, [self.complete(t) for t in group], 0, params.temperature)
            for p, group in zip(problems, texts, strict=True)
        ]

    def complete(self, text):
        ids = list(range(len(text)))
        return Completion(ids, [0.0] * len(ids), text, "length" if text == "slow" else "stop")


PROBLEMS = [Problem("a", [1], "7"), Problem("b", [2], "42")]


def answer(engine, precision="full", problems=PROBLEMS, **options):
    tree = {"sampling": {"max_tokens": 9, "stop": ["\n"]}, "eval": options, "seed": 5}
    return evaluate(build_config(tree), engine, problems, FakePool(), precision)


def test_named_sets_are_scored_apart_and_together():
    named = [("easy", "7"), ("hard", "1"), ("hard", "2"), ("easy", "8")]
    problems = [Problem(str(i), [1], a, {"qurl_set": name}) for i, (name, a) in enumerate(named)]
    engine = FakeEngine(["7", "slow", "2", "8"], [["7", "x"], ["1", "1"], ["x", "x"], ["8", "8"]])
    result = answer(engine, problems=problems, samples=2)
    assert result.outcomes == (True, False, True, True)
    metrics = result.metrics()
    assert metrics["eval/full/accuracy"] == 0.75
    assert metrics["eval/full/easy/accuracy"] == 1.0
    assert metrics["eval/full/hard/accuracy"] == 0.5
    assert metrics["eval/full/hard/accuracy_low"] == wilson_interval(1, 2)[0]
    assert metrics["eval/full/easy/avg@2"] == 0.75
    assert metrics["eval/full/hard/avg@2"] == 0.5
    assert metrics["eval/full/hard/num_timeouts"] == metrics["eval/full/num_timeouts"] == 1
    assert metrics["eval/full/easy/num_timeouts"] == 0
    assert len(engine.asked) == 2, "all sets are answered together"


def test_greedy_evaluation():
    engine = FakeEngine(["7", "slow"])
    result = answer(engine)
    assert result.scores == {"accuracy": (0.5, *wilson_interval(1, 2))}
    assert result.outcomes == (True, False)
    assert result.mean_length == 2.5
    assert result.frac_truncated == 0.5
    assert result.num_timeouts == 1
    assert len(engine.asked) == 1
    assert (engine.asked[0].max_tokens, engine.asked[0].stop) == (9, ("\n",))
    assert result.metrics()["eval/full/accuracy"] == 0.5
    assert not any("@" in name for name in result.metrics())


def test_sampled_evaluation():
    sampled = [["7", "7", "x"], ["x", "slow", "42"]]  # 2 and 1 of 3 correct
    engine = FakeEngine(["7", "42"], sampled)
    result = answer(engine, "int8", samples=3, temperature=0.6, top_p=0.95, max_tokens=7)
    assert list(result.scores) == ["accuracy", "avg@3", "pass@1", "pass@2", "pass@3"]
    assert result.scores["avg@3"] == pytest.approx((0.5, *mean_score([2 / 3, 1 / 3])[1:]))
    # pass@2: 1 - C(1,2)/C(3,2) = 1 and 1 - C(2,2)/C(3,2) = 2/3
    passes = [result.scores[f"pass@{k}"].value for k in (1, 2, 3)]
    assert passes == pytest.approx([0.5, 5 / 6, 1.0])
    assert result.num_timeouts == 1
    params = engine.asked[1]
    assert (params.group_size, params.temperature, params.top_p) == (3, 0.6, 0.95)
    assert (params.max_tokens, params.seed) == (7, derive_seed(5, "eval"))
    metrics = result.metrics()
    assert metrics["eval/int8/accuracy"] == 1.0
    assert metrics["eval/int8/avg@3"] == pytest.approx(0.5)
    assert metrics["eval/int8/pass@2"] == pytest.approx(5 / 6)
    assert metrics["eval/int8/pass@2_low"] <= 5 / 6 <= metrics["eval/int8/pass@2_high"]


def test_half_right_is_not_correct():
    engine = FakeEngine(["half", "42"])
    assert answer(engine).scores["accuracy"].value == 0.5


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="no held-out problems"):
        answer(FakeEngine([]), problems=[])


def test_each_named_set_has_a_table_that_fits_a_terminal():
    problems = [Problem(str(i), [1], "7", {"qurl_set": f"olympiad_{i}"}) for i in range(3)]
    results = [answer(FakeEngine("7x7"), precision, problems) for precision in ("full", "int8")]
    file = io.StringIO()
    print_results(results, Console(file=file, width=80))
    text = file.getvalue()
    assert "…" not in text
    assert all(f"{p}/olympiad_{i}" in text for p in ("full", "int8") for i in range(3))


def test_printed_table_is_plain_outside_a_terminal():
    engine = FakeEngine(["7", "x"], [["7", "x"], ["42", "42"]])
    results = [answer(engine, precision, samples=2) for precision in ("full", "int8")]
    file = io.StringIO()
    print_results(results, Console(file=file, width=100))
    text = file.getvalue()
    assert "\x1b" not in text
    assert "50.0% (9.5% to 90.5%)" in text  # Wilson 1/2
    assert "pass@2" in text
    assert "int8" in text
