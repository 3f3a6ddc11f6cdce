"""Plots as SVG files: the same bytes for the same curves, and a digest of them inside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
MOST_POINTS = 40


@dataclass(frozen=True)
class Line:
    """Points of one arm and seed; lines of one label share a colour."""

    label: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()
    """Of each point, where there are any."""
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    is_log: bool = False
    x_label: str = "step"


@dataclass(frozen=True)
class Plot:
    """A file of docs/figures."""

    name: str
    panels: Sequence[Panel]
    columns: int = 3

    @property
    def has_points(self) -> bool:
        return any(line.points for panel in self.panels for line in panel.lines)

    @property
    def digest(self) -> str:
        """Of all that is drawn: tells whether a file is up to date, whatever draws it."""
        return hashlib.sha256(repr(asdict(self)).encode()).hexdigest()

    def link(self) -> str:
        """Of docs/results.md."""
        titles = "; ".join(panel.title for panel in self.panels)
        return f"![{titles}](figures/{self.name}.svg)" if self.has_points else "No curve yet."


def thin(
    points: Sequence[tuple[float, float]], summary: Callable[[list[float]], float] = fmean
) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` points: the summary of each stretch of steps, at its middle."""
    width = -(-len(points) // MOST_POINTS) or 1
    pieces = [points[i : i + width] for i in range(0, len(points), width)]
    return [(fmean(x for x, _ in piece), summary([y for _, y in piece])) for piece in pieces]


def draw(plot: Plot, folder: Path = FIGURES) -> Path:
    panels = [panel for panel in plot.panels if any(line.points for line in panel.lines)]
    columns = min(len(panels), plot.columns)
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    style: dict[Any, Any] = {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": plot.name}
    path = folder / f"{plot.name}.svg"
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, labels)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=4)
        figure.savefig(path, metadata={"Date": None, "Description": plot.digest})
    return path


def _draw_panel(axes: Axes, panel: Panel, labels: Sequence[str]) -> None:
    for line in panel.lines:
        if not line.points:
            continue
        x, y = zip(*line.points, strict=True)
        color = f"C{labels.index(line.label) % 10}"
        marker = "o" if len(x) <= 30 else ""
        dashes = "--" if line.is_dashed else "-"
        axes.plot(x, y, dashes, color=color, marker=marker, markersize=2.5, label=line.label)
        if line.intervals:
            low, high = zip(*line.intervals, strict=True)
            axes.fill_between(x, low, high, color=color, alpha=0.08, linewidth=0)
    if panel.is_log:
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.x_label)
    axes.grid(alpha=0.2)
