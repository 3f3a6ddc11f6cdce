"""TIS against ACR over many updates, where the mismatch is large enough to matter."""

from __future__ import annotations

from benchmarks.measured import table
from benchmarks.paper.arms import LONG_HORIZON
from benchmarks.paper.figures_2_3 import HEAD, mismatch_cells
from benchmarks.paper.page import (
    MISSING,
    Claim,
    Section,
    accuracy_curves,
    accuracy_table,
    claims_table,
    common_steps,
    curves,
    of_arm,
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
    runs = results.get("long_horizon", ())
    num_steps, rows = common_steps(runs), []
    for arm in LONG_HORIZON.arms:
        found = of_arm(runs, arm.name)
        rows += [[arm.label, str(r.updates), *mismatch_cells(r, num_steps)] for r in found]
        if not found:
            rows.append([arm.label, MISSING, *[""] * 8])
    return "\n\n".join(
        [
            accuracy_table(LONG_HORIZON, results, "paper"),
            f"Over the first {num_steps} steps, which all runs have:",
            table((HEAD[0], "updates", *HEAD[1:]), rows),
            claims_table(runs, CLAIMS),
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
