"""Table 1: PPO on GSM8K with BF16, INT8 and FP8 rollouts, by objective."""

from __future__ import annotations

from benchmarks.paper.arms import TABLE_1
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
    Claim("INT8: TIS above no correction", "int8-tis", "int8-ppo_prox", 2.62),
    Claim("INT8: ACR above TIS", "int8-acr", "int8-tis", 2.15),
    Claim("BF16 above INT8 with ACR", "bf16", "int8-acr", 1.80),
    Claim("FP8: TIS above no correction", "fp8-tis", "fp8-ppo_prox", 53.60),
    Claim("FP8: ACR above TIS", "fp8-acr", "fp8-tis", 0.68),
    Claim("BF16 above FP8 with ACR", "bf16", "fp8-acr", 1.07),
)


def render(results: Results) -> str:
    return "\n\n".join(
        [
            accuracy_table(TABLE_1, results, "paper, step 435"),
            claims_table(results.get("table1", ()), CLAIMS),
            plot(results).link(),
        ]
    )


def plot(results: Results) -> Plot:
    return Plot(
        "table1",
        [
            Panel("greedy test accuracy, %", accuracy_curves(TABLE_1, results)),
            Panel("accuracy of the rollouts", curves(TABLE_1, results, "reward/accuracy")),
            Panel("tokens per rollout", curves(TABLE_1, results, "response_length/mean")),
        ],
    )


SECTION = Section("table1", render, lambda results: [plot(results)])

if __name__ == "__main__":
    write([SECTION])
