"""Where the GPU's time goes.

Kernels may overlap: one can start, and then wait, while the one before it ends. A moment counts
once, for the kernel that began first, so the times of all kernels add up to the GPU's busy time.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Kernel:
    """One launch, in microseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class KernelProfile:
    """The kernels of one call."""

    span_ms: float  # from the first kernel's start to the last one's end
    busy_share: float  # of the span
    top: list[dict[str, Any]]
    """The kernels with most time: name, launches, milliseconds, share of the busy time."""

    def __str__(self) -> str:
        lines = [f"  {self.busy_share:.1%} of {self.span_ms:,.1f} ms busy"]
        for kernel in self.top:
            lines.append(
                f"  {kernel['milliseconds']:9.1f} ms {kernel['share']:6.1%} "
                f"{kernel['launches']:7d}x  {kernel['name'][:100]}"
            )
        return "\n".join(lines)


def summarize_kernels(kernels: Sequence[Kernel], num_top: int) -> KernelProfile:
    """Add up kernels by name; they are sorted by start."""
    times, launches = Counter[str](), Counter(kernel.name for kernel in kernels)
    for kernel, time in zip(kernels, exclusive_times(kernels), strict=True):
        times[kernel.name] += time  # type: ignore[assignment]
    busy = sum(times.values())
    span = max(kernel.start + kernel.duration for kernel in kernels) - kernels[0].start
    top = [
        {"name": n, "launches": launches[n], "milliseconds": us / 1e3, "share": us / busy}
        for n, us in times.most_common(num_top)
    ]
    return KernelProfile(span / 1e3, busy / span, top)


def trace_kernels(work: Callable[[], Any]) -> list[Kernel]:
    """Everything that runs on the GPU during one call, compiled before, sorted by start."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        return read_trace(path.read_text(encoding="utf-8"))


def read_trace(text: str) -> list[Kernel]:
    """The GPU's part of a Chrome trace, sorted by start."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") in kinds]
    kernels = [Kernel(e["name"], float(e["ts"]), float(e["dur"])) for e in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def exclusive_times(kernels: Sequence[Kernel]) -> list[float]:
    """The busy time that each kernel adds to those before it."""
    times, busy_until = [], float("-inf")
    for kernel in kernels:
        end = kernel.start + kernel.duration
        times.append(max(0.0, end - max(kernel.start, busy_until)))
        busy_until = max(busy_until, end)
    return times
