"""Engine workers as Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qurl.ops.ray import RayHandle, connect, start_actor
from qurl.rollout.group.fleet import Start
from qurl.rollout.group.worker import EngineWorker

CONCURRENCY = 8
"""Calls that a worker takes at once."""


def starter(
    address: str, logs: Path, *, threads: int = 0, gpus: Sequence[int] = (), reserves: bool = False
) -> Start:
    """A function that starts the worker of a number, each with a log of its own.

    Worker i takes the i-th of `gpus`, as far as they go, and then the first again. With `reserves`
    each asks Ray for a GPU of its own, if any are given.
    """
    connect(address)
    logs.mkdir(parents=True, exist_ok=True)

    def start(number: int) -> RayHandle:
        log = str(logs.absolute() / f"engine-{number}.log")
        gpu = gpus[number % len(gpus)] if gpus and not reserves else None
        options = {"num_gpus": 1 if gpus and reserves else 0, "max_concurrency": CONCURRENCY}
        return start_actor(EngineWorker, {"gpu": gpu}, log=log, threads=threads, **options)

    return start
