"""Engines and trainer ranks as Ray actors: on this machine, or on the machines of a cluster.

Ray starts processes, carries commands, problems and rollouts, and notices deaths. Weights and
gradients do not pass through it (`qurl.rollout.group.wire`, `qurl.trainer.parallel`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from qurl.errors import EngineError
from qurl.plugins import import_extra

CONNECT_SECONDS = 10.0
HERE = ("", "local")
"""Values of `parallel.address` for which Ray is started on this machine."""


class WorkerDied(Exception):
    """A worker is not there any more; the message says why."""


class RayHandle:
    """A process that Ray started. See `qurl.rollout.group.fleet.Handle`."""

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
        try:
            with open(self._log, errors="replace") as file:
                return "\n".join(file.read().rstrip().splitlines()[-5:])
        except OSError:
            return ""


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
    return (kept or lines or [type(error).__name__])[0].rstrip(". ")


def connect(address: str) -> Any:
    """Join the cluster at this address, or start Ray on this machine; returns the module."""
    ray = import_extra("ray", "ray", "ray", "parallel.engines or parallel.address")
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        _check_reachable(address)
        options["address"] = address
    if address in HERE:
        options["include_dashboard"] = False
        # Workers may choose their GPU by number; Ray would hide all of them.
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


def start_actor(
    kind: type, inputs: Mapping[str, Any], *, log: str, threads: int, **options: Any
) -> RayHandle:
    """A process of its own with an object of that kind, made from inputs, log and threads."""
    import ray

    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    options = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": variables}} | options
    actor = ray.remote(kind).options(**options).remote(**inputs, log=log, threads=threads)
    return RayHandle(actor, log)


def redirect_stderr(log: str) -> None:
    """Write what this process says to a file, its last words among it."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)


def describe_process() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def describe_death(cause: BaseException | str, last_words: str) -> str:
    return f"is gone: {cause}" + (f". Its last words: {last_words}" if last_words else "")
