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

SECTIONS = (
    checks.SECTION,
    table1.SECTION,
    dapo.SECTION,
    figures_2_3.SECTION,
    figures_4_9.SECTION,
    long_horizon.SECTION,
    figure_8.SECTION,
)

if __name__ == "__main__":
    write(SECTIONS)
