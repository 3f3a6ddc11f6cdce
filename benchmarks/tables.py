"""Writes GPU measurements into docs/engine.md and a short table into README.md.

    python -m benchmarks.tables            (or: make tables)

Reads the newest entry of each key of rollout.json, sync.json, attention.json and mismatch.json in
benchmarks/results, and replaces the text between the pages' marker comments. Missing measurements
appear as "not measured".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import (
    FORMATS,
    Key,
    build_mark,
    key_of,
    local_rollouts,
    newest,
    replace_between,
    table,
    with_note,
)
from qurl.bench.limits import SPEEDS, Storage, rollout_limit
from qurl.bench.shapes import SHAPES
from qurl.bench.workload import WORKLOADS as SIZES
from qurl.rollout.local.kernels.attention import choose_tiling

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- written by benchmarks/tables.py: begin -->", "<!-- end -->"
MISSING = "not measured"

NAMES = {"none": "BF16", "int8": "INT8", "fp8": "FP8", "fp8-block": "FP8 in blocks"}
BF16 = ("none", "none")
EIGHT_BITS = (("int8", "none"), ("fp8", "none"))
EIGHT_BITS_KV = (("int8", "fp8"), ("fp8", "fp8"))
WORKLOADS = (
    *(("1.5B", "A"), ("1.5B", "B"), ("1.5B", "C")),
    *(("7B", "A"), ("7B", "B"), ("7B", "Cp")),
    ("14B", "A"),
)
MODELS = ("1.5B", "7B")
SHORT, LONG = ("A", "B"), ("C", "Cp")
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Figures:
    """The figures of one rollout."""

    tokens_per_s: float
    limit_share: float
    logprob_gap: float | None = None
    busy_ms: float | None = None
    """GPU time of one decode step, if profiled."""


def anchor(row: Mapping[str, Any]) -> Figures:
    """vLLM's figures. Its limit is ours: both follow from the bytes alone."""
    work = SIZES[row["workload"]]
    storage = Storage.of(row["quant"], row["kv"], "cuda")
    seconds = rollout_limit(SHAPES[row["model"]], storage, SPEEDS["NVIDIA H200"], work)
    tokens_per_s = 1e3 * row["thousand_tokens_per_s"]
    share = tokens_per_s * seconds / work.num_new_tokens
    return Figures(tokens_per_s, share, busy_ms=row.get("busy_ms"))


VLLM_ROWS = json.loads((RESULTS / "vllm_rollout.json").read_text())["rows"]
VLLM = {key_of(row): anchor(row) for row in VLLM_ROWS}


@dataclass(frozen=True)
class Measured:
    """All measurements in the tables."""

    rollouts: Mapping[Key, Figures]
    marks: Mapping[Key, str]
    """Footnote marks of the factors over our BF16."""
    syncs: Mapping[tuple[str, str], Mapping[str, Any]]
    """Figures of INT8 syncs, by model and master."""
    attention: Mapping[str, Any]
    mismatch: Mapping[str, Any]
    origins: Sequence[str]
    """Hardware, software and date of the rollouts and syncs."""
    repeats: Sequence[int]
    """How many runs a rollout's median covers."""

    @staticmethod
    def read(folder: Path = RESULTS) -> Measured:
        ours = local_rollouts(folder / "rollout.json")
        shown = {key: entry for key, entry in ours.items() if key[:2] in WORKLOADS}
        rollouts = list(shown.values())
        syncs = [e for e in newest(folder / "sync.json") if e["settings"]["quant"] == "int8"]
        return Measured(
            {key: figures_of(entry) for key, entry in shown.items()},
            {
                key: build_mark(entry, base)
                for key, entry in shown.items()
                if (base := shown.get((*key[:2], *BF16)))
            },
            {(e["settings"]["model"], e["settings"]["master"]): e["figures"] for e in syncs},
            json.loads((folder / "attention.json").read_text()),
            json.loads((folder / "mismatch.json").read_text()),
            sorted({origin_of(e) for e in rollouts + syncs}),
            sorted({e["settings"]["repeats"] for e in rollouts}),
        )

    def factor(self, key: Key) -> float | None:
        """Speedup over our BF16."""
        base = self.rollouts.get((*key[:2], *BF16))
        return ratio(self.rollouts.get(key), base)

    def factor_text(self, key: Key) -> str:
        """Empty if either speed is missing."""
        factor = self.factor(key)
        return "" if factor is None else f"{factor:.2f}{self.marks[key]}"


def figures_of(entry: Mapping[str, Any]) -> Figures:
    figures, profile = entry["figures"], entry.get("profile")
    return Figures(
        figures["tokens_per_s"],
        figures["limit_share"],
        figures["logprob_gap"],
        profile["busy_ms"] if profile else None,
    )


def origin_of(entry: Mapping[str, Any]) -> str:
    machine = entry["machine"]
    software = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "triton"))
    return f"{machine['device']}, CUDA {machine['cuda']}, {software}, {entry['date'][:10]}"


def ratio(figures: Figures | None, base: Figures | None) -> float | None:
    if figures is None or base is None:
        return None
    return figures.tokens_per_s / base.tokens_per_s


# Cells and tables


def show(value: float | None, form: str, missing: str = MISSING) -> str:
    """A number as text; shares as the pages write them ("62 %")."""
    if value is None:
        return missing
    return f"{100 * value:.0f} %" if form == "%" else format(value, form)


def thousands(figures: Figures | None, missing: str = MISSING) -> str:
    return show(figures and figures.tokens_per_s / 1e3, ".1f", missing)


def name_of(workload: str) -> str:
    return "C'" if workload == "Cp" else workload


def describe(workload: str) -> str:
    work = SIZES[workload]
    return f"{name_of(workload)} ({work.num_sequences} x {work.prompt_tokens} + {work.new_tokens})"


def rollout_table(measured: Measured) -> str:
    head = ["model, workload", "format", "thousand tokens/s", "share of limit", "over our BF16"]
    head += ["GPU ms per step", "mean log-prob gap", "vLLM: thousand tokens/s"]
    head += ["vLLM: share of limit", "vLLM: GPU ms per step", "over vLLM"]
    keys = [(*place, *format) for place in WORKLOADS for format in FORMATS]
    return table(head, [rollout_row(measured, key) for key in keys])


def rollout_row(measured: Measured, key: Key) -> list[str]:
    model, workload, *format = key
    ours, vllm = measured.rollouts.get(key), VLLM.get(key)
    return [
        f"{model}, {describe(workload)}",
        FORMATS[format[0], format[1]],
        thousands(ours),
        show(ours and ours.limit_share, "%", ""),
        measured.factor_text(key),
        show(ours and ours.busy_ms, ".2f", ""),
        show(ours and ours.logprob_gap, ".3f", ""),
        thousands(vllm),
        show(vllm and vllm.limit_share, "%", ""),
        show(vllm and vllm.busy_ms, ".2f", ""),
        show(ratio(ours, vllm), ".2f", ""),
    ]


def sync_table(measured: Measured) -> str:
    head = ["model", "trainer's weights", "load, ms", "limit, ms", "share of limit", "verify, ms"]
    rows = []
    for model in MODELS:
        for master in ("bf16", "fp32"):
            figures = measured.syncs.get((model, master), {})
            forms = {"load_ms": ".1f", "limit_ms": ".1f", "limit_share": "%", "verify_ms": ".0f"}
            cells = [show(figures.get(name), form) for name, form in forms.items()]
            rows.append([model, master.upper(), *cells])
    return table(head, rows)


def attention_table(measured: Measured) -> str:
    head = ["heads (model)", "sequences x keys", "BF16, TB/s", "FP8, TB/s", "BF16, us", "FP8, us"]
    chosen = [r for r in measured.attention["rows"] if is_chosen(r)]
    sizes = dict.fromkeys((r["heads"], r["kv_heads"], r["batch"], r["context"]) for r in chosen)
    rows = []
    for size in sizes:
        heads, kv_heads, batch, context = size
        found = {
            r["cache"]: r
            for r in chosen
            if (r["heads"], r["kv_heads"], r["batch"], r["context"]) == size
        }
        by_cache = [found.get(cache, {}) for cache in CACHES]
        speeds = [show(r.get("gb_s") and r["gb_s"] / 1e3, ".2f") for r in by_cache]
        times = [show(r.get("us"), ".0f") for r in by_cache]
        model = next(m for m in MODELS if SHAPES[m].num_heads == heads)
        rows.append([f"{heads} / {kv_heads} ({model})", f"{batch} x {context}", *speeds, *times])
    return table(head, rows)


def mismatch_table(measured: Measured) -> str:
    head = ["weights", "KV cache", "tokens", "mean gap", "99 % below", "KL(behav, prox), k3"]
    rows = [
        [
            NAMES[row["format"]],
            "FP8" if row["kv"] == "fp8" else "BF16",
            str(row["tokens"]),
            show(row["mean_gap"], ".4f"),
            show(row["gap_99"], ".2f"),
            show(row["k3"], ".1e"),
        ]
        for row in measured.mismatch["rows"]
    ]
    return table(head, rows)


def is_chosen(row: Mapping[str, Any]) -> bool:
    """Whether the row has the engine's tiling."""
    chosen = vars(choose_tiling(row["head_dim"], CACHES[row["cache"]]))
    return {"keys_first": True, **chosen} == {"keys_first": True, **row["tiling"]}


# Goals


@dataclass(frozen=True)
class Goal:
    """A bound that a set of rollouts should reach."""

    title: str
    form: str
    value: Callable[[Measured, Key], float | None]
    formats: Sequence[tuple[str, str]]
    workloads: Sequence[str]
    bounds: Mapping[str, float]
    """By model."""

    def cell(self, measured: Measured, model: str) -> str:
        bound = self.bounds[model]
        keys = [
            (m, w, *format)
            for m, w in WORKLOADS
            for format in self.formats
            if m == model and w in self.workloads
        ]
        names = {key: f"{FORMATS[key[2], key[3]]} {name_of(key[1])}" for key in keys}
        reached = {names[key]: self.value(measured, key) for key in keys}
        return goal_cell(bound, reached, self.form, is_ceiling=False)


def goal_cell(
    bound: float, reached: Mapping[str, float | None], form: str, *, is_ceiling: bool
) -> str:
    """The bound, then what we reached: misses in bold, unknown values last."""
    shown = []
    for name, value in reached.items():
        if value is not None:
            is_missed = value > bound if is_ceiling else value < bound
            text = f"{name} {show(value, form)}"
            shown.append(f"**{text}**" if is_missed else text)
    unknown = [name for name, value in reached.items() if value is None]
    if unknown:
        shown.append(f"{MISSING}: {', '.join(unknown)}")
    return f"{'at most' if is_ceiling else 'at least'} {show(bound, form)}: {'; '.join(shown)}"


def limit_share(measured: Measured, key: Key) -> float | None:
    figures = measured.rollouts.get(key)
    return figures and figures.limit_share


def over_vllm(measured: Measured, key: Key) -> float | None:
    return ratio(measured.rollouts.get(key), VLLM.get(key))


def bounds(small: float, large: float) -> Mapping[str, float]:
    return dict(zip(MODELS, (small, large), strict=True))


FP8_KV = (("fp8", "fp8"),)
GOALS = (
    Goal("share of limit, BF16", "%", limit_share, (BF16,), SHORT, bounds(0.55, 0.7)),
    Goal("share, 8-bit weights", "%", limit_share, EIGHT_BITS, SHORT, bounds(0.55, 0.65)),
    Goal("share, 8-bit + FP8 KV", "%", limit_share, EIGHT_BITS_KV, SHORT, bounds(0.55, 0.65)),
    Goal("share, 8-bit + FP8 KV, long", "%", limit_share, EIGHT_BITS_KV, LONG, bounds(0.65, 0.65)),
    Goal(
        "over our BF16, 8-bit weights", ".2f", Measured.factor, EIGHT_BITS, SHORT, bounds(1.15, 1.3)
    ),
    Goal(
        "over BF16, 8-bit + FP8 KV", ".2f", Measured.factor, EIGHT_BITS_KV, SHORT, bounds(1.5, 1.6)
    ),
    Goal(
        "over BF16, 8-bit + FP8 KV, long",
        ".2f",
        Measured.factor,
        EIGHT_BITS_KV,
        LONG,
        bounds(1.7, 1.7),
    ),
    Goal("over vLLM, BF16", ".2f", over_vllm, (BF16,), SHORT, bounds(1.2, 1.0)),
    Goal("over vLLM, INT8", ".2f", over_vllm, EIGHT_BITS[:1], SHORT, bounds(1.3, 1.1)),
    Goal("over vLLM, FP8", ".2f", over_vllm, EIGHT_BITS[1:], SHORT, bounds(1.2, 1.0)),
    Goal("over vLLM, FP8 and FP8 KV", ".2f", over_vllm, FP8_KV, SHORT, bounds(1.3, 1.3)),
    Goal("over vLLM, FP8 and FP8 KV, long", ".2f", over_vllm, FP8_KV, LONG, bounds(1.2, 1.2)),
)
SYNC_MS = bounds(3.0, 15.0)
"""Longest acceptable load of a sync."""


def goal_table(measured: Measured) -> str:
    rows = [[g.title, *(g.cell(measured, model) for model in MODELS)] for g in GOALS]
    return table(["target", *MODELS], [*rows, ["sync, load in ms", *sync_cells(measured)]])


def sync_cells(measured: Measured) -> list[str]:
    cells = []
    for model in MODELS:
        figures = {m: measured.syncs.get((model, m), {}) for m in ("bf16", "fp32")}
        reached = {f"from {m.upper()}": f.get("load_ms") for m, f in figures.items()}
        cells.append(goal_cell(SYNC_MS[model], reached, ".1f", is_ceiling=True))
    return cells


# Pages


def render_results(measured: Measured) -> str:
    """The section of docs/engine.md."""
    origins = "; ".join(measured.origins)
    runs = " or ".join(map(str, measured.repeats))
    attention = measured.attention
    return "\n\n".join(
        [
            f"**Rollouts.** {origins}. Medians of {runs} runs.",
            with_note(rollout_table(measured)),
            "**Targets.** Bold figures miss the target.",
            goal_table(measured),
            f"**Sync**, INT8. {origins}.",
            sync_table(measured),
            f"**Decode attention** with the engine's tiling: one layer, no shared pages. "
            f"{attention['device']}, torch {attention['versions']['torch']}, triton "
            f"{attention['versions']['triton']}, {attention['date']}.",
            attention_table(measured),
            f"**Log-prob gap** per token between engine and trainer. We sampled at temperature 1 "
            f"from {measured.mismatch['model']} on GSM8K questions. "
            f"{origin_of(measured.mismatch)}.",
            mismatch_table(measured),
        ]
    )


def render_speed(measured: Measured) -> str:
    """The table of README.md: our speed, and vLLM's in brackets; measured rows only."""
    places = [p for p in WORKLOADS if any(key[:2] == p for key in measured.rollouts)]
    rows = [
        [f"{model}, {describe(workload)}"]
        + [speed_cell(measured, (model, workload, *format)) for format in FORMATS]
        for model, workload in places
    ]
    return "\n\n".join(
        [
            f"{'; '.join(measured.origins)}:",
            table(["model, workload (sequences x prompt + new)", *FORMATS.values()], rows),
        ]
    )


def speed_cell(measured: Measured, key: Key) -> str:
    ours, vllm = measured.rollouts.get(key), VLLM.get(key)
    return f"{thousands(ours)} ({thousands(vllm, '-')})"


PAGES: Mapping[str, Callable[[Measured], str]] = {
    "docs/engine.md": render_results,
    "README.md": render_speed,
}


def main() -> None:
    measured = Measured.read()
    for name, render in PAGES.items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        text = replace_between(page, BEGIN, END, render(measured))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
