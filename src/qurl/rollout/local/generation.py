"""Completions in the making: admit, reserve, launch, read, until all have finished.

The host launches step n and then reads step n - depth. So it sees the end of a completion `depth`
steps late, and drops what that row has sampled meanwhile. A generation can give its pages back
between two rollouts and go on later: the transcript has what was sampled, and everything else
(pages, rows, steps in flight) can be made again from it.

While few requests run, steps may have drafts of what follows (`drafts`). Such a step is read at
once, since the next draft depends on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qurl.rollout.engine import Asked, Earlier, check_finite, list_asked
from qurl.rollout.local.decoder import prefill_jobs
from qurl.rollout.local.drafts import Drafter
from qurl.rollout.local.graphs import POSITION, Step, Stepper
from qurl.rollout.local.requests import Group, LengthHistory, Request, Transcript
from qurl.rollout.local.scheduler import Scheduler
from qurl.rollout.sampler import request_key
from qurl.rollout.stop import StopRule
from qurl.types import Problem, Rollout, SamplingParams


@dataclass(frozen=True)
class Resources:
    """What a generation borrows from its engine."""

    stepper: Stepper
    stop: StopRule
    lengths: LengthHistory
    drafter: Drafter
    check: Callable[[Sequence[Asked]], None]
    """Raises for a problem that cannot be sampled."""
    acquire: Callable[[Generation, Problem, int], Scheduler]
    """A scheduler with pages for so many sequences, each as long as this problem's may become."""
    release: Callable[[Generation], None]
    get_version: Callable[[], int]


class Generation:
    """A stream of rollouts, sampled step by step."""

    def __init__(self, params: SamplingParams, resources: Resources) -> None:
        self.params = params
        self._engine = resources
        self._submitted: list[Asked] = []
        self._requests: dict[int, Request] = {}
        """Unfinished ones by their row of the transcript, in the order of submission."""
        self._num_open = 0
        """Completions of the groups with an unfinished request."""
        self._ready: deque[Group] = deque()
        """Finished groups that have not been handed out."""
        self._transcript = Transcript(params.max_tokens)
        self._scheduler: Scheduler | None = None
        self._longest = self._num_sequences = 0
        """Tokens of a sequence, and sequences, that the pages were acquired for."""
        self._in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self._are_rows_behind = False
        """Steps with drafts have not moved the rows on the device."""

    def submit(
        self, problems: Sequence[Problem], sizes: Sequence[int] = (), earlier: Earlier = ()
    ) -> None:
        """Ask for completions of more problems; also between two rollouts."""
        asked = list_asked(problems, sizes, self.params, earlier)
        self._engine.check(asked)
        num_sequences = sum(one.size for one in (*asked, *self._submitted)) + self._num_open
        if num_sequences > self._engine.stepper.max_batch:
            asked = self._engine.lengths.order(asked)
        self._submitted.extend(asked)

    def __iter__(self) -> Iterator[Rollout]:
        """Rollouts as they finish. You can leave the loop and go on with another one."""
        while self._ready or self._requests or self._submitted:
            if not self._ready:
                self._run()
            group = self._ready.popleft()
            completions = [c for c in group.completions if c is not None]
            version = min(v for c in completions for v in c.versions)
            yield Rollout(group.problem, completions, version, self.params.temperature)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._submitted.clear()
        self._requests.clear()
        self._num_open = 0
        self.release()

    def release(self) -> None:
        """Give pages and memory back. When it goes on, keys and values are computed again."""
        self._scheduler = None
        self._in_flight.clear()
        for group in {request.group for request in self._requests.values()}:
            group.prefix, group.num_unadmitted = [], 0
        for request in self._requests.values():
            request.reset()
        self._engine.release(self)

    @torch.no_grad()
    def _run(self) -> None:
        """Go on until a group has finished. An exception, KeyboardInterrupt included, ends it."""
        try:
            while not self._ready:
                self._step()
        except BaseException:
            self.__exit__()
            raise
        if not self._requests and not self._submitted:
            self.release()

    def _step(self) -> None:
        """Launch one more decode step, and read an earlier one."""
        scheduler, start = self._prepare(), time.perf_counter()
        if not scheduler.has_work:  # the last tokens are in flight
            self._drain()
            return
        self._admit(scheduler)
        room = self._draft_room(scheduler)
        if not scheduler.reserve(can_preempt=not self._in_flight, num_drafted=room):
            self._drain()  # a request cannot be preempted before all of its tokens are known
            scheduler.reserve()
        num_rows, num_tokens = scheduler.num_running, 1.0
        if room:
            num_tokens = self._draft(scheduler, room)
        elif scheduler.num_running:
            self._launch(scheduler)
        while len(self._in_flight) > self._engine.stepper.depth:
            self._read()
        if (pace := self._engine.drafter.pace) is not None and num_rows and num_tokens:
            seconds = time.perf_counter() - start
            pace.record(num_rows, seconds, num_tokens=num_tokens, has_drafts=bool(room))

    def _prepare(self) -> Scheduler:
        """A scheduler that knows all requests, and pages for them."""
        scheduler = self._scheduler
        if scheduler is not None and not self._submitted:
            return scheduler
        fresh = self._take_in()
        if scheduler is None:
            return self._acquire(list(self._requests.values()))
        longest = max(self._length(r.group.problem) for r in fresh)
        if longest <= self._longest and self._most_sequences() <= self._num_sequences:
            scheduler.add(fresh)
            return scheduler
        self._drain()
        return self._acquire([*scheduler.suspend(), *fresh])

    def _take_in(self) -> list[Request]:
        """Make requests of the submitted problems."""
        params, transcript, fresh = self.params, self._transcript, []
        busy = {row for _, rows in self._in_flight for row in rows.tolist()}
        num_sequences = sum(one.size for one in self._submitted)
        rows = iter(transcript.open(num_sequences, busy))
        for problem, size, earlier in self._submitted:
            group = Group(problem, [None] * size, size, earlier=earlier)
            for member in range(size):
                key = request_key(params.seed, problem.id, member)
                request = Request(next(rows), group, member, key, transcript)
                transcript.limits[request.index] = params.limit(problem)
                fresh.append(request)
        self._requests |= {r.index: r for r in fresh}
        self._num_open += num_sequences
        self._submitted.clear()
        return fresh

    def _acquire(self, requests: list[Request]) -> Scheduler:
        """Pages for all requests, and rows for as many as can run at once."""
        engine, num_sequences = self._engine, self._most_sequences()
        if num_sequences > self._num_sequences:  # twice as many, lest it grow again soon
            most = min(2 * self._num_sequences, engine.stepper.max_batch)
            num_sequences = max(num_sequences, most)
        problem = max((r.group.problem for r in requests), key=self._length)
        self._scheduler = engine.acquire(self, problem, num_sequences)
        self._longest, self._num_sequences = self._length(problem), num_sequences
        self._scheduler.add(requests)
        return self._scheduler

    def _length(self, problem: Problem) -> int:
        """Most tokens of prompt and completion."""
        return len(problem.prompt_ids) + self.params.limit(problem)

    def _most_sequences(self) -> int:
        """Requests that could run at once."""
        return min(self._num_open, self._engine.stepper.max_batch)

    def _admit(self, scheduler: Scheduler) -> None:
        """Let waiting requests join, with their keys and values in the cache."""
        admission = scheduler.admit()
        if not admission.started:
            return
        stepper = self._engine.stepper
        prefill_jobs(stepper.ops, stepper.cache, admission.prefills)
        for saved, pages in admission.restores:
            stepper.cache.restore_(saved, pages)
        stepper.cache.copy_(admission.copies)
        self._start(admission.started)

    def _start(self, requests: Sequence[Request]) -> None:
        """Tell the device the newest tokens of requests that run."""
        self._engine.stepper.rows.start_(
            [r.row for r in requests if r.row is not None],
            [(r.last_token, r.num_tokens - 1, r.num_sampled, r.key) for r in requests],
        )

    def _launch(self, scheduler: Scheduler) -> None:
        """One more step of all running requests."""
        stepper, num_rows = self._engine.stepper, scheduler.num_running
        self._place(scheduler)
        if self._are_rows_behind:
            self._start(scheduler.running)
            self._are_rows_behind = False
        indices = scheduler.indices[:num_rows].copy()
        num_keys = int(scheduler.lengths[:num_rows].max())
        self._in_flight.append((stepper.launch(num_rows, num_keys), indices))
        scheduler.advance()
        self._engine.drafter.count(num_rows)

    def _place(self, scheduler: Scheduler) -> None:
        """Let running requests have the first rows, with their pages."""
        rows = self._engine.stepper.rows
        rows.move_(scheduler.compact())
        rows.keep_(scheduler.num_rows)
        if scheduler.is_table_changed:
            rows.write_table_(scheduler.table[: scheduler.num_rows])
            scheduler.is_table_changed = False

    def _draft_room(self, scheduler: Scheduler) -> int:
        """Draft tokens that each request could have in the coming step; 0 = none."""
        room = self._engine.drafter.room(scheduler.num_running)
        return room if room and any(r.group.earlier for r in scheduler.running) else 0

    def _draft(self, scheduler: Scheduler, room: int) -> float:
        """One step of all running requests, with drafts; its tokens are read at once.

        Returns how many tokens a request got on average; 0 if none was left.
        """
        self._drain()  # drafts continue what is known
        self._place(scheduler)
        requests, drafter = scheduler.running, self._engine.drafter
        if not requests:
            return 0.0
        spare = np.minimum(scheduler.spare(), room).tolist()
        drafts = [drafter.draft(r, num) for r, num in zip(requests, spare, strict=True)]
        numbers = pack_drafts(requests, drafts)
        num_keys = 1 + int(numbers[POSITION].max())
        tokens, logprobs = self._engine.stepper.verify(numbers, num_keys)
        self._are_rows_behind = True
        ends = np.cumsum([1 + len(draft) for draft in drafts])
        starts = np.concatenate([[0], ends[:-1]])
        drawn = tokens.tolist()
        parts = [drawn[start:end] for start, end in zip(starts, ends, strict=True)]
        counts = np.array([drafter.accept(*x) for x in zip(requests, drafts, parts, strict=True)])
        drafter.count(len(requests), has_draft=any(drafts))
        indices = scheduler.indices[: len(requests)].copy()
        scheduler.advance(counts)
        for place in range(counts.max()):
            is_in = counts > place
            at = starts[is_in] + place
            self._take(indices[is_in], tokens[at], logprobs[at])
        return float(counts.mean())

    def _drain(self) -> None:
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        """Take over the tokens of the oldest step in flight."""
        step, indices = self._in_flight.popleft()
        self._take(indices, *step())

    def _take(self, indices: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """One more token for each of these rows of the transcript, unless it has ended."""
        transcript, stop = self._transcript, self._engine.stop
        is_late = transcript.is_closed[indices]  # drawn before the end was seen
        if is_late.any():
            indices, tokens, logprobs = indices[~is_late], tokens[~is_late], logprobs[~is_late]
        if not np.isfinite(logprobs).all():
            for index, logprob in zip(indices.tolist(), logprobs.tolist(), strict=True):
                request = self._requests[index]
                check_finite(logprob, request.group.problem, request.num_sampled)
        transcript.append(indices, tokens, logprobs, self._engine.get_version())
        self._engine.drafter.counts.tokens += len(indices)
        has_ended = transcript.counts[indices] == transcript.limits[indices]
        for end in stop.token_ids:
            has_ended |= tokens == end
        # Whether a string ends a completion takes its text.
        may_end = indices if stop.strings else indices[has_ended]
        for index in may_end.tolist():
            self._complete(self._requests[index])

    def _complete(self, request: Request) -> None:
        """Finish a completion if its last token ends it."""
        transcript, stop, row = self._transcript, self._engine.stop, request.index
        finish = stop.finish(transcript.tail(row, stop.tail_length), request.num_left)
        if finish is None:
            return
        group, token_ids = request.group, transcript.token_ids(row)
        group.completions[request.member] = stop.complete(
            token_ids, transcript.logprobs(row), finish, transcript.versions(row)
        )
        del self._requests[row]
        transcript.close(row)
        self._engine.lengths.record(group.problem, len(token_ids))
        if self._scheduler is not None and request.row is not None:
            self._scheduler.leave(request)
        if None not in group.completions:
            self._ready.append(group)
            self._num_open -= len(group.completions)


def pack_drafts(requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> np.ndarray:
    """The numbers [6, N] of `Stepper.verify`: each request's newest token, and its draft behind."""
    sizes = np.array([1 + len(draft) for draft in drafts])
    owner = np.repeat(np.arange(len(requests)), sizes)
    offset = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]
    tokens = [t for r, draft in zip(requests, drafts, strict=True) for t in (r.last_token, *draft)]
    position, counter, key = np.array(
        [(r.num_tokens - 1, r.num_sampled, r.key) for r in requests]
    ).T[:, owner]
    active = np.ones_like(owner)
    return np.stack([tokens, position + offset, counter + offset, key, active, owner])
