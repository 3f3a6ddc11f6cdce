"""Figure 8: rollout speed by model size and format, and the time of a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.measured import FORMATS, Key, build_mark, local_rollouts, table, with_note
from benchmarks.paper.arms import ROOT, SPEED
from benchmarks.paper.page import MISSING, Section, of_arm
from benchmarks.paper.plots import Line, Panel, Plot
from benchmarks.paper.results import Result, Results
from qurl.bench.shapes import SHAPES

ROLLOUTS = ROOT / "benchmarks" / "results" / "rollout.json"
WORKLOADS = {"A": "256 sequences, 512 + 1024 tokens", "B": "64 sequences, 512 + 1024 tokens"}
PARTS = ("sync", "rollout", "grade", "prox", "update")
WARM_UP_STEPS = 2
STEP_HEAD = (
    *("arm", "timed steps", "tokens per completion", "thousand tokens/s", *PARTS),
    *("total", "speed per token over BF16"),
)

Rollouts = Mapping[Key, Mapping[str, Any]]
"""Entries of `qurl bench rollout`."""


def render(results: Results) -> str:
    rollouts = local_rollouts(ROLLOUTS)
    return "\n\n".join(
        [
            "Thousand tokens per second, and the speedup over our BF16 (random weights with the "
            "shapes of Qwen2.5, `benchmarks/results/rollout.json`):",
            with_note(rollout_table(rollouts)),
            plot(rollouts).link(),
            "Seconds per step on GSM8K: 0.5B, 256 completions, one arm on the GPU. Medians, "
            f"without the first {WARM_UP_STEPS} steps:",
            step_table(results),
        ]
    )


def rollout_table(rollouts: Rollouts) -> str:
    rows = []
    for workload, sizes in WORKLOADS.items():
        for model in (name for name in SHAPES if name != "tiny"):
            base = rollouts.get((model, workload, "none", "none"))
            found = [rollouts.get((model, workload, *format)) for format in FORMATS]
            if any(found):
                cells = [_speed_cell(entry, base) for entry in found]
                rows.append([model, f"{workload}: {sizes}", *cells])
    return table(["model", "workload", *FORMATS.values()], rows)


def _speed_cell(entry: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> str:
    if entry is None:
        return MISSING
    text = f"{_speed(entry) / 1e3:.1f}"
    if base is None:
        return text
    return f"{text} ({_speed(entry) / _speed(base):.2f}x{build_mark(entry, base)})"


def _speed(entry: Mapping[str, Any]) -> float:
    return entry["figures"]["tokens_per_s"]


def step_table(results: Results) -> str:
    """Runs differ in completion length, so the last column compares seconds per token."""
    rows, base = [], None
    for arm in SPEED.arms:
        found = [r for r in of_arm(results.get(SPEED.name, ()), arm.name) if has_timed_steps(r)]
        if arm.overrides["quant.format"] == "none":  # the others of its algorithm follow
            base = found[0] if found else None
        rows.append([arm.label, *_step_cells(found[0], base)] if found else _not_run(arm.label))
    return table(STEP_HEAD, rows)


def has_timed_steps(result: Result) -> bool:
    """False if the run stopped during its warm-up."""
    return result.steps > WARM_UP_STEPS


def _not_run(label: str) -> list[str]:
    return [label, MISSING, *[""] * (len(STEP_HEAD) - 2)]


def _step_cells(result: Result, base: Result | None) -> list[str]:
    seconds = step_seconds(result)
    tokens = _median(result, "response_length/mean")
    speed = _median(result, "perf/rollout_tokens_per_s")
    cells = [str(result.steps - WARM_UP_STEPS), f"{tokens:.0f}", f"{speed / 1e3:.0f}"]
    cells += [f"{seconds[part]:.2f}" for part in PARTS]
    speed_up = f"{seconds_per_token(base) / seconds_per_token(result):.2f}x" if base else ""
    return [*cells, f"{sum(seconds.values()):.2f}", speed_up]


def seconds_per_token(result: Result) -> float:
    """Seconds of a whole step per token of a mean completion."""
    return sum(step_seconds(result).values()) / _median(result, "response_length/mean")


def step_seconds(result: Result) -> dict[str, float]:
    """The median of each part over the steps after the warm-up."""
    is_alone = all(attempt["jobs"] == 1 for attempt in result.record["attempts"])
    assert is_alone, f"{result.arm} shared the machine, so its times do not count"
    return {part: _median(result, f"timing_s/{part}") for part in PARTS}


def _median(result: Result, metric: str) -> float:
    steps = range(WARM_UP_STEPS, result.steps)
    return median(value for step, value in result.curve(metric) if step in steps)


def plot(rollouts: Rollouts) -> Plot:
    panels = []
    for workload, sizes in WORKLOADS.items():
        lines = []
        for format, label in FORMATS.items():
            points = [
                (shape.num_parameters / 1e9, _speed(entry) / _speed(base))
                for name, shape in SHAPES.items()
                if (entry := rollouts.get((name, workload, *format)))
                and (base := rollouts.get((name, workload, "none", "none")))
            ]
            lines.append(Line(label, points))
        panels.append(Panel(f"speedup over BF16: {sizes}", lines, x_label="billion parameters"))
    return Plot("figure_8", panels)


SECTION = Section("figure_8", render, lambda _: [plot(local_rollouts(ROLLOUTS))])
