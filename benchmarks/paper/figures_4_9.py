"""Figures 4 and 9: size of updates, Eq. (13), and of rounding, Eq. (14), by layer group."""

from __future__ import annotations

from benchmarks.measured import table
from benchmarks.paper.arms import DAPO_UAQ, LAYER_GROUPS, TABLE_1, VISIBILITY, Experiment
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
    *("arm", "seed", "layers", "Eq. (13)", "Eq. (14)", "ratio", "changed codes", "cosine"),
    "projection",
)
SHOWN = (
    *((TABLE_1, name) for name in ("bf16", "int8-acr", "fp8-acr")),
    *((DAPO_UAQ, name) for name in ("int8", "int8-uaq1.5", "int8-layers1.5", "int8-lr1.5")),
)


def render(results: Results) -> str:
    rows = []
    for experiment, name in SHOWN:
        label = f"{experiment.name}: {experiment.arm(name).label}"
        runs = results.get(experiment.name, ())
        found, steps = of_arm(runs, name), range(common_steps(runs))
        rows += [[label, *cells] for r in found for cells in visibility_cells(r, steps)]
        if not found:
            rows.append([label, MISSING, *[""] * 7])
    plots = "\n\n".join(plot(experiment, results).link() for experiment in (TABLE_1, DAPO_UAQ))
    note = "Means over the steps that every run of an experiment reached:"
    return "\n\n".join([note, table(HEAD, rows), plots])


def visibility_cells(result: Result, steps: range) -> list[list[str]]:
    """One row per layer group."""
    rows = []
    for group in LAYER_GROUPS:
        update, error, flips, cosine, projection = (
            mean_of(result, f"uaq/{metric}/{group}", steps) for metric in VISIBILITY
        )
        ratio = update / error if update is not None and error else None
        numbers = [number(update, ".1e"), number(error, ".1e"), number(ratio, ".1e")]
        shares = [number(flips, ".3%"), number(cosine, ".3f"), number(projection, ".2f")]
        rows.append([str(result.seed), group, *numbers, *shares])
    return rows


def plot(experiment: Experiment, results: Results) -> Plot:
    panels = []
    for group in ("attn_in", "mlp_out"):
        panels += [
            Panel(f"{group}: {title}", curves(experiment, results, f"uaq/{metric}/{group}"), is_log)
            for title, metric, is_log in (
                ("update, Eq. (13)", "update_norm", True),
                ("share of changed codes", "code_flip_frac", True),
                ("cosine with the update", "update_cosine", False),
                ("projection on the update", "update_proj", False),
            )
        ]
    return Plot(f"figures_4_9_{experiment.name}", panels, columns=4)


SECTION = Section(
    "figures_4_9", render, lambda results: [plot(e, results) for e in (TABLE_1, DAPO_UAQ)]
)
