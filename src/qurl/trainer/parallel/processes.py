"""Processes that call the same functions at the same time; the one that leads them is rank 0.

They are started here (`torch.multiprocessing`), or on any number of machines by torchrun or by Ray
(`ray`). The leader sends a function and its arguments over a process group of its own (gloo) or
over Ray, calls the function itself, and returns what it returns. Weights and gradients take the
default group.

A rank whose failure the others do not share cannot go on: they wait for it in some exchange. It
writes the cause into the store and ends, which breaks the exchanges of the others, and the leader
looks the cause up.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from qurl.errors import ConfigError, QurlError, RankLost, TrainingError
from qurl.ops.background import in_background
from qurl.ops.shelf import Traffic
from qurl.trainer.ranks import Ranks

if TYPE_CHECKING:  # a process begins before it needs one
    from qurl.trainer.learner import Learner

LOCALHOST = "127.0.0.1"
STARTED = "qurl/started"
"""Keys of the store under which ranks say that they have begun."""
FAILURE = "qurl/failure"
"""Key of the store that names the rank that failed first, and why; each that fails adds its own."""
NEWS_SECONDS = 5.0
"""How long the leader waits for the news of a death that has broken its exchange."""
GENTLE_SECONDS = 10.0
"""How long ranks may take to end by themselves."""
PATIENCE = timedelta(days=30)
"""How long a rank waits for its next command: rollouts and suspended jobs take long."""
SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
"""What terminals and schedulers send to all processes of a job; the leader decides what to do."""
Function = Callable[..., Any]
"""Its first argument is the `Post` of the process that calls it."""
Command = tuple[Function, tuple[Any, ...]]


@dataclass
class Post:
    """A process of the group, and what the functions that it calls leave there."""

    ranks: Ranks
    held: dict[str, Any] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    """Pickled bytes that the leader sends, each message once, and receives."""

    @property
    def learner(self) -> Learner:
        """The learner of this rank, once it has one."""
        return self.held["learner"]

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks on the leader, in their order; nothing on the others."""
        found: list[Any] = [None] * self.ranks.size
        is_leader, control = self.ranks.rank == 0, self.ranks.control
        dist.gather_object(pickle.dumps(item), found if is_leader else None, group=control)
        if not is_leader:
            return []
        self.traffic.num_bytes += sum(map(len, found[1:]))
        return [pickle.loads(message) for message in found]

    def scatter(self, key: str) -> Any:
        """This rank's item of those that the leader holds under `key`, one for each rank."""
        items = [pickle.dumps(item) for item in self.held.pop(key, ())]
        self.traffic.num_bytes += sum(map(len, items[1:]))
        own: list[Any] = [None]
        dist.scatter_object_list(own, items or None, src=0, group=self.ranks.control)
        return pickle.loads(own[0])


class Followers(Protocol):
    """Ranks 1 and up, as their leader sees them, whoever started them."""

    def dumps(self, command: Command) -> bytes: ...

    def send(self, message: bytes | None, control: Any) -> None:
        """Have all of them `obey` a pickled command; None ends them. `control` is their group."""
        ...

    def find_ended(self) -> dict[int, str]:
        """How those ended that are known to have, by rank."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Started:
    """What the leader needs of a group whose other ranks have begun."""

    store: dist.Store
    followers: Followers
    gpu: int = 0
    """The number of the GPU that the leader takes."""


Start = Callable[[int, str, int], AbstractContextManager[Started]]
"""Starts ranks 1 and up of so many, on cpu or cuda, with so many threads, and ends them."""


class Workers:
    """The group, seen from its leader."""

    def __init__(self, post: Post, store: dist.Store, followers: Followers) -> None:
        self.post = post
        self._store, self._followers = store, followers
        self._failure: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the group is of no more use."""
        return self._failure is not None

    def run(self, function: Function, *arguments: Any) -> Any:
        """Call `function(post, *arguments)` on all ranks; returns what it returns here.

        The function must be one of a module. Errors that all ranks raise together leave the group
        intact; after any other the group is of no more use.
        """
        if self._failure is not None:
            raise TrainingError(f"the trainer ranks are out of step: {self._failure}")
        message = self._pickle(function, arguments)
        try:
            self.post.traffic.num_bytes += len(message)
            self._followers.send(message, self.post.ranks.control)
            return function(self.post, *arguments)
        except BaseException as error:
            is_ours = isinstance(error, QurlError)
            if is_ours and error.is_agreed:
                raise
            self._failure = f"{type(error).__name__}: {error}"
            if is_ours or not isinstance(error, Exception):
                raise
            if (found := _find_cause(self._store, self._followers, self.post.ranks.size)) is None:
                raise
            kind, self._failure = found
            raise kind(
                f"{self._failure}. The other ranks cannot go on without it; the same command "
                "resumes from the newest checkpoint"
            ) from error

    def _pickle(self, function: Function, arguments: tuple[Any, ...]) -> bytes:
        try:
            return self._followers.dumps((function, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"parallel.trainers > 1 sends parts of a run to other processes, and one cannot be "
                f"sent: {error}. Define your objective at the top of a module"
            ) from error

    def close(self) -> None:
        """End the other ranks: gently, or after a failure at once."""
        if self._failure is None:
            with suppress(RuntimeError):  # one that is gone already
                self._followers.send(None, self.post.ranks.control)
        self._followers.kill()
        self.post.held.clear()
        dist.destroy_process_group()


def _find_cause(
    store: dist.Store, followers: Followers, size: int
) -> tuple[type[TrainingError], str] | None:
    """What became of the rank that failed first; None if none is known to have failed.

    One that was killed reports nothing, while those do whose exchanges it broke.
    """
    deadline = time.monotonic() + NEWS_SECONDS  # exchanges break a moment before
    while True:
        ended = followers.find_ended()
        for rank, how in ended.items():
            if not store.check([f"{FAILURE}/{rank}"]):
                return RankLost, f"trainer rank {rank} {how}"
        if len(ended) == size - 1 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if store.check([FAILURE]):
        return TrainingError, store.get(FAILURE).decode()
    return None


@contextmanager
def lead(size: int, device: str, threads: int = 0, start: Start | None = None) -> Iterator[Workers]:
    """Start `size - 1` processes and lead them; under torchrun, lead those that it started.

    `device` is cpu or cuda, `threads` are torch's. `start` is `spawn` if not given.
    """
    if dist.is_torchelastic_launched():
        start = _take_launched
    with (start or spawn)(size, device, threads) as started:
        post = _join_all(started, size, device)
        workers = Workers(post, started.store, started.followers)
        try:
            yield workers
        finally:
            workers.close()


def _join_all(started: Started, size: int, device: str) -> Post:
    """`join` as the leader; raises at once if another rank ends, for which torch would wait."""
    # A store that waits in one thread answers no other. Torch's stubs lack the method.
    own = started.store.clone()  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.set_device(started.gpu)  # each thread has a device of its own
    joined = in_background(lambda: join(own, 0, size, device, started.gpu))
    while not joined.done() and not started.followers.find_ended():
        wait([joined], timeout=0.1)
    if not joined.done() or joined.exception():
        found = _find_cause(started.store, started.followers, size)
        if found is not None:
            # Not RankLost, after which the command starts again: torch cannot, in this process.
            raise TrainingError(
                f"{found[1]}, before all ranks had joined. The same command starts again"
            )
    return joined.result()


class Spawned:
    """See `Followers`: processes that read commands off the control group."""

    def __init__(self, processes: Mapping[int, Any]) -> None:
        """None of those that torchrun started: it ends them itself."""
        self._processes = processes

    def dumps(self, command: Command) -> bytes:
        return pickle.dumps(command)

    def send(self, message: bytes | None, control: Any) -> None:
        dist.broadcast_object_list([message], src=0, group=control)
        for process in self._processes.values() if message is None else ():
            process.join(timeout=GENTLE_SECONDS)

    def find_ended(self) -> dict[int, str]:
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        return {
            rank: f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            for rank, code in codes.items()
            if code is not None
        }

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


@contextmanager
def _take_launched(size: int, device: str, threads: int) -> Iterator[Started]:
    store, _, _ = next(dist.rendezvous("env://"))
    yield Started(store, Spawned({}), _launched_gpu())


@contextmanager
def spawn(size: int, device: str, threads: int) -> Iterator[Started]:
    """Processes of this machine; each rank takes the GPU of its number."""
    _check_devices(size, device)
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    context, processes = multiprocessing.get_context("spawn"), {}
    try:
        for rank in range(1, size):
            arguments = (store.port, rank, size, device, threads)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            processes[rank] = process
        _await_start(store, processes)
        yield Started(store, Spawned(processes))
    finally:
        for process in processes.values():
            process.kill()


def _await_start(store: dist.Store, processes: Mapping[int, Any]) -> None:
    """Wait until all processes have begun; raise if one ends before."""
    while not all(store.check([f"{STARTED}/{rank}"]) for rank in processes):
        for rank, process in processes.items():
            if process.exitcode is not None and process.exitcode < 0:
                number = -process.exitcode
                raise RankLost(f"trainer rank {rank} was killed by signal {number} as it began")
            if process.exitcode is not None:
                raise TrainingError(
                    f"trainer rank {rank} ended with code {process.exitcode} before it began; its "
                    "own message is above. A script that calls train() with parallel.trainers > 1 "
                    'needs `if __name__ == "__main__":`'
                )
        time.sleep(0.05)


def num_launched() -> int | None:
    """How many processes torchrun started, if it did."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else None


def is_follower() -> bool:
    """Whether torchrun started this process to follow another."""
    return num_launched() is not None and int(os.environ["RANK"]) > 0


def follow(device: str, threads: int = 0) -> None:
    """Do what the leader says, until it ends the group."""
    store, rank, size = next(dist.rendezvous("env://"))
    _follow(store, rank, size, device, threads, _launched_gpu())


def _launched_gpu() -> int:
    return int(os.environ["LOCAL_RANK"])


def _work(port: int, rank: int, *settings: Any) -> None:
    store = dist.TCPStore(LOCALHOST, port, is_master=False)
    store.set(f"{STARTED}/{rank}", "")
    _follow(store, rank, *settings, gpu=rank)
    os._exit(0)  # the leader waits, and Python would tidy up for seconds


def _follow(store: dist.Store, rank: int, size: int, device: str, threads: int, gpu: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if threads:
        torch.set_num_threads(threads)
    with answering(store, rank):
        post = join(store, rank, size, device, gpu)
        message: list[Any] = [None]
        while True:
            dist.broadcast_object_list(message, src=0, group=post.ranks.control)
            if message[0] is None:
                break
            obey(post, message[0])
    leave(post)


def obey(post: Post, message: bytes) -> None:
    """Call a function of the leader; an error that all ranks raise together is the leader's."""
    function, arguments = pickle.loads(message)
    try:
        function(post, *arguments)
    except QurlError as error:
        if not error.is_agreed:
            raise


def leave(post: Post) -> None:
    post.held.clear()
    dist.destroy_process_group()


@contextmanager
def answering(store: dist.Store, rank: int) -> Iterator[None]:
    """End this process on any error inside, after a report."""
    try:
        yield
    # Whatever it is, nobody else will report it, and the leader must not wait for this rank.
    except BaseException as error:
        _report(store, rank, error)
        os._exit(1)


def _report(store: dist.Store, rank: int, error: BaseException) -> None:
    """Tell the cause to the others; it stands for all, if it is the first."""
    is_ours = isinstance(error, QurlError)
    cause = f"trainer rank {rank}: {error if is_ours else f'{type(error).__name__}: {error}'}"
    try:
        is_first = not store.check([FAILURE])
        if is_first:
            store.set(FAILURE, cause)
        store.set(f"{FAILURE}/{rank}", "")
        store.check([FAILURE])  # `set` itself waits for no answer
    except (RuntimeError, OSError):  # the leader is gone, and its store with it
        return
    if is_first and not is_ours:
        traceback.print_exception(error)
        sys.stderr.flush()


def join(store: dist.Store, rank: int, size: int, device: str, gpu: int) -> Post:
    """Become a rank of the group; returns when all others have."""
    backend = "gloo"
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Post(Ranks(rank, size, control))


def _check_devices(size: int, device: str) -> None:
    if device == "cuda" and (found := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"parallel.trainers = {size} needs as many GPUs, and this machine has {found}; lower "
            "it, or start the ranks on several machines, with Ray (parallel.address) or torchrun"
        )
