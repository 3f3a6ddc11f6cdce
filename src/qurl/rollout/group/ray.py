"""Workers as Ray actors: on this machine, or on the machines of a cluster.

Ray starts processes, carries commands, problems and rollouts, and notices deaths. Weights do not
pass through it (`wire`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from qurl.errors import EngineError, MissingExtra
from qurl.rollout.group.fleet import Start, WorkerDied
from qurl.rollout.group.worker import EngineWorker, last_words

CONCURRENCY = 8
"""Calls that a worker takes at once."""
CONNECT_SECONDS = 10.0


class RayHandle:
    """See `Handle`."""

    def __init__(self, actor: Any, log: str) -> None:
        self._actor, self._log = actor, log

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        asked = getattr(self._actor, method).remote(*arguments).future()
        asked.add_done_callback(lambda done: _pass_on(done, answer))
        return answer

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)

    def last_words(self) -> str:
        return last_words(self._log)


def _pass_on(done: Future[Any], answer: Future[Any]) -> None:
    from ray.exceptions import RayActorError, RayTaskError

    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    elif isinstance(error, RayActorError):
        answer.set_exception(WorkerDied(_in_short(error)))
    elif isinstance(error, RayTaskError):
        answer.set_exception(error.cause)
    else:
        answer.set_exception(error)


def _in_short(error: Exception) -> str:
    """Ray's reason without its table of contents."""
    text = str(error).partition("Some common causes")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (kept or lines or [type(error).__name__])[0]


def connect(address: str) -> Any:
    """Join the cluster at this address, or start Ray on this machine; returns the module."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtra("ray", "ray", "parallel.engines > 0") from error
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        _check_reachable(address)
        options["address"] = address
    else:
        options["include_dashboard"] = False
        # Workers choose their GPU by number; Ray would hide all of them.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        place = f"the cluster at parallel.address = {address!r}" if address else "Ray"
        raise EngineError(
            f"{place} could not be started or reached: {error}. `ray status` says what runs"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Ray would wait for minutes for a head that is not there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto", or a name that Ray knows
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise EngineError(
            f"parallel.address = {address!r} cannot be reached: {error}. Start the cluster with "
            "`ray start --head --port 6379` and give HOST:6379, or leave the key out for Ray on "
            "this machine"
        ) from error


def starter(address: str, logs: Path, *, threads: int = 0, gpus: Sequence[int] = ()) -> Start:
    """A function that starts the worker of a number, each with a log of its own.

    On this machine worker i takes the i-th of `gpus`, as far as they go, and then the first again.
    In a cluster each asks for a GPU of its own, if any are given.
    """
    ray = connect(address)
    logs.mkdir(parents=True, exist_ok=True)
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    actor_class = ray.remote(EngineWorker)

    def start(number: int) -> RayHandle:
        log = str(logs.absolute() / f"engine-{number}.log")
        gpu = gpus[number % len(gpus)] if gpus and not address else None
        actor = actor_class.options(
            num_cpus=0,
            num_gpus=1 if gpus and address else 0,
            max_restarts=0,
            max_concurrency=CONCURRENCY,
            runtime_env={"env_vars": variables},
        ).remote(threads, log, gpu)
        return RayHandle(actor, log)

    return start
