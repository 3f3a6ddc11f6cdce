"""Clocks for work on a CPU or a GPU, and the speed that a device reaches at best."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qurl.ops.device import default_dtype

CALLS, REPEATS = 10, 5


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection, whose duration depends on what else the process holds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def time_call(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall-clock seconds until the device has finished, and what `work` returned."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start, result


class GraphClock:
    """Times replays of captured work. Compile everything in it before."""

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._work, self._device = work, device
        self._graph = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                work()

    def replay(self) -> float:
        """Seconds on the device; on a CPU, of the work itself."""
        if self._graph is None:
            return time_call(self._work, self._device)[0]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def seconds_per_call(work: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call; on a GPU without the host's part."""

    def several() -> None:
        for _ in range(CALLS):
            work()

    work()  # compiles and allocates what a capture may not
    synchronize(device)
    clock = GraphClock(several, device)
    clock.replay()  # the first one also uploads the graph
    return statistics.median(clock.replay() for _ in range(REPEATS)) / CALLS


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy, reads and writes together."""
    size = 2**30 if device.type == "cuda" else 2**26  # far larger than any cache
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_call(lambda: target.copy_(source), device)


def measure_flops(device: torch.device) -> float:
    """FLOP per second of a square matrix product, in BF16 on a GPU and FP32 on a CPU."""
    size = 8192 if device.type == "cuda" else 512
    matrix = torch.randn(size, size, dtype=default_dtype(device), device=device)
    out = torch.empty_like(matrix)
    return 2 * size**3 / seconds_per_call(lambda: torch.mm(matrix, matrix, out=out), device)
