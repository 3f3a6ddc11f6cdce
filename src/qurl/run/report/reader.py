"""Reads a run directory as the page takes it: all of it first, then what is new."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qurl.config import read_recipe
from qurl.errors import DataError
from qurl.run.directory import CONFIG, EVALS, EVENTS, METRICS, SAMPLES, flatten
from qurl.run.report.charts import is_charted
from qurl.run.report.samples import choose_lines, finite, parse_sample, printable
from qurl.run.report.verdict import LEVELS, ORDER, Facts, judge

MAX_ROWS = 4000
"""Rows of metrics.jsonl that a page starts with; of more, every second, third, ... is drawn."""
MAX_EVENTS = 500
"""Of more, the loudest are shown, and of those as loud the last."""

Columns = dict[str, list[Any]]


class Tail:
    """A growing file of lines, which a resumed run may replace by a shorter one."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self._inode = path, 0, 0

    @property
    def is_replaced(self) -> bool:
        """Is what was read no longer the start of the file?"""
        if not self.position:
            return False
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return True
        return found.st_ino != self._inode or found.st_size < self.position

    def skip(self, position: int) -> None:
        """Take what is before a position for read."""
        self.position, self._inode = position, os.stat(self.path).st_ino

    def lines(self) -> list[bytes]:
        """The complete lines since the last call; only the last one can be torn."""
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self.position)
                content = file.read()
        except FileNotFoundError:
            return []
        content = content[: content.rfind(b"\n") + 1]
        self.position += len(content)
        return content.splitlines()

    def records(self) -> list[dict[str, Any]]:
        try:
            records = [json.loads(line) for line in self.lines()]
        except ValueError as error:
            raise DataError(f"{self.path} has a line that is not valid JSON: {error}") from error
        if wrong := [record for record in records if not isinstance(record, dict)]:
            raise DataError(f"{self.path} has a line that is no JSON object: {str(wrong[0])[:80]}")
        return records


class RunReader:
    """One run directory. It is only read, and may grow or be rewound meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, printable(path.resolve().name)
        self._start_anew()

    def _start_anew(self) -> None:
        if not (self.path / CONFIG).is_file():
            raise DataError(f"{self.path} is not a run directory: it has no {CONFIG}")
        self._tails = {name: Tail(self.path / name) for name in (METRICS, EVENTS, EVALS, SAMPLES)}
        self._is_new = True
        self.config: dict[str, Any] = flatten(read_recipe(self.path))
        self.facts = Facts(self.config)
        self._seconds = 0.0
        self._num_samples = 0

    def read(self) -> dict[str, Any] | None:
        """What is new since the last call; None if nothing is.

        With "reset", it replaces all that came before: at first, and after a rewind.
        """
        if any(tail.is_replaced for tail in self._tails.values()):
            self._start_anew()
        is_new, self._is_new = self._is_new, False
        rows = self._tails[METRICS].records()
        events = [
            {key: value if key == "machine" else _shown(value) for key, value in event.items()}
            for event in self._tails[EVENTS].records()
        ]
        evals = self._tails[EVALS].records()
        samples = self._samples(is_new)
        if not (is_new or rows or events or evals or samples):
            return None
        try:
            self.facts.add(rows, events, evals)
            columns, stride = self._columns(rows) if rows else ({}, 1)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.path} holds records that no run writes: {error!r}") from error
        update = {
            "name": self.name,
            "reset": is_new,
            "columns": columns,
            "events": _loudest(events),
            "num_events": self.facts.kinds.total(),
            "samples": samples,
            "num_samples": self._num_samples,
            "verdict": judge(self.facts),
            "seconds": self.facts.seconds,
            "machines": self.facts.machines,
        }
        if is_new:
            update["config"] = {key: _shown(value) for key, value in self.config.items()}
            update["stride"] = stride
        return update

    def _columns(self, rows: list[dict[str, Any]]) -> tuple[Columns, int]:
        """Step, seconds of wall clock, and the charted metrics of these rows."""
        stride = math.ceil(len(rows) / MAX_ROWS)
        kept: list[Mapping[str, Any]] = []
        for index, row in enumerate(rows):
            parts = {name: finite(x) or 0.0 for name, x in row.items() if "timing_s/" in name}
            self._seconds += parts.get("timing_s/step", sum(parts.values()))
            is_evaluation = any(name.startswith("eval/") for name in row)
            if index % stride == 0 or is_evaluation or index == len(rows) - 1:
                kept.append({**row, "seconds": round(self._seconds, 3)})
        columns: defaultdict[str, list[Any]] = defaultdict(lambda: [None] * len(kept))
        for index, row in enumerate(kept):
            for name, value in row.items():
                if name in ("step", "seconds") or is_charted(name):
                    columns[name][index] = finite(value)
        return dict(columns), stride

    def _samples(self, is_new: bool) -> list[dict[str, Any]]:
        tail = self._tails[SAMPLES]
        if is_new and tail.path.exists():
            lines, count, end = choose_lines(tail.path)
            tail.skip(end)
        else:
            lines = tail.lines()
            count = len(lines)
        self._num_samples += count
        return [parse_sample(line, self.config, str(tail.path)) for line in lines]


def _loudest(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ranks = [ORDER.index(LEVELS.get(str(event.get("kind")), "info")) for event in events]
    order = sorted(range(len(events)), key=lambda i: (ranks[i], -i))
    return [events[i] for i in sorted(order[:MAX_EVENTS])]


def _shown(value: Any) -> Any:
    """Texts from a run cannot disturb the page; other values are short."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    return printable(json.dumps(value))
