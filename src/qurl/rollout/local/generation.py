"""Completions in the making: admit, reserve, launch, read, until all have finished.

The host runs behind the device: it launches step n and then reads step n - depth. So it sees the
end of a completion `depth` steps late, and drops what that row has sampled meanwhile.

A generation can be interrupted and resumed at any step. What has been sampled is in the transcript;
everything else (pages, rows, steps in flight) can be made again from it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qurl.errors import EngineError
from qurl.rollout.checks import check_finite
from qurl.rollout.local.cache import PagePool
from qurl.rollout.local.graphs import Step, Stepper
from qurl.rollout.local.requests import Group, LengthHistory, Request, Transcript
from qurl.rollout.local.scheduler import Scheduler
from qurl.rollout.sampler import request_key
from qurl.rollout.stop import StopRule
from qurl.types import Problem, Rollout, SamplingParams

REPORT_SECONDS = 0.5
"""Between two calls of `on_progress`."""


@dataclass(frozen=True)
class Resources:
    """What a generation borrows from its engine."""

    stepper: Stepper
    stop: StopRule
    lengths: LengthHistory
    vocabulary: int
    max_batch: int
    patience: float
    """How long requests wait for company; see `Scheduler`."""
    saves_pages: bool
    """Save the pages of a preempted request instead of computing them again."""
    check: Callable[[Sequence[Problem]], None]
    """Raises for a problem that cannot be sampled."""
    acquire: Callable[[Generation, Problem, int], PagePool]
    """Pages for so many sequences, each as long as this problem's may become."""
    release: Callable[[Generation], None]
    get_version: Callable[[], int]
    report: Callable[[int, int], None]
    """Told the number of completions and of tokens now and then, and at the end."""
    count_preemptions: Callable[[int], None]


class Generation:
    """A stream of rollouts, `params.group_size` completions each, sampled step by step."""

    def __init__(self, params: SamplingParams, resources: Resources) -> None:
        self.params = params
        self.num_completions = 0
        """Finished ones."""
        self._engine = resources
        self._submitted: deque[Group] = deque()
        self._open: dict[int, Group] = {}
        """Unfinished groups by their first row of the transcript, in the order of admission."""
        self._ready: deque[Group] = deque()
        """Finished groups that have not been handed out."""
        self._free: deque[int] = deque()
        """First rows of groups that have been handed out."""
        self._num_rows = 0
        self._transcript = Transcript(0, params.max_tokens)
        self._is_end = np.zeros(resources.vocabulary, bool)
        ends = [i for i in resources.stop.token_ids if 0 <= i < resources.vocabulary]
        self._is_end[ends] = True
        self._requests: dict[int, Request] = {}
        self._scheduler: Scheduler | None = None
        self._longest = self._num_sequences = 0
        """Of a prompt, and of the batch, that the pages were acquired for."""
        self._in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self._is_running = False
        self._is_interrupted = False
        self._next_report = 0.0

    @property
    def num_tokens(self) -> int:
        """Sampled so far, those of unfinished completions included."""
        return self._transcript.num_tokens

    @property
    def is_finished(self) -> bool:
        return not self._open and not self._submitted

    def submit(self, problems: Sequence[Problem]) -> None:
        """Ask for completions of more problems; also while the generation runs."""
        self._engine.check(problems)
        num_groups = len(problems) + len(self._submitted) + len(self._open)
        if num_groups * self.params.group_size > self._engine.max_batch:
            problems = self._engine.lengths.order(problems)
        self._submitted.extend([Group(p, [None] * self.params.group_size) for p in problems])

    def __iter__(self) -> Iterator[Rollout]:
        """Rollouts as they finish. `interrupt` ends the loop early, and another one resumes."""
        is_interrupted = False
        while True:
            while self._ready:
                yield self._hand_out()
            if is_interrupted or self.is_finished:
                return
            is_interrupted = self._run(until_rollout=True)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._submitted.clear()
        self._open.clear()

    def run(self, max_steps: int | None = None) -> bool:
        """Go on, for at most so many decode steps; whether all completions have finished.

        Any exception, KeyboardInterrupt included, leaves the generation resumable.
        """
        if max_steps is not None and max_steps < 0:
            raise EngineError(f"max_steps = {max_steps} must be at least 0, or None for no limit")
        self._run(max_steps)
        return self.is_finished

    def interrupt(self) -> None:
        """Stop after the steps in flight; nothing that was sampled is lost.

        May be called from a signal handler, a callback or another thread. An idle generation stops
        when it is next run.
        """
        self._is_interrupted = True

    def release(self) -> None:
        """Give pages and memory back. When it goes on, keys and values are computed again."""
        self._refuse_while_running()
        self._forget()
        self._engine.release(self)

    @torch.no_grad()
    def _run(self, max_steps: int | None = None, *, until_rollout: bool = False) -> bool:
        """Go on until all is finished or a limit is reached; whether it was interrupted."""
        self._refuse_while_running()
        self._is_running = True
        try:
            if self._scheduler is None:
                self._catch_up()
            if not self.is_finished:
                self._loop(max_steps, until_rollout)
            is_interrupted = self._is_interrupted
            if is_interrupted or self.is_finished or not until_rollout:
                self._report(is_last=True)
        except BaseException:
            self._forget()
            raise
        finally:
            self._is_running = self._is_interrupted = False
        if self.is_finished:
            self.release()
        return is_interrupted

    def _loop(self, max_steps: int | None, until_rollout: bool) -> None:
        num_steps = 0
        while num_steps != max_steps and not self._is_interrupted:
            scheduler = self._prepare()
            if not scheduler.has_work:
                break
            self._admit(scheduler)
            self._reserve(scheduler)
            if scheduler.num_running:
                self._launch(scheduler)
                num_steps += 1
            while len(self._in_flight) > self._engine.stepper.depth:
                self._read()
            self._report()
            if until_rollout and self._ready:
                return  # the device goes on with the steps in flight
        self._drain()

    def _prepare(self) -> Scheduler:
        """A scheduler that knows all requests, and pages for them."""
        scheduler = self._scheduler
        if scheduler is not None and not self._submitted:
            return scheduler
        fresh = self._take_in()
        if scheduler is None:
            return self._acquire(self._make_requests(self._open.values()))
        requests = self._make_requests(fresh)
        longest = max(len(g.problem.prompt_ids) for g in fresh)
        if longest <= self._longest and self._most_sequences() <= self._num_sequences:
            self._requests |= {r.index: r for r in requests}
            scheduler.add(requests)
            return scheduler
        self._drain()
        requests = [*scheduler.suspend(), *requests]
        self._forget()
        return self._acquire(requests)

    def _take_in(self) -> list[Group]:
        """Give submitted groups their rows of the transcript."""
        size, fresh = self.params.group_size, []
        busy = {i - i % size for _, indices in self._in_flight for i in indices.tolist()}
        while self._submitted:
            group = self._submitted[0]
            if group.first < 0 and self._free and self._free[0] not in busy:
                group.first = self._free.popleft()
                self._transcript.clear(slice(group.first, group.first + size))
            elif group.first < 0:
                group.first, self._num_rows = self._num_rows, self._num_rows + size
            self._open[group.first] = group
            fresh.append(group)
            self._submitted.popleft()
        return fresh

    def _catch_up(self) -> None:
        """Finish what an exception has kept from finishing: its last token is in the transcript."""
        unfinished = ~self._transcript.is_complete & (self._transcript.counts > 0)
        for index in np.flatnonzero(unfinished).tolist():
            self._complete(index)
        for group in [g for g in self._open.values() if g.is_complete]:
            self._close(group)

    def _make_requests(self, groups: Iterable[Group]) -> list[Request]:
        """The unfinished ones, group by group."""
        self._transcript.reserve(self._num_rows)
        requests, counts = [], self._transcript.counts
        for group in groups:
            members = [g for g, c in enumerate(group.completions) if c is None]
            is_new = [bool(counts[group.first + member] == 0) for member in members]
            group.num_unadmitted, group.prefix = sum(is_new), []
            for member, new in zip(members, is_new, strict=True):
                key = request_key(self.params.seed, group.problem.id, member)
                requests.append(Request(group.first + member, group, key, self._transcript, new))
        return requests

    def _acquire(self, requests: list[Request]) -> Scheduler:
        """Pages for all requests, and rows for as many as can run at once."""
        engine, num_sequences = self._engine, self._most_sequences()
        if num_sequences > self._num_sequences:  # twice as many, lest it grow again soon
            num_sequences = max(num_sequences, min(2 * self._num_sequences, engine.max_batch))
        problem = max((r.group.problem for r in requests), key=lambda p: len(p.prompt_ids))
        pool = engine.acquire(self, problem, num_sequences)
        self._longest, self._num_sequences = len(problem.prompt_ids), num_sequences
        self._requests = {r.index: r for r in requests}
        save = engine.stepper.decoder.cache.save if engine.saves_pages else None
        self._scheduler = Scheduler(
            requests, pool, engine.max_batch, patience=engine.patience, save=save
        )
        return self._scheduler

    def _most_sequences(self) -> int:
        """Requests that could run at once."""
        return min(len(self._open) * self.params.group_size, self._engine.max_batch)

    def _admit(self, scheduler: Scheduler) -> None:
        """Let waiting requests join, with their keys and values in the cache."""
        admission = scheduler.admit()
        if not admission.started:
            return
        decoder, rows = self._engine.stepper.decoder, self._engine.stepper.rows
        decoder.prefill(admission.prefills)
        for saved, pages in admission.restores:
            decoder.cache.restore_(saved, pages)
        decoder.cache.copy_(admission.copies)
        rows.start_(
            [r.row for r in admission.started if r.row is not None],
            [(r.last_token, r.num_tokens - 1, r.num_sampled, r.key) for r in admission.started],
        )

    def _reserve(self, scheduler: Scheduler) -> None:
        """Pages for the coming step."""
        if not scheduler.reserve(can_preempt=not self._in_flight):
            self._drain()  # a request cannot be preempted before all of its tokens are known
            scheduler.reserve()

    def _launch(self, scheduler: Scheduler) -> None:
        """One more step of all running requests."""
        stepper = self._engine.stepper
        stepper.rows.move_(scheduler.compact())
        stepper.rows.keep_(scheduler.num_rows)
        if scheduler.is_table_changed:
            stepper.rows.write_table_(scheduler.table[: scheduler.num_rows])
            scheduler.is_table_changed = False
        indices = scheduler.indices[: scheduler.num_rows].copy()
        num_keys = int(scheduler.lengths[: scheduler.num_rows].max())
        self._in_flight.append((stepper.launch(scheduler.num_rows, num_keys), indices))
        scheduler.advance()

    def _drain(self) -> None:
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        """Take over the tokens of the oldest step in flight."""
        step, indices = self._in_flight.popleft()
        tokens, logprobs = self._engine.stepper.read(step)
        is_late = self._transcript.is_complete[indices]  # launched before the end was seen
        if is_late.any():
            indices, tokens, logprobs = indices[~is_late], tokens[~is_late], logprobs[~is_late]
        if not np.isfinite(logprobs).all():
            for index, logprob in zip(indices.tolist(), logprobs.tolist(), strict=True):
                position = int(self._transcript.counts[index])
                check_finite(logprob, self._group_of(index).problem, position)
        self._transcript.append(indices, tokens, logprobs, self._engine.get_version())
        counts = self._transcript.counts[indices]
        has_ended = self._is_end[tokens] | (counts == self.params.max_tokens)
        # Whether a string ends a completion takes its text.
        may_end = indices if self._engine.stop.strings else indices[has_ended]
        for index in may_end.tolist():
            self._complete(index)

    def _group_of(self, index: int) -> Group:
        return self._open[index - index % self.params.group_size]

    def _complete(self, index: int) -> None:
        """Finish a completion if its last token ends it."""
        transcript, stop = self._transcript, self._engine.stop
        tail = transcript.tail(index, stop.tail_length)
        finish = stop.finish(tail, int(transcript.counts[index]))
        if finish is None:
            return
        group, token_ids = self._group_of(index), transcript.token_ids(index)
        group.completions[index - group.first] = stop.complete(
            token_ids, transcript.logprobs(index), finish, transcript.versions(index)
        )
        transcript.is_complete[index] = True
        self.num_completions += 1
        self._engine.lengths.record(group.problem, len(token_ids))
        request = self._requests.pop(index, None)
        if self._scheduler is not None and request is not None and request.row is not None:
            self._scheduler.leave(request)
        if group.is_complete:
            self._close(group)

    def _close(self, group: Group) -> None:
        if group not in self._ready:
            self._ready.append(group)
        self._open.pop(group.first, None)

    def _hand_out(self) -> Rollout:
        group = self._ready.popleft()
        self._open.pop(group.first, None)
        self._free.append(group.first)
        completions = [c for c in group.completions if c is not None]
        version = min(v for c in completions for v in c.versions)
        return Rollout(group.problem, completions, version, self.params.temperature)

    def _refuse_while_running(self) -> None:
        """A callback, or another thread, must not pull the pages away under a step."""
        if self._is_running:
            raise EngineError(
                "sync, generate, run and release cannot be called while a generation runs, as from "
                "on_progress; call its interrupt(), and go on when it has stopped"
            )

    def _forget(self) -> None:
        """Drop pages, rows and steps in flight, all of which the transcript can bring back."""
        if self._scheduler is not None:
            self._engine.count_preemptions(self._scheduler.num_preemptions)
        self._scheduler = None
        self._requests = {}
        self._in_flight.clear()

    def _report(self, *, is_last: bool = False) -> None:
        if is_last or time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + REPORT_SECONDS
            self._engine.report(self.num_completions, self.num_tokens)
