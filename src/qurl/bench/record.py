"""Results as JSON. A file collects runs under keys, and nothing measured before is ever lost.

    {"bench": "rollout",
     "results": {"local 7B int8 kv=none A": [{"date": ..., "machine": ..., "settings": ..., ...}]}}

A key that is measured again gets one more entry, the newest last. Several commands may add to one
file at a time.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qurl import __version__
from qurl.errors import ConfigError

RESULTS = Path("benchmarks/results")
PACKAGES = ("torch", "triton", "transformers", "vllm")


class Record:
    """A results file; opened before anything is measured, so that a bad path costs no time."""

    def __init__(self, bench: str, path: Path | None = None) -> None:
        """`path` None: benchmarks/results/<bench>.json, seen from where the command runs."""
        self.bench = bench
        self.path = path or RESULTS / f"{bench}.json"
        self._machine = functools.cache(describe_machine)  # asks git, and a command may add much
        self._read()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                pass
        except OSError as error:
            raise ConfigError(f"--out {self.path} cannot be written: {error}") from error

    def add(self, key: str, device: torch.device, **figures: Any) -> None:
        """Save one more entry under `key`."""
        entry = {"date": _now(), "machine": self._machine(device), **figures}
        with locked(self.path):
            # Read again: another process may have added to the file in the meantime.
            results = self._read()
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
    """Others who want to change the file wait. The lock is a file beside it, gone afterwards."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file.fileno(), lock):
                continue  # its holder removed it while we waited: what we hold guards nothing
            try:
                yield
            finally:
                lock.unlink()
            return


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: a reader sees the old one or the new one."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Where and with what a figure was measured."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "cuda": torch.version.cuda if is_cuda else None,
        "threads": None if is_cuda else torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"qurl": __version__, **_versions()},
        "commit": source_commit(),
    }


def source_commit() -> str | None:
    """The commit of the checkout that runs, with "+" where it was changed; None without one."""
    folder = Path(__file__).parent
    if "site-packages" in folder.parts:  # a repository around it is somebody else's
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
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
