"""The report of a run: one HTML file that needs no network.

charts.py chooses what is drawn, figures.py draws it, plain.html.j2 is the page.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from qurl.config import read_recipe
from qurl.errors import DataError
from qurl.plugins import import_extra
from qurl.run.directory import EVENTS, METRICS, SAMPLES, flatten, iter_jsonl, read_jsonl, replacing
from qurl.run.report.charts import Records, build_charts, find_precisions, read_curve

FIRST_SAMPLES, LAST_SAMPLES = 4, 12


class Headline(NamedTuple):  # one number at the top of the report
    label: str
    value: str
    detail: str = ""


def write_report(run_dir: str | Path) -> Path:
    """Write report.html into a run directory; the run may still be going on."""
    figures = import_extra("qurl.run.report.figures", "matplotlib", "report", "the report")
    run_dir = Path(run_dir)
    if not (run_dir / "config.json").is_file():
        raise DataError(f"{run_dir} is not a run directory: it has no config.json")
    config = flatten(read_recipe(run_dir))
    metrics, events = (
        read_jsonl(path) if path.exists() else [] for path in (run_dir / METRICS, run_dir / EVENTS)
    )
    environment = Environment(
        loader=PackageLoader("qurl.run.report", "."),
        autoescape=True,  # jinja2's choice by suffix would not see the .html in .html.j2
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("plain.html.j2").render(
        name=run_dir.resolve().name,
        headlines=build_headlines(config["steps"], metrics, events),
        figures=[(chart, figures.draw_svg(chart)) for chart in build_charts(metrics)],
        events=events,
        samples=_pick_samples(run_dir / SAMPLES),
        config=config,
    )
    with replacing(run_dir / "report.html") as file:
        file.write(page.encode())
    return run_dir / "report.html"


def build_headlines(num_steps: int, metrics: Records, events: Records) -> list[Headline]:
    """The numbers that a reader wants first."""
    steps = sum("reward/mean" in record for record in metrics)
    headlines = [Headline("steps", f"{steps} of {num_steps}")]
    if reward := read_curve(metrics, "reward/mean", "reward"):
        at = f"step {_ends(reward.steps, '{}')}"
        headlines.append(Headline("reward", _ends(reward.values, "{:.3f}"), at))
    for precision in find_precisions(metrics):
        if curve := read_curve(metrics, f"eval/{precision}/accuracy", precision):
            interval = f"95%: {curve.low[-1]:.1%} to {curve.high[-1]:.1%}" if curve.low else ""
            at = f"after {_ends(curve.steps, '{}')} steps, {interval}"
            label = f"held-out accuracy, {precision}"
            headlines.append(Headline(label, _ends(curve.values, "{:.1%}"), at))
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


def _ends(values: Sequence[float], form: str) -> str:
    """First and last value."""
    ends = values if len(values) == 1 else (values[0], values[-1])
    return " → ".join(form.format(value) for value in ends)


def _pick_samples(path: Path) -> list[dict[str, Any]]:
    """The first few and the last few; the file can be larger than memory."""
    if not path.exists():
        return []
    records = iter_jsonl(path)
    first = list(islice(records, FIRST_SAMPLES))
    return [*first, *deque(records, maxlen=LAST_SAMPLES)]
