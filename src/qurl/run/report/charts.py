"""What the report draws: which metrics go together, under which title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qurl.run.trackers import find_accuracies

Records = Sequence[Mapping[str, Any]]
Style = Literal["line", "smooth", "log"]


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
    style: Style
    curves: Sequence[Curve]


_CHARTS: Sequence[tuple[str, str, Style, Mapping[str, str]]] = (
    ("Reward", "Mean over the completions of a step.", "smooth", {"reward/mean": "reward"}),
    ("Held-out accuracy", "Greedy accuracy, with 95% intervals.", "line", {"eval/": ""}),
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
    ("Response length", "Tokens.", "smooth", {f"response_length/{x}": x for x in ("mean", "max")}),
    (
        "Update against quantization error",
        "Relative size of an update (Eq. 13) and of the actor's rounding (Eq. 14), squared.",
        "log",
        {"uaq/update_norm": "update", "uaq/quant_error": "quantization error"},
    ),
    (
        "Update visibility",
        "Share of codes changed by a sync; cosine of update and actor's change; projection.",
        "line",
        {
            "uaq/code_flip_frac": "changed codes",
            "uaq/update_cosine": "cosine",
            "uaq/update_proj": "projection",
        },
    ),
    ("Time per step", "Seconds.", "log", {"timing_s/": ""}),
)
"""Title, note, style, and labels of the metrics; a name that ends in / stands for a family."""


def build_charts(metrics: Records) -> list[Chart]:
    """All charts for which the run has data."""
    timings = dict.fromkeys(name for row in metrics for name in row if name.startswith("timing_s/"))
    families = {
        "eval/": {f"eval/{name}/accuracy": name for name in find_precisions(metrics)},
        "timing_s/": {name: name.removeprefix("timing_s/") for name in timings},
    }
    charts = []
    for title, note, style, names in _CHARTS:
        labels = families.get(next(iter(names)), names)
        curves = [read_curve(metrics, name, label, style) for name, label in labels.items()]
        charts.append(Chart(title, note, style, [curve for curve in curves if curve]))
    return [chart for chart in charts if chart.curves]


def read_curve(metrics: Records, name: str, label: str, style: Style = "line") -> Curve | None:
    """The finite values of a metric with their intervals, positive for "log"; None if none are."""
    names: tuple[str, ...] = (name,)
    if any(f"{name}_low" in record for record in metrics):
        names = (name, f"{name}_low", f"{name}_high")
    rows = [
        (record["step"] + name.startswith("eval/"), *(float(record[n]) for n in names))
        for record in metrics
        if all(n in record for n in names)
    ]
    rows = [row for row in rows if all(map(math.isfinite, row)) and (row[1] > 0 or style != "log")]
    return Curve(label, *(list(column) for column in zip(*rows, strict=True))) if rows else None


def find_precisions(metrics: Records) -> list[str]:
    """The <precision> of all eval/<precision>/accuracy, in order of appearance."""
    return list(dict.fromkeys(name for record in metrics for name in find_accuracies(record)))
