"""Trainer ranks as Ray actors, on the machines of a cluster; see `qurl.ops.ray`.

The leader is rank 0 and stays in its own process, on a machine of the cluster. Ray reserves a GPU
for each rank, the leader's among them (without GPUs, a CPU), on as few machines as it can. It
carries commands and tells of deaths; weights and gradients take torch.distributed, whose store is
on the leader's machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qurl.errors import ConfigError, RankLost, TrainingError
from qurl.ops.ray import (
    RayHandle,
    WorkerDied,
    connect,
    describe_death,
    describe_process,
    redirect_stderr,
    start_actor,
)
from qurl.ops.shelf import own_host
from qurl.trainer.parallel.processes import (
    GENTLE_SECONDS,
    Command,
    Started,
    answering,
    join,
    leave,
    obey,
)


class RankWorker:
    """Lives in the other process. Calls are taken one after the other."""

    def __init__(self, rank: int, threads: int, log: str) -> None:
        redirect_stderr(log)
        if threads:
            torch.set_num_threads(threads)
        self._rank = rank

    def begin(self, host: str, port: int) -> str:
        self._store = dist.TCPStore(host, port, is_master=False)
        return describe_process()

    def join(self, size: int, device: str) -> None:
        with answering(self._store, self._rank):
            self._post = join(self._store, self._rank, size, device, gpu=0)  # it sees no other

    def obey(self, message: bytes | None) -> None:
        with answering(self._store, self._rank):
            if message is None:
                leave(self._post)
            else:
                obey(self._post, message)


class RayFollowers:
    """See `Followers`."""

    def __init__(
        self,
        handles: Mapping[int, RayHandle],
        where: Mapping[int, str],
        calls: Mapping[int, Future[None]],
    ) -> None:
        """`calls` are under way, and tell of deaths."""
        self._handles, self._where, self._calls = handles, where, calls

    def dumps(self, command: Command) -> bytes:
        from ray import cloudpickle

        return cloudpickle.dumps(command)

    def send(self, message: bytes | None, control: Any) -> None:
        self._calls = {rank: handle.call("obey", message) for rank, handle in self._handles.items()}
        if message is None:
            wait(self._calls.values(), timeout=GENTLE_SECONDS)

    def find_ended(self) -> dict[int, str]:
        failed = {r: call.exception() for r, call in self._calls.items() if call.done()}
        return {rank: self._describe(rank, error) for rank, error in failed.items() if error}

    def _describe(self, rank: int, error: BaseException) -> str:
        words = self._handles[rank].last_words()
        return f"({self._where[rank]}) {describe_death(error, words)}"

    def kill(self) -> None:
        for handle in self._handles.values():
            handle.kill()


@contextmanager
def start_by_ray(
    address: str, logs: Path, seconds: float, size: int, device: str, threads: int
) -> Iterator[Started]:
    """A `Start`, with its first three arguments bound; ranks have so many seconds to begin."""
    connect(address)
    logs.mkdir(parents=True, exist_ok=True)
    handles: dict[int, RayHandle] = {}
    with _reserve(size, device, seconds) as places:
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(1, size):
                log = str(logs.absolute() / f"rank-{rank}.log")
                handles[rank] = start_actor(
                    RankWorker, {"rank": rank}, log=log, threads=threads, **places[rank]
                )
            where = _await_start(handles, store.port, seconds)
            calls = {r: handle.call("join", size, device) for r, handle in handles.items()}
            gpu = _own_gpu(places[0]) if device == "cuda" else 0
            yield Started(store, RayFollowers(handles, where, calls), gpu)
        finally:
            for handle in handles.values():
                handle.kill()


def _await_start(handles: Mapping[int, RayHandle], port: int, seconds: float) -> dict[int, str]:
    """Where all of them are, when they have begun."""
    begun = {rank: handle.call("begin", own_host(), port) for rank, handle in handles.items()}
    wait(begun.values(), timeout=seconds)
    for rank, call in begun.items():
        if not call.done():
            late = f"trainer rank {rank} did not begin within parallel.timeout = {seconds:g} s"
            raise TrainingError(late)
        if (error := call.exception()) is not None:
            kind = RankLost if isinstance(error, WorkerDied) else TrainingError
            words = handles[rank].last_words()
            raise kind(f"trainer rank {rank} {describe_death(error, words)}") from error
    return {rank: call.result() for rank, call in begun.items()}


@contextmanager
def _reserve(size: int, device: str, seconds: float) -> Iterator[list[dict[str, Any]]]:
    """Options of Ray for the process of each rank, which put it into the place reserved for it."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = "GPU" if device == "cuda" else "CPU"
    here = ray.util.get_node_ip_address()
    bundles: list[dict[str, float]] = [{kind: 1} for _ in range(size)]
    bundles[0][f"node:{here}"] = 0.001  # each machine has 1 of its own kind
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(seconds):
            found = ray.cluster_resources().get(kind, 0)
            raise TrainingError(
                f"parallel.trainers = {size}: Ray found no room for so many ranks within "
                f"parallel.timeout = {seconds:g} s. Each takes one {kind}, the first one of this "
                f"machine ({here}); the cluster has {found:g}. `ray status` says what is free"
            )
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(size)]
        yield [{f"num_{kind.lower()}s": 1, "scheduling_strategy": place} for place in places]
    finally:
        remove_placement_group(group)


def _own_gpu(place: Mapping[str, Any]) -> int:
    """Which of the GPUs that this process sees Ray has reserved for it."""
    import ray

    def find() -> str:
        return str(ray.get_gpu_ids()[0])

    name = ray.get(ray.remote(find).options(num_cpus=0, **place).remote())
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return int(name)
    if name not in seen.split(","):
        raise ConfigError(
            f"Ray has reserved GPU {name} for rank 0, which CUDA_VISIBLE_DEVICES = {seen!r} hides; "
            "start Ray and qurl with the same GPUs"
        )
    return seen.split(",").index(name)
