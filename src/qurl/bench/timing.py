"""Wall-clock time of work on a CPU or a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
