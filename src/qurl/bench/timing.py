"""Clocks: how long work takes, on a CPU and on a GPU, and how fast the device is at best."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qurl.ops.device import default_dtype

COPY_BYTES_CUDA = 2**30
"""Far larger than any L2."""
COPY_BYTES_CPU = 2**26
MATRIX_CUDA = 8192
MATRIX_CPU = 512


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs of the same work."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection in between: its pauses depend on what else the process holds."""
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


def measure(
    work: Callable[[], Any], device: torch.device, *, repeats: int, warm_up: int = 1
) -> Timing:
    """Wall-clock seconds of each repeat."""
    for _ in range(warm_up):
        work()
    with paused_gc():
        return Timing(tuple(time_call(work, device)[0] for _ in range(repeats)))


def measure_graph(
    work: Callable[[], Any], device: torch.device, *, calls: int = 10, repeats: int = 5
) -> Timing:
    """Seconds of one call, launched without the host: `calls` of them in one CUDA graph.

    On a CPU there is no graph, and the host is the device.
    """
    if device.type != "cuda":
        return measure(work, device, repeats=repeats)

    def several() -> None:
        for _ in range(calls):
            work()

    _warm_up(work, device)
    clock = GraphClock(several, device)
    clock.replay()  # the first one also uploads the graph
    return Timing(tuple(clock.replay() / calls for _ in range(repeats)))


class GraphClock:
    """Times replays of work that was captured once. Whatever it compiles must have run before."""

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


def _warm_up(work: Callable[[], Any], device: torch.device) -> None:
    """Compile and allocate what a capture may not, away from the default stream."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy, reads and writes together."""
    size = COPY_BYTES_CUDA if device.type == "cuda" else COPY_BYTES_CPU
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure_graph(lambda: target.copy_(source), device)
    return 2 * size / timing.median


def measure_flops(device: torch.device) -> float:
    """FLOP per second of a square matrix product, in BF16 on a GPU and FP32 on a CPU."""
    size = MATRIX_CUDA if device.type == "cuda" else MATRIX_CPU
    matrix = torch.randn(size, size, dtype=default_dtype(device), device=device)
    out = torch.empty_like(matrix)
    timing = measure_graph(lambda: torch.mm(matrix, matrix, out=out), device)
    return 2 * size**3 / timing.median
