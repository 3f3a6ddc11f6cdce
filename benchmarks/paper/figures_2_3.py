"""Figures 2 and 3: clip fraction, KL(behav || prox) and the largest ratio over the steps."""

from __future__ import annotations

from benchmarks.measured import table
from benchmarks.paper.arms import TABLE_1
from benchmarks.paper.page import MISSING, Section, curves, mean_of, number, of_arm, write
from benchmarks.paper.plots import Panel, Plot
from benchmarks.paper.results import Result, Results

HEAD = (
    *("arm", "seed", "clipped, first fifth", "clipped, last fifth", "KL, first fifth"),
    *("KL, last fifth", "largest ratio", "truncated", "rescued by ACR"),
)


def render(results: Results) -> str:
    rows = []
    for arm in TABLE_1.arms:
        found = of_arm(results.get("table1", ()), arm.name)
        rows += [[arm.label, *mismatch_cells(result)] for result in found]
        if not found:
            rows.append([arm.label, MISSING, *[""] * 7])
    return "\n\n".join([table(HEAD, rows), plot(results).link()])


def mismatch_cells(result: Result) -> list[str]:
    """Seed, clip fractions, KL, the largest ratio, and what truncation and ACR touched."""
    ratios = [value for _, value in result.curve("rollout_corr/rollout_is_max")]
    fifths = ((0.0, 0.2), (0.8, 1.0))
    return [
        str(result.seed),
        *(number(mean_of(result, "actor/pg_clipfrac", *fifth), ".3%") for fifth in fifths),
        *(number(mean_of(result, "rollout_corr/kl", *fifth), ".1e") for fifth in fifths),
        number(max(ratios, default=None), ".3g"),
        number(mean_of(result, "rollout_corr/truncated_frac"), ".3%"),
        number(mean_of(result, "acr/rescued_frac"), ".4%"),
    ]


def plot(results: Results) -> Plot:
    clipped = curves(TABLE_1, results, "actor/pg_clipfrac")
    kl = curves(TABLE_1, results, "rollout_corr/kl")
    ratio = curves(TABLE_1, results, "rollout_corr/rollout_is_max", max)
    return Plot(
        "figures_2_3",
        [
            Panel("share of clipped tokens", clipped),
            Panel("KL(behav || prox) per token", kl),
            Panel("largest prox / behav", ratio, is_log=True),
        ],
    )


SECTION = Section("figures_2_3", render, lambda results: [plot(results)])

if __name__ == "__main__":
    write([SECTION])
