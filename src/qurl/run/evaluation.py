"""Held-out accuracy in one stated precision: greedy accuracy, avg@k and pass@k, with intervals.

All intervals are over problems, at 95 %.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from qurl.config import Config
from qurl.errors import DataError
from qurl.rewards.grading import Grading
from qurl.rewards.pool import GradingPool
from qurl.rollout.engine import Engine
from qurl.seeds import derive_seed
from qurl.types import Problem, Rollout, SamplingParams

Interval = tuple[float, float]
Z = 1.96
"""Standard deviations on either side of a mean that 95 % lie within."""


@dataclass(frozen=True)
class EvalResult:
    """What one set of weights is worth on the held-out problems."""

    precision: str
    """Of the weights that answered: "full", "int8", ..."""
    num_problems: int
    accuracy: float
    """Of the greedy completions."""
    accuracy_interval: Interval
    mean_length: float
    """Tokens of a greedy completion."""
    frac_truncated: float
    """Share of greedy completions cut at max_tokens."""
    num_timeouts: int
    """Completions, greedy and sampled, whose grader was killed; they count as wrong."""
    outcomes: tuple[bool, ...]
    """Whether the greedy completion of each problem is correct, in the order of the problems."""
    samples_per_problem: int = 0
    avg_at_k: float | None = None
    """Mean accuracy of the sampled completions, k = samples_per_problem; None without samples."""
    avg_at_k_interval: Interval | None = None
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    pass_at_k_intervals: Mapping[int, Interval] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Flat, under eval/<precision>/."""
        values = {
            **_with_interval("accuracy", self.accuracy, self.accuracy_interval),
            "mean_length": self.mean_length,
            "frac_truncated": self.frac_truncated,
            "num_timeouts": float(self.num_timeouts),
        }
        if self.avg_at_k is not None and self.avg_at_k_interval is not None:
            name = f"avg@{self.samples_per_problem}"
            values |= _with_interval(name, self.avg_at_k, self.avg_at_k_interval)
        for k, value in self.pass_at_k.items():
            values |= _with_interval(f"pass@{k}", value, self.pass_at_k_intervals[k])
        return {f"eval/{self.precision}/{name}": value for name, value in values.items()}


def evaluate(
    engine: Engine,
    problems: Sequence[Problem],
    pool: GradingPool,
    *,
    precision: str,
    max_tokens: int,
    samples: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop: Sequence[int | str] = (),
    seed: int = 0,
) -> EvalResult:
    """One greedy completion of each problem, then `samples` sampled ones where asked.

    `precision` only labels the result: the engine decides which weights answer. A completion is
    correct when its accuracy reaches 1.
    """
    if not problems:
        raise DataError("there are no held-out problems to evaluate on; see task.eval_path")
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop, seed=seed)
    rollouts = engine.generate(problems, greedy)
    counts, timeouts = _count_correct(rollouts, pool)
    completions = [r.completions[0] for r in rollouts]
    result = EvalResult(
        precision=precision,
        num_problems=len(problems),
        accuracy=sum(counts) / len(problems),
        accuracy_interval=wilson_interval(sum(counts), len(problems)),
        mean_length=statistics.fmean(len(c.token_ids) for c in completions),
        frac_truncated=statistics.fmean(c.finish == "length" for c in completions),
        num_timeouts=timeouts,
        outcomes=tuple(count > 0 for count in counts),
    )
    if samples == 0:
        return result
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=stop,
        seed=seed,
        group_size=samples,
    )
    counts, timeouts = _count_correct(engine.generate(problems, params), pool)
    return _with_samples(result, counts, samples, timeouts)


def evaluate_recipe(
    config: Config, engine: Engine, problems: Sequence[Problem], pool: GradingPool, precision: str
) -> EvalResult:
    """`evaluate` as a recipe's [eval] section asks for it."""
    return evaluate(
        engine,
        problems,
        pool,
        precision=precision,
        max_tokens=config.eval_max_tokens,
        samples=config.eval.samples,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        stop=config.sampling.stop,
        seed=derive_seed(config.seed, "eval"),
    )


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of the n samples hold a correct one: 1 - C(n - c, k) / C(n, k), unbiased.

    In exact integers, so that no size of n loses digits. With k = 1 this is c / n.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct = {num_correct} must lie in 0..num_samples = {num_samples}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must lie in 1..num_samples = {num_samples}")
    draws = math.comb(num_samples, k)
    return (draws - math.comb(num_samples - num_correct, k)) / draws


def wilson_interval(successes: float, trials: int) -> Interval:
    """Wilson's score interval of a proportion p = successes / trials:

    (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials: need 0 <= successes <= trials")
    n, p, z = trials, successes / trials, Z
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    # At p = 0 and p = 1 one end is p itself, which rounding would miss by 1e-17.
    return (0.0 if p == 0 else max(low, 0.0)), (1.0 if p == 1 else min(high, 1.0))


def mean_interval(values: Sequence[float]) -> Interval:
    """mean -+ z * std / sqrt(n) of numbers in [0, 1], clipped to [0, 1]; one number says nothing.

    Equal numbers have no spread to estimate from. Their interval is Wilson's, which is the widest
    that numbers in [0, 1] with this mean can need.
    """
    if not values:
        raise ValueError("the mean of no values has no interval")
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return 0.0, 1.0
    if min(values) == max(values):
        return wilson_interval(n * mean, n)
    spread = Z * statistics.stdev(values) / math.sqrt(n)
    return max(mean - spread, 0.0), min(mean + spread, 1.0)


def ks_up_to(samples: int) -> list[int]:
    """The powers of two up to `samples`, and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length())]
    return sorted({*powers, samples})


def print_results(results: Sequence[EvalResult], console: Console | None = None) -> None:
    """One table, a column per precision; outside a terminal it is plain text."""
    table = Table(title=f"{results[0].num_problems} held-out problems, 95% intervals")
    table.add_column("")
    for result in results:
        table.add_column(result.precision, justify="right")
    rows = [_rows(result) for result in results]
    for name in dict.fromkeys(name for row in rows for name in row):
        table.add_row(name, *(row.get(name, "") for row in rows))
    (console or Console()).print(table)


def _rows(result: EvalResult) -> dict[str, str]:
    rows = {"greedy accuracy": _percent(result.accuracy, result.accuracy_interval)}
    if result.avg_at_k is not None and result.avg_at_k_interval is not None:
        name = f"avg@{result.samples_per_problem}"
        rows[name] = _percent(result.avg_at_k, result.avg_at_k_interval)
    for k, value in result.pass_at_k.items():
        rows[f"pass@{k}"] = _percent(value, result.pass_at_k_intervals[k])
    rows["mean length"] = f"{result.mean_length:.1f}"
    rows["truncated"] = f"{result.frac_truncated:.1%}"
    rows["grader timeouts"] = str(result.num_timeouts)
    return rows


def _percent(value: float, interval: Interval) -> str:
    low, high = interval
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def _with_interval(name: str, value: float, interval: Interval) -> dict[str, float]:
    low, high = interval
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _count_correct(rollouts: Sequence[Rollout], pool: GradingPool) -> tuple[list[int], int]:
    """Correct completions of each rollout, and how many graders timed out."""
    groups = Grading(pool, rollouts).grades()
    counts = [sum(grade.accuracy >= 1 for grade in group) for group in groups]
    return counts, sum(grade.timed_out for group in groups for grade in group)


def _with_samples(
    result: EvalResult, counts: Sequence[int], samples: int, timeouts: int
) -> EvalResult:
    """Add avg@k and pass@k from the number of correct samples of each problem."""
    averages = [count / samples for count in counts]
    passes = {k: [pass_at_k(samples, c, k) for c in counts] for k in ks_up_to(samples)}
    return dataclasses.replace(
        result,
        num_timeouts=result.num_timeouts + timeouts,
        samples_per_problem=samples,
        avg_at_k=statistics.fmean(averages),
        avg_at_k_interval=mean_interval(averages),
        pass_at_k={k: statistics.fmean(values) for k, values in passes.items()},
        pass_at_k_intervals={k: mean_interval(values) for k, values in passes.items()},
    )
