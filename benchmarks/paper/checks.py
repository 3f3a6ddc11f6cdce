"""What the accuracies rest on: another evaluation of the same checkpoint, and another grader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measured import table
from benchmarks.paper.page import MISSING, Section, accuracy, difference, points
from benchmarks.paper.results import BASELINE, GRADERS, Eval, Results

LISTED = 3
"""Runs with the same outcomes that are named; more are counted."""
SHOWN = 10
"""Differences between the graders that the page lists; the file has all."""


def render(results: Results) -> str:
    tables = [baseline_table(_read(BASELINE), results), grader_text(_read(GRADERS))]
    return "\n\n".join(tables)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def baseline_table(plain: dict[str, Any] | None, results: Results) -> str:
    """Our evaluations before training, and whether they lie in the interval of the plain one."""
    head = [
        *("untrained checkpoint", "accuracy, % (95 %)", "less transformers, points (95 %)"),
        "within the interval of transformers",
    ]
    if plain is None:
        return table(head, [["transformers alone", MISSING, "", ""]])
    reference = Eval(0, plain["outcomes"])
    low, high = reference.interval
    rows = [[f"transformers alone, {plain['dtype']}", accuracy(reference), "", ""]]
    seen: dict[Eval, list[str]] = {}
    for experiment in ("table1", "dapo", "long_horizon"):
        for result in results.get(experiment, ()):
            for first in (e for e in result.evals() if e.step == 0):
                seen.setdefault(first, []).append(f"{experiment} {result.arm} {result.seed}")
    for found, runs in seen.items():
        listed = ", ".join(runs) if len(runs) <= LISTED else f"{len(runs)} runs"
        less, interval = difference([(found, reference)])
        verdict = "yes" if low <= found.accuracy <= high else "**no**"
        cells = [accuracy(found), points(less, interval), verdict]
        rows.append([f"QuRL, step 0 of {listed}", *cells])
    return table(head, rows)


def grader_text(found: dict[str, Any] | None) -> str:
    if found is None:
        return f"Graders compared: {MISSING}."
    head = ["ours", "last number", "truth", "end of the completion"]
    differences = found["differences"]
    rows = [
        [_word(d["ours"]), _word(d["last_number"]), d["answer"], _cell(d["completion"])]
        for d in differences[:SHOWN]
    ]
    text = (
        f"Of {found['completions']} completions our grader calls {found['ours_right']} right, the "
        f"last number {found['last_number_right']}; they differ on {len(differences)}."
    )
    return f"{text}\n\n{table(head, rows)}" if rows else text


def _word(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def _cell(text: str) -> str:
    """One line that a table can hold and no markup changes."""
    return "`" + " ".join(text.split()).replace("|", "/").replace("`", "'") + "`"


SECTION = Section("checks", render)
