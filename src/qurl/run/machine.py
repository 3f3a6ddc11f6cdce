"""The hardware and software that a run or a measurement used, and what a check of it found."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qurl import __version__


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a verdict, what was found, and what to do about it."""

    verdict: Literal["ok", "note", "FAIL"]
    name: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return (
            f"{self.verdict:<4}  {self.name}: {'; '.join(filter(None, (self.found, self.advice)))}"
        )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software behind a measurement."""
    is_cuda = device.type == "cuda"
    versions = {"qurl": __version__}
    for package in ("torch", "triton", "transformers", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "versions": versions,
        "commit": source_commit(),
    }


def source_commit() -> str | None:
    """The commit of the running checkout, with "+" if it was changed; None without a checkout."""
    folder = Path(__file__).parent
    if "site-packages" in folder.parts:  # a repository around it is not ours
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@contextmanager
def settled_heap() -> Iterator[None]:
    """Hide what there is now from the garbage collector.

    Models and libraries live as long as a run, and looking through all of it stops a step for tens
    of milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
