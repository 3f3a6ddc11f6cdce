"""What the pages share of reading and showing measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Key = tuple[str, str, str, str]
"""Model, workload, quant, kv."""

GPU = "NVIDIA H200"
"""What the pages' figures were measured on. Files may hold those of other machines too."""

FORMATS = {
    ("none", "none"): "BF16",
    ("int8", "none"): "INT8",
    ("fp8", "none"): "FP8",
    ("int8", "fp8"): "INT8 + FP8 KV",
    ("fp8", "fp8"): "FP8 + FP8 KV",
}
"""By quant and kv."""

EVAL_METRICS = ("eval/", "timing_s/eval")


STUDENT = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""97.5 % of Student's t, by degrees of freedom; for more of them the last is a little wide."""


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of at least three values: of seeds, say."""
    mean, n = fmean(values), len(values)
    half = STUDENT[min(n - 1, max(STUDENT))] * stdev(values) / n**0.5
    return mean - half, mean + half


def evals_by_updates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a run directory, with each evaluation in the row of the number of updates before it.

    A run logs the evaluation of the weights after k updates in row k - 1; row -1 is the untrained
    model's.
    """
    moved: dict[int, dict[str, Any]] = {}
    for row in rows:
        for key, value in row.items():
            is_eval = key.startswith(EVAL_METRICS) or row["step"] == -1
            moved.setdefault(row["step"] + is_eval, {})[key] = value
    return [{**moved[step], "step": step} for step in sorted(moved)]


def newest(path: Path) -> list[Mapping[str, Any]]:
    """Of each key of a file that `qurl bench` appends to, the last entry of the pages' GPU."""
    results = json.loads(path.read_text())["results"].values()
    ours = ([e for e in entries if e["machine"]["device"] == GPU] for entries in results)
    return [entries[-1] for entries in ours if entries]


def local_rollouts(path: Path) -> dict[Key, Mapping[str, Any]]:
    """The newest entries of our own engine."""
    entries = [e for e in newest(path) if e["settings"]["engine"] == "local"]
    return {key_of(entry["settings"]): entry for entry in entries}


OTHER_BUILD = "†"


def build_mark(entry: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Of a factor between two entries: what else than the format may be in it."""
    is_same = entry["machine"]["commit"] == base["machine"]["commit"]
    return "" if is_same else OTHER_BUILD


def with_note(text: str) -> str:
    """Tells what the mark means where there is one."""
    note = f"{OTHER_BUILD} relative to BF16 measured at another commit."
    return f"{text}\n\n{note}" if OTHER_BUILD in text else text


def key_of(settings: Mapping[str, Any]) -> Key:
    return settings["model"], settings["workload"], settings["quant"], settings["kv"]


def replace_between(page: str, begin: str, end: str, body: str) -> str:
    """The page with `body` between its two markers."""
    assert page.count(begin) == page.count(end) == 1, f"a page has {begin} and {end} once"
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{body}\n\n{end}{rest.split(end)[1]}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
