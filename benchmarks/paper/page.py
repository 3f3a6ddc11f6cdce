"""Parts of the sections of docs/results.md: tables, comparisons, curves and markers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.measured import replace_between, student_interval, table
from benchmarks.paper.arms import ROOT, Experiment
from benchmarks.paper.plots import FIGURES, Line, Panel, Plot, draw, thin
from benchmarks.paper.results import Eval, Result, Results, read_results
from qurl.run.intervals import Interval

PAGE = ROOT / "docs" / "results.md"
MISSING = "not run"


@dataclass(frozen=True)
class Section:
    """One table or figure of the paper, between its markers on the page."""

    name: str
    render: Callable[[Results], str]
    plots: Callable[[Results], Sequence[Plot]] = lambda _: ()

    def place(self, page: str, results: Results) -> str:
        """The page with this section rewritten from the results."""
        begin, end = f"<!-- {self.name}: begin (make tables) -->", f"<!-- {self.name}: end -->"
        return replace_between(page, begin, end, self.render(results))


def write(sections: Iterable[Section], page: Path = PAGE, figures: Path = FIGURES) -> None:
    results, text = read_results(), page.read_text(encoding="utf-8")
    for section in sections:
        text = section.place(text, results)
        for plot in section.plots(results):
            if plot.has_points:
                draw(plot, figures)
    page.write_text(text, encoding="utf-8")


# Cells and tables


def accuracy(found: Eval) -> str:
    low, high = found.interval
    return f"{100 * found.accuracy:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def points(difference: float, interval: Interval) -> str:
    low, high = interval
    return f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def number(value: float | None, form: str = ".2g") -> str:
    return "" if value is None else format(value, form)


def of_arm(results: Sequence[Result], arm: str) -> list[Result]:
    return sorted((r for r in results if r.arm == arm), key=lambda r: r.seed)


def common_steps(results: Iterable[Result]) -> int:
    """Number of steps that every run has; means over more would compare different times."""
    return min((result.steps for result in results), default=0)


def mean_of(result: Result, metric: str, steps: range) -> float | None:
    """None if the metric was not logged."""
    values = [value for step, value in result.curve(metric) if step in steps]
    return fmean(values) if values else None


def accuracy_table(experiment: Experiment, results: Results, paper: str) -> str:
    """A row for each arm and seed: before training and at the last evaluation."""
    rows = []
    for arm in experiment.arms:
        stated = number(arm.paper, ".2f")
        found = of_arm(results.get(experiment.name, ()), arm.name)
        rows += [[arm.label, stated, *_accuracy_cells(result)] for result in found]
        if not found:
            rows.append([arm.label, stated, "", MISSING, "", "", "", ""])
    head = ["arm", paper, "seed", "steps", "before RL", "last evaluation", "at step"]
    return table([*head, "quantized actor there"], rows)


def _accuracy_cells(result: Result) -> list[str]:
    steps = str(result.steps)
    if result.record["status"].startswith("failed"):
        steps += f" ({result.record['status']})"
    evals = result.evals()
    if not evals:
        return [str(result.seed), steps, "", "no evaluation", "", ""]
    before, last = accuracy(evals[0]) if evals[0].step == 0 else "", evals[-1]
    actor = [accuracy(e) for e in result.evals(of_actor=True) if e.step == last.step]
    return [str(result.seed), steps, before, accuracy(last), str(last.step), "".join(actor)]


# Comparisons


@dataclass(frozen=True)
class Claim:
    """The claim that one arm ends above another, or that the two do not differ."""

    text: str
    arm: str
    other: str
    paper: float | None = None
    """The paper's difference, in points."""
    is_equality: bool = False


def claims_table(results: Sequence[Result], claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        pair = of_arm(results, claim.arm), of_arm(results, claim.other)
        found = compare_arms(*pair)
        texts = [c.text for c in found] + mean_of_seeds([c.difference for c in found])
        nothing = "no evaluation at the same step" if all(pair) else MISSING
        cells = ["; ".join(texts) or nothing, conclude(claim, found)]
        rows.append([claim.text, number(claim.paper, "+.2f"), *cells])
    return table(["claim", "paper, points", "ours, points (95 %)", "conclusion"], rows)


def mean_of_seeds(differences: Sequence[float]) -> list[str]:
    """Mean in points; three or more seeds add Student's interval over seeds."""
    if len(differences) < 2:
        return []
    text = f"mean {100 * fmean(differences):+.1f}"
    if len(differences) > 2:
        low, high = student_interval(differences)
        text += f" (95 % over seeds: {100 * low:+.1f} to {100 * high:+.1f})"
    return [text]


@dataclass(frozen=True)
class Comparison:
    """How many more problems one run solves than another run with the same seed."""

    seed: int
    steps: Sequence[int]
    """Steps of the compared evaluations."""
    difference: float
    interval: Interval

    @property
    def text(self) -> str:
        steps = "-".join(str(s) for s in dict.fromkeys((self.steps[0], self.steps[-1])))
        return f"seed {self.seed}, step {steps}: {points(self.difference, self.interval)}"


def compare_arms(results: Sequence[Result], others: Sequence[Result]) -> list[Comparison]:
    """One comparison per common seed, over the later half of the common evaluations.

    Evaluations of the untrained model do not count. A seed that has only those is left out.
    """
    pairs = [
        (result.seed, trained_evals(result), trained_evals(other))
        for result in results
        for other in others
        if other.seed == result.seed
    ]
    pairs = [(seed, here, there) for seed, here, there in pairs if here.keys() & there.keys()]
    if not pairs:
        return []
    steps = sorted(set.intersection(*(here.keys() & there.keys() for _, here, there in pairs)))
    steps = steps[len(steps) // 2 :]
    return [
        Comparison(seed, steps, *difference([(here[step], there[step]) for step in steps]))
        for seed, here, there in pairs
        if steps
    ]


def trained_evals(result: Result) -> dict[int, Eval]:
    """By step."""
    return {e.step: e for e in result.evals() if e.step > 0}


def difference(pairs: Sequence[tuple[Eval, Eval]], z: float = 1.96) -> tuple[float, Interval]:
    """Mean over problems of d_i, with mean -+ z std(d) / sqrt(n).

    d_i is the outcome (0 or 1) of one run on problem i minus that of the other, averaged over
    pairs of evaluations. Both answer the same problems, which makes small differences visible.
    """
    columns = [zip(a.outcomes, b.outcomes, strict=True) for a, b in pairs]
    by_problem = [
        fmean(int(right) - int(other) for right, other in answers)
        for answers in zip(*columns, strict=True)
    ]
    mean = fmean(by_problem)
    spread = z * stdev(by_problem) / math.sqrt(len(by_problem))
    return mean, (mean - spread, mean + spread)


def conclude(claim: Claim, found: Sequence[Comparison]) -> str:
    """What the intervals of all seeds support, and the interval over seeds if there are three."""
    if len(found) < 2:
        return "one seed: no conclusion" if found else ""
    intervals = [comparison.interval for comparison in found]
    if len(found) > 2:
        intervals.append(student_interval([comparison.difference for comparison in found]))
    signs = {int(low > 0) - int(high < 0) for low, high in intervals}
    seeds = "both seeds" if len(found) == 2 else f"all {len(found)} seeds"
    if claim.is_equality and signs == {0}:
        return f"no difference seen in {seeds}"
    if signs in ({1}, {-1}):
        what = "they differ" if claim.is_equality else "seen" if signs == {1} else "opposite seen"
        return f"{what} in {seeds}"
    return "inconclusive"


# Curves


def curves(
    experiment: Experiment,
    results: Results,
    metric: str,
    summary: Callable[[list[float]], float] = fmean,
) -> list[Line]:
    """A line per arm and seed; the first seed is solid."""
    return [
        Line(arm.label, thin(result.curve(metric), summary), is_dashed=i > 0)
        for arm in experiment.arms
        for i, result in enumerate(of_arm(results.get(experiment.name, ()), arm.name))
    ]


def accuracy_curves(experiment: Experiment, results: Results) -> list[Line]:
    lines = []
    for arm in experiment.arms:
        for i, result in enumerate(of_arm(results.get(experiment.name, ()), arm.name)):
            evals = result.evals()
            points = [(e.step, 100 * e.accuracy) for e in evals]
            intervals = [(100 * e.interval[0], 100 * e.interval[1]) for e in evals]
            lines.append(Line(arm.label, points, intervals, is_dashed=i > 0))
    return lines


def accuracy_section(
    experiment: Experiment,
    claims: Sequence[Claim],
    paper: str,
    last_panel: tuple[str, str],
    more_tables: Sequence[Callable[[Experiment, Results], str]] = (),
) -> Section:
    """Accuracies, claims and curves of an experiment; `last_panel` is a title and its metric."""

    def plot(results: Results) -> Plot:
        title, metric = last_panel
        return Plot(
            experiment.name,
            [
                Panel("greedy test accuracy, %", accuracy_curves(experiment, results)),
                Panel("accuracy of the rollouts", curves(experiment, results, "reward/accuracy")),
                Panel(title, curves(experiment, results, metric)),
            ],
        )

    def render(results: Results) -> str:
        if experiment.name not in results:
            return f"No arm has run: {'; '.join(arm.label for arm in experiment.arms)}."
        tables = [
            accuracy_table(experiment, results, paper),
            *(table_of(experiment, results) for table_of in more_tables),
            claims_table(results[experiment.name], claims),
        ]
        return "\n\n".join([*tables, plot(results).link()])

    return Section(experiment.name, render, lambda results: [plot(results)])
