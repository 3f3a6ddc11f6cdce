"""Engines in other processes as one engine: replicas that share the problems of a step.

    trainer  ──codes, once, to all──▶  engine 0 .. M - 1  ──rollouts, as they finish──▶  trainer
                                                          ──their tokens──▶  shelves of the ranks

1. A sync packs the weights once and broadcasts them (`wire`). Each engine compares checksums, reads
   its buffers back, and asks the trainer for log-probs of canary tokens.
2. A stream deals problems to the engines as they get free (`stream`).
3. An engine that dies, hangs or fails a sync is replaced (`fleet`). The new one has no weights and
   samples nothing before the next sync.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from qurl.errors import EngineError, QurlError, SyncError
from qurl.ops.ray import WorkerDied
from qurl.ops.shelf import Shelves, Traffic
from qurl.quant.shipment import Chunk, Shipment
from qurl.rollout.canary import as_shipment
from qurl.rollout.engine import generate
from qurl.rollout.group.fleet import Fleet, Member
from qurl.rollout.group.stream import GroupStream
from qurl.rollout.group.worker import EngineSpec, Question
from qurl.rollout.local.requests import LengthHistory
from qurl.types import Problem, Rollout, SamplingParams, SyncReport

ATTEMPTS = 5
"""How often a sync is tried, if engines die in the midst of it."""
FAILURE_SECONDS, ANSWER_SECONDS = 2.0, 10.0
"""How long engines are asked why, and how long they may take to answer before they are replaced."""


class EngineGroup:
    """See `qurl.rollout.engine.Engine`. Groups of several formats may share one fleet."""

    works_elsewhere = True
    """What is submitted is worked on while this process does something else."""

    def __init__(
        self,
        fleet: Fleet,
        spec: EngineSpec,
        *,
        name: str = "actor",
        can_resync: bool = True,
        shelves: Shelves | None = None,
    ) -> None:
        """`can_resync`: if all engines die in the midst of a stream, the source of the last sync
        still has the weights of that version. With `shelves`, tokens go there."""
        self.fleet, self.name, self.quant = fleet, name, spec.quant
        self.version, self.traffic, self._shelves = -1, Traffic(), shelves
        self.packing = fleet.add(name, spec)
        self._capacity = int(spec.options.get("max_batch", 256))
        self._can_resync, self._lengths = can_resync, LengthHistory()
        self._bytes_sent = 0
        self._source: Shipment | None = None
        self._stream: GroupStream | None = None

    @property
    def kv_saturated_frac(self) -> float | None:
        asked = ("get", self.name, "kv_saturated_frac")
        answers = _answers(self._members(), ANSWER_SECONDS, *asked).values()
        known = [frac for frac in answers if frac is not None]
        return fmean(known) if known else None

    def sync(self, source: Any, *, version: int) -> SyncReport:
        """Send the trainer's weights to all engines that are there, and verify them."""
        if self._stream is not None and self._stream.is_open:
            raise EngineError("a sync has to wait until the open stream is closed")
        return self._sync(as_shipment(source), version)

    def _sync(self, shipment: Shipment, version: int) -> SyncReport:
        self._source, self.version, cause = shipment, version, ""
        for _ in range(ATTEMPTS):
            members = self.fleet.muster()
            start = time.perf_counter()
            try:
                reports = self._ship(members, shipment, version)
            except (RuntimeError, WorkerDied, TimeoutError) as error:
                if isinstance(error, QurlError):  # the weights or the trainer are at fault
                    raise
                self.fleet.disconnect()
                # Only engines that are alive know why.
                failures = _answers(members, FAILURE_SECONDS, "failure")
                said = [f"{member}: {failure}" for member, failure in failures.items() if failure]
                cause = "; ".join([str(error), *said])
                self.fleet.notify(f"a sync of version {version} broke off: {cause}")
                self.fleet.ping(members, seconds=ANSWER_SECONDS)
                continue
            if reports:
                return self._sum_up(reports, time.perf_counter() - start)
        raise SyncError(
            f"sync of version {version} failed {ATTEMPTS} times; the events say what became of "
            "the engines" + (f". The last time: {cause}" if cause else "")
        )

    def _ship(
        self, members: Sequence[Member], shipment: Shipment, version: int
    ) -> list[SyncReport]:
        """The reports of the engines that took the weights in."""
        wire = self.fleet.connect(members)
        begun = [m.call("begin_sync", self.name, version, shipment.dtype) for m in members]
        for call in begun:
            call.result(self.fleet.timeout)
        before = wire.num_bytes
        for chunk in shipment.pack(self.packing):
            wire.send(chunk)
        wire.send(Chunk())
        reports, failures = self._talk(members, shipment)
        if not reports and all(isinstance(error, SyncError) for error in failures.values()):
            raise next(iter(failures.values()))
        for member, error in failures.items():
            self.fleet.bury(member, error)
        for member in reports:
            if self.name in member.versions:  # it has lived through a step
                member.num_deaths = 0
            member.versions[self.name] = version
        self._bytes_sent = wire.num_bytes - before
        return list(reports.values())

    def _talk(
        self, members: Sequence[Member], shipment: Shipment
    ) -> tuple[dict[Member, SyncReport], dict[Member, Exception]]:
        """Answer the questions of all engines, until each has reported or failed."""
        reports: dict[Member, SyncReport] = {}
        failures: dict[Member, Exception] = {}
        answers: dict[Question, Tensor] = {}
        calls = {member: member.call("question") for member in members}
        deadline = time.monotonic() + self.fleet.timeout
        while calls:
            wait(calls.values(), timeout=1.0, return_when="FIRST_COMPLETED")
            for member, call in list(calls.items()):
                if not call.done():
                    if time.monotonic() > deadline:
                        failures[member] = EngineError("it did not verify its weights in time")
                        del calls[member]
                    continue
                del calls[member]
                try:
                    heard = call.result()
                except (EngineError, WorkerDied) as error:
                    failures[member] = error
                    continue
                if isinstance(heard, SyncReport):
                    reports[member] = heard
                    continue
                if heard not in answers:
                    answers[heard] = shipment.score(heard.token_ids, heard.quant).cpu()
                member.call("answer", answers[heard])
                calls[member] = member.call("question")
        return reports, failures

    def _sum_up(self, reports: Sequence[SyncReport], seconds: float) -> SyncReport:
        scales = [r.kv_scales for r in reports if r.kv_scales is not None]
        if not all(torch.equal(s.scale, scales[0].scale) for s in scales[1:]):
            raise SyncError(
                f"sync of version {self.version} failed: the engines chose different scales for "
                "their FP8 caches; are their GPUs of one kind?"
            )
        return SyncReport(
            version=self.version,
            seconds=seconds - max(r.verify_seconds for r in reports),
            bytes=self._bytes_sent,
            code_flip_frac=fmean(r.code_flip_frac for r in reports),
            verified=True,
            canary_gap=max(r.canary_gap for r in reports),
            verify_seconds=max(r.verify_seconds for r in reports),
            kv_scales=scales[0] if scales else None,
        )

    def stream(self, params: SamplingParams) -> GroupStream:
        """One stream at a time."""
        if self._stream is not None and self._stream.is_open:
            raise EngineError("a group of engines has one stream at a time; close the other first")
        self._stream = GroupStream(
            self.fleet,
            self.name,
            params,
            capacity=self._capacity,
            lengths=self._lengths,
            traffic=self.traffic,
            shelves=self._shelves,
            get_members=self._revive,
            get_version=lambda: self.version,
        )
        return self._stream

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        return generate(self, problems, params)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        while True:
            member = self._revive()[0]
            try:
                return member.call("score", self.name, list(token_ids)).result(self.fleet.timeout)
            except WorkerDied as error:
                self.fleet.bury(member, error)
            except TimeoutError:
                self.fleet.bury(member, f"it did not answer within {self.fleet.timeout:g} s")

    def _members(self) -> list[Member]:
        """The members that hold the weights of this version."""
        members = self.fleet.members
        return [m for m in members if m.handle and m.versions.get(self.name) == self.version]

    def _revive(self) -> list[Member]:
        """The members that can be sampled from. If none is left, the replacements get weights."""
        if members := self._members():
            return members
        if self._source is None:
            raise EngineError("no weights have been sent yet; sync before sampling")
        self.fleet.muster()
        if not self._can_resync:
            raise EngineError(
                f"no engine is left that holds version {self.version}, and the trainer has moved "
                "on; everything is saved, and the same command resumes"
            )
        self._sync(self._source, self.version)
        return self._members()


def _answers(
    members: Sequence[Member], seconds: float, method: str, *arguments: Any
) -> dict[Member, Any]:
    """What members say, but for those that are dead or do not answer in time."""
    calls = {member: member.call(method, *arguments) for member in members}
    wait(calls.values(), timeout=seconds)
    return {m: call.result() for m, call in calls.items() if call.done() and not call.exception()}
