"""Redraws all of docs/results.md and docs/figures from the committed JSON."""

from __future__ import annotations

from benchmarks.paper import (
    accuracies,
    checks,
    epochs,
    figure_8,
    figures_2_3,
    figures_4_9,
    time_to_accuracy,
)
from benchmarks.paper.page import write

SECTIONS = (
    checks.SECTION,
    accuracies.PPO,
    accuracies.SLOW,
    epochs.SECTION,
    accuracies.DAPO,
    accuracies.SIGNED_DAPO,
    accuracies.GRPO,
    accuracies.GRPO_AT_3E_6,
    figures_2_3.SECTION,
    figures_4_9.SECTION,
    accuracies.FAR,
    accuracies.HARD,
    time_to_accuracy.SECTION,
    figure_8.SECTION,
)

if __name__ == "__main__":
    write(SECTIONS)
