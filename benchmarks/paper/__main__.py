"""Redraws all of docs/results.md and docs/figures from the committed JSON."""

from __future__ import annotations

from benchmarks.paper import (
    checks,
    dapo,
    figure_8,
    figures_2_3,
    figures_4_9,
    long_horizon,
    table1,
)
from benchmarks.paper.page import write

SECTIONS = tuple(
    module.SECTION
    for module in (checks, table1, dapo, figures_2_3, figures_4_9, long_horizon, figure_8)
)

if __name__ == "__main__":
    write(SECTIONS)
