"""Problems dealt to engines, and their rollouts as they finish.

An engine gets no more sequences than it decodes at once, so that a problem waits here and not with
a busy engine. What a completion is depends on the weights, the parameters and the problem's id
alone: what a dead engine was working on is asked of another, with the same result.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from qurl.errors import EngineError
from qurl.ops.ray import WorkerDied
from qurl.ops.shelf import Shelves, Traffic
from qurl.rollout.engine import Asked, Earlier, list_asked
from qurl.rollout.group.fleet import Fleet, Member
from qurl.rollout.group.worker import Progress
from qurl.rollout.local.requests import LengthHistory
from qurl.types import Problem, Rollout, SamplingParams

POLL_SECONDS = 1.0


@dataclass
class Work:
    """What one engine is doing."""

    opened: Future[None]
    asked: dict[str, list[Asked]] = field(default_factory=lambda: defaultdict(list))
    """What it has not answered yet, by the id of the problem."""
    poll: Future[Progress] | None = None
    num_steps: int = -1
    seen: float = field(default_factory=time.monotonic)
    """When it decoded something last."""

    @property
    def num_sequences(self) -> int:
        return sum(one.size for entries in self.asked.values() for one in entries)


class GroupStream:
    """See `qurl.rollout.engine.Stream`; work begins with `submit`, whoever waits for it."""

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        params: SamplingParams,
        *,
        capacity: int,
        lengths: LengthHistory,
        traffic: Traffic,
        shelves: Shelves | None,
        get_members: Callable[[], list[Member]],
        get_version: Callable[[], int],
    ) -> None:
        """`shelves` take the tokens, if there are any. `get_members`: those that can be sampled
        from; it may take long to find any."""
        self._fleet, self._name, self._params = fleet, name, params
        self._capacity, self._lengths, self._traffic = capacity, lengths, traffic
        self._shelves = shelves
        self._get_members, self._get_version = get_members, get_version
        self._waiting: deque[Asked] = deque()
        self._wanted: dict[str, int] = {}
        """Number of the engine that should get a problem, by its id."""
        self._work: dict[Member, Work] = {}
        self._id = str(uuid.uuid4())
        self.is_open = True

    def submit(
        self,
        problems: Sequence[Problem],
        sizes: Sequence[int] = (),
        earlier: Earlier = (),
        engines: Sequence[int] = (),
    ) -> None:
        """`engines`: numbers of those that should get each problem; empty if any may."""
        if earlier:
            raise EngineError("engines in other processes take no earlier responses to draft from")
        asked = list_asked(problems, sizes, self._params)
        if engines:
            self._wanted |= {p.id: engine for p, engine in zip(problems, engines, strict=True)}
        self._waiting.extend(self._lengths.order(asked))
        self._deal()

    def __iter__(self) -> Iterator[Rollout]:
        while self._waiting or self._is_busy:
            self._deal()
            for rollout in self._collect():
                longest = max(len(c.token_ids) for c in rollout.completions)
                self._lengths.record(rollout.problem, longest)
                given = time.monotonic()
                yield rollout
                for work in self._work.values():  # the reader's time is not theirs
                    work.seen += time.monotonic() - given

    def __enter__(self) -> GroupStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        for member in self._work:
            if member.handle is not None:
                member.call("close_stream", self._id)
        self._work, self.is_open = {}, False

    @property
    def _is_busy(self) -> bool:
        return any(work.asked for work in self._work.values())

    def _deal(self) -> None:
        """Hand waiting problems to engines that have room."""
        members = self._get_members() if self._waiting else []
        load = {m: self._work[m].num_sequences if m in self._work else 0 for m in members}
        portions: dict[Member, list[Asked]] = defaultdict(list)
        for member, one in self._match(load):
            if member not in self._work:
                addresses = self._shelves.addresses if self._shelves else ()
                begun = member.call("open", self._id, self._name, self._params, addresses)
                self._work[member] = Work(begun)
            self._work[member].asked[one.problem.id].append(one)
            portions[member].append(one)
        for member, portion in portions.items():
            message = pickle.dumps(portion)
            self._traffic.num_bytes += len(message)
            work = self._work[member]
            work.seen = work.seen if work.poll else time.monotonic()
            try:
                work.opened.result(self._fleet.timeout)  # calls overtake each other
                member.call("submit", self._id, message)
            except (WorkerDied, TimeoutError) as error:
                self._lose(member, error)

    def _match(self, load: dict[Member, int]) -> Iterator[tuple[Member, Asked]]:
        """Waiting problems with their engines, until none has room; `load` counts sequences.

        First everyone gets what should go to it. What is left goes to the engines that have the
        fewest sequences: nobody idles while a problem waits for a busy engine, or for a dead one.
        """
        numbered = {member.number: member for member in load}
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            member = numbered.get(self._wanted.get(one.problem.id, -1))
            if member is None or load[member] >= self._capacity:
                self._waiting.append(one)
                continue
            load[member] += one.size
            yield member, one
        while self._waiting and min(load.values()) < self._capacity:
            member = min(load, key=lambda m: load[m])
            one = self._waiting.popleft()
            load[member] += one.size
            yield member, one

    def _collect(self) -> Iterator[Rollout]:
        """Rollouts that have finished by now; waits a moment for the first."""
        busy = {member: work for member, work in self._work.items() if work.asked}
        for member, work in busy.items():
            work.poll = work.poll or member.call("poll", self._id, POLL_SECONDS)
        wait([w.poll for w in busy.values() if w.poll], POLL_SECONDS * 2, FIRST_COMPLETED)
        for member, work in busy.items():
            if work.poll is not None and work.poll.done():
                yield from self._take(member, work)
            elif time.monotonic() - work.seen > self._fleet.timeout:
                self._lose(member, f"it did not answer for {self._fleet.timeout:g} s")

    def _take(self, member: Member, work: Work) -> Iterator[Rollout]:
        assert work.poll is not None
        poll, work.poll = work.poll, None
        try:
            progress = poll.result()
        except WorkerDied as error:
            self._lose(member, error)
            return
        rollouts: list[Rollout] = pickle.loads(progress.rollouts)
        self._traffic.num_bytes += len(progress.rollouts)
        if rollouts or progress.num_steps != work.num_steps:
            work.num_steps, work.seen = progress.num_steps, time.monotonic()
        elif time.monotonic() - work.seen > self._fleet.timeout:
            self._lose(member, f"it decoded no token for {self._fleet.timeout:g} s")
        for rollout in rollouts:
            self._check_off(member, work, rollout)
            yield self._shelves.adopt(rollout) if self._shelves else rollout

    def _check_off(self, member: Member, work: Work, rollout: Rollout) -> None:
        if rollout.version != (version := self._get_version()):
            raise EngineError(
                f"{member} sampled with weights of version {rollout.version}, not {version}"
            )
        entries = work.asked[rollout.problem.id]
        entries.pop(0)
        if not entries:
            del work.asked[rollout.problem.id]

    def _lose(self, member: Member, cause: Exception | str) -> None:
        """Ask others for what a dead engine was working on."""
        lost = [entry for entries in self._work.pop(member).asked.values() for entry in entries]
        self._waiting.extendleft(reversed(lost))
        self._fleet.bury(member, cause)
