"""The device of a run, its default precision, and its memory."""

from __future__ import annotations

import resource
import sys

import torch
from torch import Tensor

from qurl.errors import ConfigError


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype of arithmetic and of whatever the engine does not quantize."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast would choose, for operations that it does not know."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process and of the GPU in GiB, under verl's metric names."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics = {"perf/cpu_memory_used_gb": process / 2**30}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
    return metrics
