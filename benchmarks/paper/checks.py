"""Checks of our accuracies: a second evaluation of the checkpoint, and a second grader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measured import table
from benchmarks.paper.page import MISSING, Section, accuracy, difference, points
from benchmarks.paper.results import BASELINE, GRADERS, Eval, Results

LISTED = 3
"""Up to this many runs with the same outcomes are named; more are counted."""
SHOWN = 10
"""Grader disagreements on the page; the file has all of them."""


def render(results: Results) -> str:
    tables = [baseline_table(_read(BASELINE), results), grader_text(_read(GRADERS))]
    return "\n\n".join(tables)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def baseline_table(plain: dict[str, Any] | None, results: Results) -> str:
    """Our evaluations before training, and whether transformers' interval contains them."""
    head = [
        *("untrained checkpoint", "accuracy, % (95 %)", "minus transformers, points (95 %)"),
        "inside transformers' interval",
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
        return f"Comparison of the graders: {MISSING}."
    head = ["our grader", "last number", "right answer", "end of the completion"]
    differences = found["differences"]
    rows = [
        [_word(d["ours"]), _word(d["last_number"]), d["answer"], _cell(d["completion"])]
        for d in differences[:SHOWN]
    ]
    text = (
        f"Our grader accepts {found['ours_right']} of {found['completions']} completions, the "
        f"last-number grader {found['last_number_right']}. They disagree on {len(differences)}."
    )
    return f"{text}\n\n{table(head, rows)}" if rows else text


def _word(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def _cell(text: str) -> str:
    """The text as one line of code, safe inside a Markdown table."""
    return "`" + " ".join(text.split()).replace("|", "/").replace("`", "'") + "`"


SECTION = Section("checks", render)
