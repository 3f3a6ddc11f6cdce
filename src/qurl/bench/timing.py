"""Wall-clock time of work on a CPU or a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection, whose duration depends on what else the process holds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_call(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds until the device has finished, and what `work` returned."""
    _synchronize(device)
    start = time.perf_counter()
    result = work()
    _synchronize(device)
    return time.perf_counter() - start, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
