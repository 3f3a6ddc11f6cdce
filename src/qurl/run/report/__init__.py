"""The report of a run: one HTML file that needs no network.

charts.py says what is drawn, figures.py draws it, plain.html.j2 lays it out.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from qurl.config import read_recipe
from qurl.errors import DataError, MissingExtra
from qurl.run.directory import (
    CONFIG,
    EVENTS,
    METRICS,
    SAMPLES,
    flatten,
    iter_jsonl,
    read_jsonl,
    replacing,
)
from qurl.run.report.charts import Curve, build_charts, find_precisions, read_curve

T = TypeVar("T")

FIRST_SAMPLES, LAST_SAMPLES, LAST_EVENTS = 4, 12, 200


@dataclass(frozen=True)
class Headline:
    """One number at the top of the report."""

    label: str
    value: str
    detail: str = ""


def write_report(run_dir: str | Path) -> Path:
    """Draw what the run directory holds into its report.html; a running run may be read too."""
    try:
        from qurl.run.report.figures import draw_svg
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "the report") from error
    run_dir = Path(run_dir)
    config = _read_config(run_dir)
    metrics = _read(run_dir / METRICS)
    events = _read(run_dir / EVENTS)
    page = (
        _environment()
        .get_template("plain.html.j2")
        .render(
            name=run_dir.resolve().name,
            summary=_summary(config),
            headlines=build_headlines(config, metrics, events),
            figures=[(chart, draw_svg(chart)) for chart in build_charts(metrics)],
            events=events[-LAST_EVENTS:],
            num_events=len(events),
            samples=_pick_samples(run_dir / SAMPLES),
            config=flatten(config),
        )
    )
    with replacing(run_dir / "report.html") as file:
        file.write(page.encode())
    return run_dir / "report.html"


def build_headlines(
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
) -> list[Headline]:
    """The numbers that a reader wants first."""
    steps = max((record["step"] for record in metrics), default=0)
    headlines = [Headline("steps", f"{steps} of {config['steps']}")]
    if reward := read_curve(metrics, "reward/mean", "reward"):
        headlines.append(Headline("reward", _first_to_last(reward, "{:.3f}"), _at(reward)))
    for precision in find_precisions(metrics):
        name = f"eval/{precision}/accuracy"
        if accuracy := read_curve(metrics, name, precision, has_interval=True):
            headlines.append(_accuracy_headline(accuracy))
    if speed := read_curve(metrics, "perf/rollout_tokens_per_s", "throughput"):
        median = statistics.median(speed.values)
        headlines.append(Headline("rollout tokens / s", f"{median:,.0f}", "median over steps"))
    if kl := read_curve(metrics, "rollout_corr/k3_kl", "kl"):
        headlines.append(Headline("mismatch KL", f"{kl.values[-1]:.2e}", "last step"))
    kinds = Counter(event["kind"] for event in events)
    if loud := {kind: kinds[kind] for kind in ("alarm", "warning") if kinds[kind]}:
        counts = ", ".join(f"{count} {kind}{'s'[: count > 1]}" for kind, count in loud.items())
        headlines.append(Headline("attention", counts, "see the events below"))
    return headlines


def _accuracy_headline(curve: Curve) -> Headline:
    interval = f"{curve.low[-1]:.1%} to {curve.high[-1]:.1%}"
    return Headline(
        f"held-out accuracy, {curve.label}",
        _first_to_last(curve, "{:.1%}"),
        f"{_at(curve)}, 95%: {interval}",
    )


def _first_to_last(curve: Curve, form: str) -> str:
    return " → ".join(form.format(value) for value in _ends(curve.values))


def _at(curve: Curve) -> str:
    return "step " + " → ".join(str(step) for step in _ends(curve.steps))


def _ends(items: Sequence[T]) -> list[T]:
    return [items[0], items[-1]] if len(items) > 1 else [items[0]]


def _summary(config: Mapping[str, Any]) -> str:
    """What was trained, on what, and how."""
    flat = flatten(config)
    rollouts = "full-precision" if flat["quant.format"] == "none" else flat["quant.format"]
    return (
        f"{flat['model.path']} on {flat['task.name']}, {flat['algo.name']} with the objective "
        f"{flat['algo.objective']}, {rollouts} rollouts"
    )


def _read_config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / CONFIG
    if not path.is_file():
        raise DataError(
            f"{run_dir} is not a run directory: it has no {CONFIG}; give the run_dir of a recipe"
        )
    return read_recipe(run_dir)


def _read(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.exists() else []


def _pick_samples(path: Path) -> list[dict[str, Any]]:
    """The first few and the last few; the file can be larger than memory."""
    if not path.exists():
        return []
    records = iter_jsonl(path)
    first = list(islice(records, FIRST_SAMPLES))
    return [*first, *deque(records, maxlen=LAST_SAMPLES)]


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("qurl.run.report", "."),
        autoescape=True,  # jinja2's choice by suffix would not see the .html in .html.j2
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
