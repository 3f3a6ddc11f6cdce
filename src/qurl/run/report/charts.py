"""What the report draws: which metrics go together, under which title."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qurl.run.trackers import find_accuracies

Records = Sequence[Mapping[str, Any]]
Style = Literal["line", "smooth", "log", "stacked"]


@dataclass(frozen=True)
class Curve:
    """The finite values of one metric."""

    label: str
    steps: Sequence[int]
    """Row of metrics.jsonl; for an evaluation the number of updates, which is one more."""
    values: Sequence[float]
    low: Sequence[float] = ()
    """Ends of the interval of each value; empty for a metric without intervals."""
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Curves on one pair of axes. `smooth` adds a moving average."""

    title: str
    note: str
    curves: Sequence[Curve]
    style: Style = "line"


_CHARTS: Sequence[tuple[str, str, Style, Mapping[str, str]]] = (
    ("Reward", "Mean over the completions of a step.", "smooth", {"reward/mean": "reward"}),
    (
        "Held-out accuracy",
        "Greedy accuracy by the precision of the weights, with 95% intervals.",
        "line",
        {},  # one curve for each precision that the run evaluates
    ),
    (
        "Mismatch: KL",
        "KL(behav || prox) per token: how far the quantized actor is from the full-precision one.",
        "smooth",
        {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"},
    ),
    (
        "Mismatch: largest ratio",
        "max of pi_prox / pi_behav over the tokens of a step, before truncation.",
        "log",
        {"rollout_corr/rollout_is_max": "raw maximum"},
    ),
    (
        "Clipping",
        "Share of tokens that are clipped, and of tokens that ACR's wider bound keeps.",
        "line",
        {"actor/pg_clipfrac": "clipped", "acr/rescued_frac": "rescued by ACR"},
    ),
    ("Entropy", "Entropy of the policy per token.", "smooth", {"actor/entropy": "entropy"}),
    (
        "Response length",
        "Tokens per completion.",
        "smooth",
        {"response_length/mean": "mean", "response_length/max": "max"},
    ),
    (
        "Update against quantization error",
        "Relative size of an update (Eq. 13) and of the actor's rounding (Eq. 14), squared.",
        "log",
        {"uaq/update_norm": "update", "uaq/quant_error": "quantization error"},
    ),
    (
        "Update visibility",
        "Share of codes changed by a sync; cosine between an update and the actor's change, and "
        "their projection: at 1 the actor follows on average.",
        "line",
        {
            "uaq/code_flip_frac": "changed codes",
            "uaq/update_cosine": "cosine",
            "uaq/update_proj": "projection",
        },
    ),
)


def build_charts(metrics: Records) -> list[Chart]:
    """All charts for which the run has data."""
    accuracies = {f"eval/{precision}/accuracy": precision for precision in find_precisions(metrics)}
    charts = []
    for title, note, style, names in _CHARTS:
        curves = [
            read_curve(metrics, name, label, is_positive=style == "log")
            for name, label in (names or accuracies).items()
        ]
        charts.append(Chart(title, note, [curve for curve in curves if curve], style))
    return [chart for chart in (*charts, _time_chart(metrics)) if chart.curves]


def read_curve(
    metrics: Records, name: str, label: str, *, is_positive: bool = False
) -> Curve | None:
    """The finite (positive) values of a metric with their intervals; None if there are none."""
    names: tuple[str, ...] = (name,)
    if any(f"{name}_low" in record for record in metrics):
        names = (name, f"{name}_low", f"{name}_high")
    rows = [
        (record["step"] + name.startswith("eval/"), *(float(record[n]) for n in names))
        for record in metrics
        if all(n in record for n in names)
    ]
    rows = [row for row in rows if all(map(math.isfinite, row)) and (row[1] > 0 or not is_positive)]
    return Curve(label, *(list(column) for column in zip(*rows, strict=True))) if rows else None


def find_precisions(metrics: Records) -> list[str]:
    """The <precision> of all eval/<precision>/accuracy, in order of appearance."""
    return list(dict.fromkeys(name for record in metrics for name in find_accuracies(record)))


def _time_chart(metrics: Records) -> Chart:
    """Seconds of each part of a step; 0 if the part did not run."""
    timed = [
        (record["step"], values)
        for record in metrics
        if (values := {k: float(v) for k, v in record.items() if k.startswith("timing_s/")})
        and record["step"] >= 0
    ]
    # Parts of every step at the bottom, those of a few steps (eval, save) on top.
    counts = Counter(name for _, values in timed for name in values)
    steps = [step for step, _ in timed]
    curves = [
        Curve(name.removeprefix("timing_s/"), steps, [values.get(name, 0.0) for _, values in timed])
        for name, _ in counts.most_common()
    ]
    return Chart("Time per step", "Seconds, stacked.", curves, "stacked")
