"""Figures 2 and 3: clip fraction, KL(behav || prox) and the largest ratio over the steps."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.measured import FORMATS, table
from benchmarks.paper.arms import ROOT, TABLE_1, Experiment
from benchmarks.paper.page import (
    MISSING,
    Section,
    common_steps,
    curves,
    mean_of,
    number,
    of_arm,
)
from benchmarks.paper.plots import Panel, Plot
from benchmarks.paper.results import Result, Results

HEAD = (
    *("arm", "seed", "clipped, first fifth", "clipped, last fifth", "KL, first fifth"),
    *("KL, last fifth", "largest ratio", "truncated, all steps", "rescued by ACR, all steps"),
)
"""Fifths of the steps that every run has."""
UNTRAINED, TRAINED = (
    ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("mismatch", "mismatch_trained")
)
"""One model before and after 100 steps on BF16 rollouts, sampled in each format."""
CORRECTED = ("tis", "acr")


def render(results: Results) -> str:
    return "\n\n".join(
        [
            mismatch_table(TABLE_1, results),
            plot(results).link(),
            "KL(behav || prox), k3 estimate, when one model is sampled in each format:",
            growth_table(results),
        ]
    )


def mismatch_table(experiment: Experiment, results: Results) -> str:
    runs = results[experiment.name]
    num_steps = common_steps(runs)
    rows = [
        [arm.label, *mismatch_cells(result, num_steps)]
        for arm in experiment.arms
        for result in of_arm(runs, arm.name)
    ]
    return f"Over the first {num_steps} steps, which every run reached:\n\n{table(HEAD, rows)}"


def growth_table(results: Results) -> str:
    """Does the mismatch grow without training on quantized rollouts?"""
    before, after = (_k3_by_format(path) for path in (UNTRAINED, TRAINED))
    rows = []
    for format in ("none", "int8", "fp8"):
        names = ["bf16"] if format == "none" else [f"{format}-{name}" for name in CORRECTED]
        runs = [r for name in names for r in of_arm(results.get("table1", ()), name)]
        own = ", ".join(f"{_last_k3(run)} ({run.steps})" for run in runs) or MISSING
        rows.append([FORMATS[format, "none"], f"{before[format]:.1e}", f"{after[format]:.1e}", own])
    head = [
        *("rollouts", "before RL", "after 100 steps on BF16 rollouts"),
        "trained on these rollouts (BF16, TIS, ACR of Table 1): last 20 steps (length of the run)",
    ]
    return table(head, rows)


def _last_k3(run: Result) -> str:
    return number(mean_of(run, "rollout_corr/k3_kl", range(run.steps - 20, run.steps)), ".1e")


def _k3_by_format(path: Path) -> dict[str, float]:
    rows = json.loads(path.read_text())["rows"]
    return {row["format"]: row["k3"] for row in rows if row["kv"] == "none"}


def mismatch_cells(result: Result, num_steps: int) -> list[str]:
    """Seed, clip fractions, KL, the largest ratio, shares of truncated and rescued tokens."""
    every, fifth = range(num_steps), max(1, num_steps // 5)
    ends = (every[:fifth], every[-fifth:])
    ratios = result.curve("rollout_corr/rollout_is_max")
    rescued = mean_of(result, "acr/rescued_frac", every)
    return [
        str(result.seed),
        *(number(mean_of(result, "actor/pg_clipfrac", end), ".3%") for end in ends),
        *(number(mean_of(result, "rollout_corr/kl", end), ".1e") for end in ends),
        number(max((ratio for step, ratio in ratios if step in every), default=None), ".3g"),
        number(mean_of(result, "rollout_corr/truncated_frac", every), ".3%"),
        number(rescued, ".4%") if result.record["config"]["algo.objective"] == "acr" else "",
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
