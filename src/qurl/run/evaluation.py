"""Held-out accuracy in one stated precision: greedy, avg@k and pass@k, with 95 % intervals."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from qurl.config import Config, load_config
from qurl.errors import ConfigError, DataError
from qurl.rewards import Grade, Grading
from qurl.rewards.grading import pass_at_k
from qurl.rewards.pool import Pool
from qurl.rollout.engine import Engine
from qurl.run.assembly import build_pool, prepare_torch
from qurl.run.checkpoint import find_policy, load_frozen_scales
from qurl.run.engines import build_actor
from qurl.run.intervals import Estimate, Z, wilson_interval
from qurl.run.splits import held_out_problems, load_split
from qurl.seeds import derive_seed
from qurl.trainer.policy import load_trained_policy
from qurl.types import Completion, Problem, SamplingParams


@dataclass(frozen=True)
class EvalResult:
    """How well one set of weights answers the held-out problems."""

    precision: str
    """The weights that answered: "full", "int8", ..."""
    outcomes: tuple[bool, ...]
    """Whether the greedy completion of each problem is correct."""
    scores: Mapping[str, Estimate]
    """Greedy "accuracy", and with samples "avg@k" and "pass@k"."""
    mean_length: float
    """Tokens per greedy completion."""
    frac_truncated: float
    """Share of greedy completions cut at max_tokens."""
    num_timeouts: int
    """Completions, greedy and sampled, whose grader was killed. They count as wrong."""
    sets: Mapping[str, EvalResult] = field(default_factory=dict)
    """The same of each named set of `task.eval_sets`."""

    def metrics(self) -> dict[str, float]:
        """Flat, under eval/<precision>/, and of each set under eval/<precision>/<set>/."""
        names = ("mean_length", "frac_truncated", "num_timeouts")
        values = {name: float(getattr(self, name)) for name in names}
        for name, score in self.scores.items():
            values |= {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high}
        metrics = {f"eval/{self.precision}/{name}": value for name, value in values.items()}
        return metrics | {
            k: v for result in self.sets.values() for k, v in result.metrics().items()
        }


def evaluate_model(source: str | None, config: Config) -> list[EvalResult]:
    """`qurl eval`: accuracy of `model.path`, or of a run's newest checkpoint, in each precision.

    The config is that of `source`, with flags.
    """
    device = prepare_torch(config)
    weights = _weights_to_evaluate(source, config)
    policy = load_trained_policy(weights, config.model, device)
    scales = None
    if config.quant.scales == "frozen" and isinstance(weights, Path):
        scales = load_frozen_scales(weights.parent)
    task = load_split(config, "eval", policy.tokenizer, policy.model.config)
    problems = held_out_problems(config, task)
    results: list[EvalResult] = []
    try:
        with build_pool(config, task.reward, task) as pool:
            for precision in config.eval_precisions:
                quant = "none" if precision == "full" else precision
                engine = build_actor(config, policy, quant, scales=scales)
                results.append(evaluate(config, engine, problems, pool, precision))
    finally:  # results of one precision are shown even if the next one fails
        if results:
            print_results(results)
    return results


def _weights_to_evaluate(source: str | None, config: Config) -> str | Path:
    """A model by its name, or the policy folder of a run's newest checkpoint."""
    if source and Path(source).is_dir():
        if config.model.path != load_config(source).model.path:
            raise ConfigError(
                f"model.path = {config.model.path!r}, but `qurl eval {source}` evaluates the "
                "newest checkpoint of that run; leave model.path out, or give a recipe instead"
            )
        return find_policy(Path(source))
    if config.model.path == "scratch":
        return find_policy(Path(config.run_dir).expanduser())
    return config.model.path


def evaluate(
    config: Config, engine: Engine, problems: Sequence[Problem], pool: Pool, precision: str
) -> EvalResult:
    """Grade a greedy completion of each problem, then `eval.samples` sampled ones.

    `precision` only labels the result: the engine decides which weights answer.
    """
    if not problems:
        raise DataError("there are no held-out problems to evaluate on; see task.eval_path")
    greedy = SamplingParams(
        max_tokens=config.eval_max_tokens,
        temperature=0.0,
        stop=config.sampling.stops,
        seed=derive_seed(config.seed, "eval"),
    )
    rollouts = engine.generate(problems, greedy)
    grades = Grading(pool, rollouts).grades()
    sampled: Sequence[Sequence[Grade]] = [()] * len(problems)
    if num := config.eval.samples:
        options = {"temperature": config.eval.temperature, "top_p": config.eval.top_p}
        params = dataclasses.replace(greedy, group_size=num, **options)
        sampled = Grading(pool, engine.generate(problems, params)).grades()
    answers: list[Answer] = []
    by_set: dict[str, list[Answer]] = {}
    for problem, rollout, [grade], drawn in zip(problems, rollouts, grades, sampled, strict=True):
        answers.append(Answer(rollout.completions[0], grade, drawn))
        by_set.setdefault(str(problem.extra.get("qurl_set", "")), []).append(answers[-1])
    sets = {k: summarise(part, f"{precision}/{k}", {}) for k, part in by_set.items() if k}
    return summarise(answers, precision, sets)


class Answer(NamedTuple):
    """How one problem was answered."""

    completion: Completion
    grade: Grade
    """The grade of the greedy completion."""
    sampled: Sequence[Grade]
    """Grades of the sampled completions; empty without `eval.samples`."""


def summarise(
    answers: Sequence[Answer], precision: str, sets: Mapping[str, EvalResult]
) -> EvalResult:
    outcomes = tuple(answer.grade.accuracy >= 1 for answer in answers)
    num_right, num = sum(outcomes), len(outcomes)
    scores = {"accuracy": Estimate(num_right / num, *wilson_interval(num_right, num))}
    if size := len(answers[0].sampled):
        correct = [sum(grade.accuracy >= 1 for grade in answer.sampled) for answer in answers]
        scores[f"avg@{size}"] = mean_score([count / size for count in correct])
        for k in sorted({*(2**i for i in range(size.bit_length())), size}):
            scores[f"pass@{k}"] = mean_score([pass_at_k(size, c, k) for c in correct])
    return EvalResult(
        precision=precision,
        outcomes=outcomes,
        scores=scores,
        mean_length=statistics.fmean(len(a.completion.token_ids) for a in answers),
        frac_truncated=statistics.fmean(a.completion.finish == "length" for a in answers),
        num_timeouts=sum(grade.timed_out for a in answers for grade in (a.grade, *a.sampled)),
        sets=sets,
    )


def mean_score(values: Sequence[float]) -> Estimate:
    """The mean of numbers in [0, 1], and mean -+ z * std / sqrt(n) clipped to [0, 1].

    Equal numbers have no spread to estimate from. They get Wilson's interval, the widest that
    numbers in [0, 1] with this mean can need.
    """
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Estimate(mean, 0.0, 1.0)
    if min(values) == max(values):
        return Estimate(mean, *wilson_interval(n * mean, n))
    spread = Z * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, max(mean - spread, 0.0), min(mean + spread, 1.0))


def print_results(results: Sequence[EvalResult], console: Console | None = None) -> None:
    """A table with a column per precision, then one per named set; plain outside a terminal."""
    console = console or Console()
    table = Table(title=f"{len(results[0].outcomes)} held-out problems, 95% intervals")
    table.add_column("")
    for result in results:
        table.add_column(result.precision, justify="right")
    rows = [
        {
            name.replace("accuracy", "greedy accuracy"): "{:.1%} ({:.1%} to {:.1%})".format(*score)
            for name, score in result.scores.items()
        }
        | {
            "mean length": f"{result.mean_length:.1f}",
            "truncated": f"{result.frac_truncated:.1%}",
            "grader timeouts": str(result.num_timeouts),
        }
        for result in results
    ]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    console.print(table)
    for name in results[0].sets:
        print_results([result.sets[name] for result in results], console)
