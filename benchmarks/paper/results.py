"""Results of arms: one JSON file for each arm and seed, made from a run directory and merged.

    {"experiment": ..., "arm": ..., "seed": ..., "status": "finished | stopped | failed: ...",
     "steps": trained steps, "recipe": ..., "overrides": {...}, "config": {...}, "machine": {...},
     "attempts": [{"date": ..., "commit": ..., "jobs": ..., "seconds": ...}], "events": [...],
     "evals": [{"step": ..., "precision": ..., "outcomes": "0110..."}],
     "curves": {"step": [...], metric: [...]}}

A curve may be partial: it holds what was logged when the run was last looked at.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measured import evals_by_updates
from benchmarks.paper.arms import COLUMNS, ROOT
from benchmarks.scripts import to_json
from qurl.bench.record import replace_text
from qurl.config import Config, build_config, to_dict
from qurl.errors import DataError
from qurl.run.directory import EVALS, EVENTS, METRICS, flatten, may_change, read_jsonl
from qurl.run.intervals import Interval, wilson_interval

RESULTS = ROOT / "benchmarks" / "results" / "paper"
BASELINE, GRADERS = RESULTS / "baseline.json", RESULTS / "graders.json"
KEPT_EVENTS = ("resume", "alarm")
PATHS = ("model.path", "task.path", "task.eval_path")
MOVED: Mapping[str, str] = {
    "algo.acr_max_bound": "experimental.acr_max_bound",
    "algo.kl_is_correct": "experimental.weighted_kl",
    "optim.norm_fed_lr_scale": "experimental.norm_fed_lr_scale",
    "optim.dither": "experimental.dither",
    "quant.scale_o_proj": "experimental.scale_o_proj",
    "quant.scale_down_proj": "experimental.scale_down_proj",
    "sampling.top_p": "",
    "sampling.top_k": "",
    "rollout.page_size": "",
}
"""Today's places of keys in the committed results; empty if the key is gone, which never changed a
run's results."""


@dataclass(frozen=True)
class Eval:
    """Greedy answers to the held-out problems, after `step` steps."""

    step: int
    outcomes: str
    """A 1 for each problem that was answered right, a 0 for each other."""

    @property
    def correct(self) -> int:
        return self.outcomes.count("1")

    @property
    def total(self) -> int:
        return len(self.outcomes)

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> Interval:
        return wilson_interval(self.correct, self.total)


@dataclass(frozen=True)
class Result:
    """What one arm with one seed gave."""

    record: Mapping[str, Any]

    @property
    def arm(self) -> str:
        return self.record["arm"]

    @property
    def seed(self) -> int:
        return self.record["seed"]

    @property
    def steps(self) -> int:
        return self.record["steps"]

    def evals(self, *, of_actor: bool = False) -> list[Eval]:
        """In full precision, or of the quantized actor where that was evaluated."""
        rows = [e for e in self.record["evals"] if (e["precision"] != "full") == of_actor]
        return [Eval(e["step"], e["outcomes"]) for e in rows]

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was logged and is finite."""
        curves = self.record["curves"]
        values = [None if v is None else float(v) for v in curves.get(metric, [])]
        pairs = zip(curves["step"], values, strict=False)
        return [(step, v) for step, v in pairs if v is not None and math.isfinite(v)]


Results = Mapping[str, Sequence[Result]]
"""By experiment."""


def read_results(folder: Path = RESULTS) -> Results:
    results: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*/*-seed*.json")):
        results.setdefault(path.parent.name, []).append(Result(json.loads(path.read_text())))
    return results


# From a run directory


def portable(config: Config) -> dict[str, Any]:
    """What makes the curve: the recipe without what may change, and files by their name alone."""
    flat = flatten(to_dict(config))
    return json.loads(json.dumps(_fixed(flat) | {key: Path(flat[key]).name for key in PATHS}))


def _fixed(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in flat.items() if not may_change(k)}


def measure(run_dir: Path, config: Config) -> dict[str, Any]:
    """What a run directory tells, whether its run goes on or not."""
    rows, evals, events = (
        read_jsonl(run_dir / name) if (run_dir / name).exists() else []
        for name in (METRICS, EVALS, EVENTS)
    )
    rows = evals_by_updates(rows)
    return {
        "steps": sum("reward/mean" in row for row in rows),
        "config": portable(config),
        "events": [
            {key: without_folders(e[key], config) for key in ("time", "kind", "message")}
            for e in events
            if e["kind"] in KEPT_EVENTS
        ],
        "evals": evals,
        "curves": {
            name: [_short(row.get(name)) for row in rows]
            for name in ("step", *COLUMNS)
            if any(name in row for row in rows)
        },
    }


def without_folders(message: str, config: Config) -> str:
    """The message without where this machine keeps its runs and files."""
    flat = flatten(to_dict(config))
    for key in (*PATHS, "run_dir"):
        message = message.replace(f"{Path(flat[key]).parent}{os.sep}", "")
    return message


def _short(value: Any) -> Any:
    """Five digits; infinities and NaN stay the strings that metrics.jsonl has."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Files


def carry_over(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of a committed result under today's keys."""
    return {MOVED.get(key, key): value for key, value in values.items() if MOVED.get(key, key)}


def check_same_recipe(path: Path, config: Config) -> None:
    """Refuse to mix the curves of different recipes under one name.

    A result from before a key existed is one with the key's default.
    """
    if not path.exists():
        return
    here = portable(config)
    there = portable(build_config({})) | _fixed(carry_over(json.loads(path.read_text())["config"]))
    changed = [k for k in there | here if there.get(k, "absent") != here.get(k, "absent")]
    if changed:
        pairs = ", ".join(f"{k} {there.get(k)!r} there, {here.get(k)!r} here" for k in changed)
        raise DataError(
            f"{path} holds results of another recipe ({pairs}); move it away, or write to another "
            "folder with --out"
        )


def keep_longer(path: Path, record: Mapping[str, Any]) -> bool:
    """Write the record where it has a row and the file no longer curve; tells whether it did."""
    if not record["curves"]:
        return False
    if path.exists() and _length(json.loads(path.read_text())) > _length(record):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, to_json(record))
    return True


def _length(record: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Of two that are equally long, the one that did not fail is kept."""
    return record["steps"], len(record["evals"]), not record["status"].startswith("failed")
