"""Tables 2 and 4: DAPO with INT8 rollouts, with UAQ and with the learning rates it amounts to."""

from __future__ import annotations

from benchmarks.paper.arms import DAPO_UAQ
from benchmarks.paper.page import (
    Claim,
    Section,
    accuracy_curves,
    accuracy_table,
    claims_table,
    curves,
    write,
)
from benchmarks.paper.plots import Panel, Plot
from benchmarks.paper.results import Results

CLAIMS = (
    Claim("UAQ s = 1.5 above none", "int8-uaq1.5", "int8", 0.62),
    Claim("UAQ s = 1.5 above rate x 1.5 everywhere", "int8-uaq1.5", "int8-lr1.5", 2.19),
    Claim("UAQ s = 1.5 above s = 2", "int8-uaq1.5", "int8-uaq2", 2.10),
    Claim(
        "ours: UAQ is the same as rate x 1.5 on its layers",
        "int8-uaq1.5",
        "int8-layers1.5",
        is_equality=True,
    ),
)


def render(results: Results) -> str:
    return "\n\n".join(
        [
            accuracy_table(DAPO_UAQ, results, "paper, AIME24 avg@32"),
            claims_table(results.get("dapo", ()), CLAIMS),
            plot(results).link(),
        ]
    )


def plot(results: Results) -> Plot:
    return Plot(
        "dapo",
        [
            Panel("greedy test accuracy, %", accuracy_curves(DAPO_UAQ, results)),
            Panel("accuracy of the rollouts", curves(DAPO_UAQ, results, "reward/accuracy")),
            Panel("groups kept", curves(DAPO_UAQ, results, "sampling/groups_kept_frac")),
        ],
    )


SECTION = Section("dapo", render, lambda results: [plot(results)])

if __name__ == "__main__":
    write([SECTION])
