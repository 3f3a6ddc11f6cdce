"""Results as JSON. A file collects runs under keys and never loses an earlier result.

    {"bench": "rollout",
     "results": {"local 7B int8 kv=none A": [{"date": ..., "machine": ..., "settings": ..., ...}]}}

Measuring a key again appends an entry. Several commands may add to one file at the same time.
"""

from __future__ import annotations

import datetime
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from qurl import __version__
from qurl.errors import ConfigError

RESULTS = Path("benchmarks/results")
PACKAGES = ("torch", "triton", "transformers", "vllm")


class Record:
    """A results file, opened before anything is measured, so that a bad path costs no time."""

    def __init__(self, bench: str, path: Path | None = None) -> None:
        """The default path is benchmarks/results/<bench>.json in the working directory."""
        self.bench = bench
        self.path = path or RESULTS / f"{bench}.json"
        self._machine = functools.cache(describe_machine)  # it runs git
        self._read()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                pass
        except OSError as error:
            raise ConfigError(f"--out {self.path} cannot be written: {error}") from error

    def add(self, key: str, device: torch.device, **figures: Any) -> None:
        """Save one more entry under `key`."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = {"date": date, "machine": self._machine(device), **figures}
        with locked(self.path):
            results = self._read()  # another process may have added to it
            results.setdefault(key, []).append(entry)
            text = json.dumps({"bench": self.bench, "results": results}, indent=1)
            replace_text(self.path, text + "\n")

    def _read(self) -> dict[str, list[Mapping[str, Any]]]:
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--out {self.path} cannot be added to: {error}") from error
        if not isinstance(content, dict) or content.get("bench") != self.bench:
            raise ConfigError(
                f"--out {self.path} holds something else than results of qurl bench {self.bench}; "
                "it is left as it is, give another file"
            )
        return content["results"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing the file, by a lock file beside it that stays."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software behind a measurement."""
    is_cuda = device.type == "cuda"
    cpu = f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu,
        "cuda": torch.version.cuda if is_cuda else None,
        "threads": None if is_cuda else torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"qurl": __version__, **_versions()},
        "commit": source_commit(),
    }


def source_commit() -> str | None:
    """The commit of the running checkout, with "+" if it was changed; None without a checkout."""
    folder = Path(__file__).parent
    if "site-packages" in folder.parts:  # a repository around it is not ours
        return None
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(
                ["git", *command], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
