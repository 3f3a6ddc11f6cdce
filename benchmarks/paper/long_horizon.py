"""TIS against ACR over many updates, where the mismatch is large enough to matter."""

from __future__ import annotations

from benchmarks.paper.arms import LONG_HORIZON
from benchmarks.paper.figures_2_3 import mismatch_table
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
    Claim("INT8, rate 1e-5: ACR above TIS", "int8-acr-lr1e-5", "int8-tis-lr1e-5"),
    Claim("INT8, rate 1e-5: ACR above no correction", "int8-acr-lr1e-5", "int8-ppo_prox-lr1e-5"),
    Claim("rate 1e-5: BF16 above INT8 with ACR", "bf16-lr1e-5", "int8-acr-lr1e-5"),
    Claim("INT4: ACR above TIS", "int4-acr", "int4-tis"),
)


def render(results: Results) -> str:
    return "\n\n".join(
        [
            accuracy_table(LONG_HORIZON, results, "paper"),
            mismatch_table(LONG_HORIZON, results),
            claims_table(results.get(LONG_HORIZON.name, ()), CLAIMS),
            plot(results).link(),
        ]
    )


def plot(results: Results) -> Plot:
    kl = curves(LONG_HORIZON, results, "rollout_corr/kl")
    return Plot(
        "long_horizon",
        [
            Panel("greedy test accuracy, %", accuracy_curves(LONG_HORIZON, results)),
            Panel("accuracy of the rollouts", curves(LONG_HORIZON, results, "reward/accuracy")),
            Panel("KL(behav || prox) per token", kl),
        ],
    )


SECTION = Section("long_horizon", render, lambda results: [plot(results)])

if __name__ == "__main__":
    write([SECTION])
