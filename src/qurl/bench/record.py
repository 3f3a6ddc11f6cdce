"""Clocks, and results as JSON: measuring a key again appends an entry.

{"bench": "rollout",
 "results": {"local 7B int8 kv=none A": [{"date": ..., "machine": ..., "settings": ..., ...}]}}

JSON has no NaN and no infinity, so they become null.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qurl.errors import ConfigError
from qurl.run.machine import describe_machine


class Record:
    """A results file, tried before anything is measured, so that a bad path costs no time."""

    def __init__(self, bench: str, path: Path | None, device: torch.device) -> None:
        """The default path is benchmarks/results/<bench>.json in the working directory."""
        self.bench = bench
        self.path = path or Path("benchmarks", "results", f"{bench}.json")
        self.machine = describe_machine(device)
        self._read()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path.parent).close()
        except OSError as error:
            raise ConfigError(f"--out {self.path} cannot be written: {error}") from error

    def add(self, key: str, **figures: Any) -> None:
        """Save one more entry under `key`."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        results = self._read()  # another command may have added to it
        results.setdefault(key, []).append({"date": date, "machine": self.machine, **figures})
        text = json.dumps({"bench": self.bench, "results": results})
        content = json.loads(text, parse_constant=lambda _: None)
        replace_text(self.path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> dict[str, list[Any]]:
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--out {self.path} cannot be added to: {error}") from error
        if not isinstance(content, dict) or content.get("bench") != self.bench:
            raise ConfigError(
                f"--out {self.path} does not hold results of qurl bench {self.bench}; "
                "give another file"
            )
        return content["results"]


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection, whose duration depends on what else the process holds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_call(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds until the device has finished, and what `work` returned."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result
