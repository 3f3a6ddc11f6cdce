"""The engine processes of a group: started, watched, buried and replaced.

starting  its engines are being built
ready     it can take weights; it samples only what it has been synced to
gone      it died three times, and is not replaced any more
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from qurl.errors import EngineError
from qurl.ops.ray import WorkerDied, describe_death
from qurl.quant.shipment import Packing
from qurl.rollout.group.wire import Carrier, Switchboard, Wire
from qurl.rollout.group.worker import EngineSpec

CPU = torch.device("cpu")
CONNECT_SECONDS = 60.0
"""How long the ends of a wire wait for each other, and for each tensor."""
MOST_DEATHS = 3
"""After so many deaths in a row an engine is not started again."""


class Handle(Protocol):
    """A worker in another process."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of its `EngineWorker`; the future raises `WorkerDied` if it is gone."""
        ...

    def kill(self) -> None: ...

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        ...


Start = Callable[[int], Handle]
"""Starts the worker of that number."""


@dataclass(eq=False)
class Member:
    """A place in the group, which one worker after the other may fill."""

    number: int
    handle: Handle | None
    building: dict[str, Future[Packing]]
    """Its engines in the making, by name."""
    where: Future[str]
    num_deaths: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    """The version of the weights that each of its engines holds."""

    @property
    def is_ready(self) -> bool:
        return self.handle is not None and all(f.done() for f in self.building.values())

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See `Handle.call`."""
        if self.handle is not None:
            return self.handle.call(method, *arguments)
        answer: Future[Any] = Future()
        answer.set_exception(WorkerDied(f"engine {self.number} is gone"))
        return answer

    def __str__(self) -> str:
        is_known = self.where.done() and self.where.exception() is None
        return f"engine {self.number}" + (f" ({self.where.result()})" if is_known else "")


class Fleet:
    """All members. Each holds the engines of all specs, by name."""

    def __init__(
        self,
        size: int,
        start: Start,
        *,
        min_engines: int = 1,
        timeout: float = 300.0,
        device: torch.device = CPU,
        carrier: Carrier = "gloo",
        notify: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`device` from which weights are sent, by `carrier` (`wire`)."""
        self._start, self.timeout, self.min_engines = start, timeout, min_engines
        self.notify = notify
        self._specs: dict[str, EngineSpec] = {}
        self._causes: list[str] = []
        self._device = device
        self._switchboard = Switchboard(min(CONNECT_SECONDS, timeout), carrier)
        self._wire: tuple[Wire, list[Handle | None]] | None = None
        """The wire of the last sync, and the workers that it goes to."""
        self._is_closed, self._closing = False, threading.Lock()
        """Another thread may read a stream when a run that fails closes the fleet."""
        self.members = [self._fill(number) for number in range(size)]

    def add(self, name: str, spec: EngineSpec) -> Packing:
        """Build one more engine in every worker; returns how it wants its weights."""
        self._specs[name] = spec
        for member in self.members:
            if member.handle is not None:
                member.building[name] = member.call("build", name, spec)
        ready = self.muster(everyone=True)
        return ready[0].building[name].result()

    def muster(self, *, everyone: bool = False) -> list[Member]:
        """The members that can take weights; waits for the fewest that are allowed, or for all."""
        deadline = time.monotonic() + self.timeout
        while True:
            for member in self.members:
                self._see_to(member)
            alive = [member for member in self.members if member.handle is not None]
            ready = [member for member in alive if member.is_ready]
            if len(alive) < self.min_engines:
                raise EngineError(
                    f"{len(alive)} engines are left, and parallel.min_engines = "
                    f"{self.min_engines}: {'; '.join(self._causes)}. Everything is saved; the same "
                    "command resumes"
                )
            if len(ready) >= (len(alive) if everyone else self.min_engines):
                return ready
            if time.monotonic() > deadline:
                if everyone and len(ready) >= self.min_engines:
                    return ready
                late = [str(member) for member in alive if member not in ready]
                raise EngineError(
                    f"{', '.join(late)} did not start within parallel.timeout = {self.timeout:g} s"
                )
            pending = [f for m in alive for f in m.building.values() if not f.done()]
            wait(pending, timeout=1.0)

    def connect(self, members: Sequence[Member]) -> Wire:
        """A wire to these members: that of the last time, if it goes to the same workers."""
        handles = [member.handle for member in members]
        if self._wire is not None and self._wire[1] == handles:
            return self._wire[0]
        self._wire = None
        address, size = self._switchboard.next_address(), len(members) + 1
        joined = [m.call("join", address, rank, size) for rank, m in enumerate(members, 1)]
        wire = Wire(address, 0, size, self._device)
        for call in joined:
            call.result(self.timeout)
        self._wire = wire, handles
        return wire

    def disconnect(self) -> None:
        """Give up a wire that is broken."""
        self._wire = None

    def bury(self, member: Member, cause: Exception | str) -> None:
        """Give up a worker, and start another in its place."""
        with self._closing:
            if self._is_closed:
                raise EngineError("the engines were closed")
            message = self._replace(member, cause)
        self.notify(message)

    def _replace(self, member: Member, cause: Exception | str) -> str:
        """See `bury`; returns what to tell the user."""
        said = member.handle.last_words() if member.handle is not None else ""
        message = f"{member} {describe_death(cause, said)}"
        self._causes.append(message)
        if member.handle is not None:
            member.handle.kill()
        deaths = member.num_deaths + 1
        if deaths >= MOST_DEATHS:
            member.handle, member.num_deaths = None, deaths
            return f"{message}; it died {deaths} times in a row and is not started again"
        fresh = self._fill(member.number)
        member.handle, member.where, member.building = fresh.handle, fresh.where, fresh.building
        member.num_deaths, member.versions = deaths, {}
        return f"{message}; another is starting and joins at a sync"

    def ping(self, members: Sequence[Member], seconds: float) -> None:
        """Bury those that do not answer."""
        calls = {member: member.call("describe") for member in members if member.handle}
        wait(calls.values(), timeout=seconds)
        for member, call in calls.items():
            if not call.done():
                self.bury(member, f"it did not answer within {seconds:g} s")
            elif (error := call.exception()) is not None:
                self.bury(member, error)  # type: ignore[arg-type]

    def close(self) -> None:
        self._wire = None
        with self._closing:
            self._is_closed = True
            for member in self.members:
                if member.handle is not None:
                    member.handle.kill()
                    member.handle = None

    def _fill(self, number: int) -> Member:
        handle = self._start(number)
        building = {name: handle.call("build", name, spec) for name, spec in self._specs.items()}
        return Member(number, handle, building, handle.call("describe"))

    def _see_to(self, member: Member) -> None:
        """Bury a member that could not build its engines; a bug or a bad setting is raised."""
        for build in member.building.values():
            if member.handle is None or not build.done() or (error := build.exception()) is None:
                continue
            if not isinstance(error, WorkerDied):
                raise error
            self.bury(member, error)
            return
