"""Draws charts as inline SVG. Lines and text take the page's colour, so dark mode works."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qurl.run.report.charts import Chart, Curve

_INK = "#010203"
"""Placeholder that the SVG replaces by the page's text colour."""
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "svg.fonttype": "none",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "grid.color", "text.color"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}


def draw_svg(chart: Chart) -> Markup:
    """An <svg> element for a page."""
    # The salt makes ids repeatable, and different between the charts of a page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.title}):
        buffer = io.StringIO()
        _draw(chart).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # figure_1, axes_1, ...: the same in every chart
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg)  # the page sizes it by its viewBox
    return Markup(svg)


def _draw(chart: Chart) -> Figure:
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    axes = figure.subplots()
    for curve in chart.curves:
        _draw_curve(axes, curve, chart.style == "smooth")
    if chart.style == "log":
        axes.set_yscale("log")
    steps = sorted({step for curve in chart.curves for step in curve.steps})
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(chart.curves) > 1:
        figure.legend(loc="outside upper left", ncols=4)
    return figure


def _draw_curve(axes: Axes, curve: Curve, is_smooth: bool) -> None:
    marker = "o" if len(curve.steps) <= 30 else ""
    has_average = is_smooth and len(curve.steps) >= 40
    style: dict[str, Any] = {"linewidth": 1.5, "alpha": 1.0, "label": curve.label}
    if has_average:
        style = {"linewidth": 0.8, "alpha": 0.4, "label": "_raw"}
    (line,) = axes.plot(curve.steps, curve.values, marker=marker, markersize=3, **style)
    color = line.get_color()
    if has_average:
        average = _moving_average(curve.values, len(curve.values) // 10)
        axes.plot(curve.steps, average, color=color, linewidth=1.8, label=curve.label)
    if curve.low:
        axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
        axes.vlines(curve.steps, curve.low, curve.high, color=color, alpha=0.5, linewidth=0.8)


def _moving_average(values: Sequence[float], width: int) -> np.ndarray:
    """Centred average; near the ends over fewer values."""
    x, kernel = np.asarray(values, dtype=float), np.ones(2 * (width // 2) + 1)
    return np.convolve(x, kernel, "same") / np.convolve(np.ones_like(x), kernel, "same")
