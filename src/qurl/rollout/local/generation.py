"""One call's completions in the making: admit, reserve, launch, read, until all have finished.

The host runs behind the device: it launches step n and then reads step n - depth. So a completion's
end is seen `depth` steps late, and what its row sampled meanwhile is dropped.

A generation can be interrupted and resumed at any step. What has been sampled is in the transcript;
everything else (pages, rows, steps in flight) can be made again from it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from qurl.errors import EngineError
from qurl.rollout.checks import check_finite
from qurl.rollout.local.graphs import Step
from qurl.rollout.local.requests import Group, Request, Transcript
from qurl.rollout.local.scheduler import Scheduler
from qurl.rollout.sampler import request_key
from qurl.rollout.stop import StopRule
from qurl.types import Completion, Problem, Rollout, SamplingParams

if TYPE_CHECKING:
    from qurl.rollout.local.engine import LocalEngine

REPORT_SECONDS = 0.5
"""Between two calls of `on_progress`."""


class Generation:
    """`params.group_size` completions of each problem, sampled step by step."""

    def __init__(
        self,
        engine: LocalEngine,
        problems: Sequence[Problem],
        params: SamplingParams,
        stop: StopRule,
    ) -> None:
        self.problems = list(problems)
        self.params = params
        self._engine = engine
        self._stop = stop
        num_requests = len(self.problems) * params.group_size
        self._transcript = Transcript(num_requests, params.max_tokens)
        self._completions: list[Completion | None] = [None] * num_requests
        self._is_complete = np.zeros(num_requests, bool)
        self._is_end = np.zeros(engine.vocabulary, bool)
        self._is_end[[i for i in stop.token_ids if 0 <= i < engine.vocabulary]] = True
        self._order = list(range(len(self.problems)))
        if num_requests > engine.max_batch:
            self._order = engine.lengths.order(self.problems)
        self._requests: dict[int, Request] = {}
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self._is_running = False
        self._is_interrupted = False
        self._next_report = 0.0

    @property
    def num_completions(self) -> int:
        """Finished ones."""
        return int(self._is_complete.sum())

    @property
    def num_tokens(self) -> int:
        """Sampled so far, those of unfinished completions included."""
        return int(self._transcript.counts.sum())

    @property
    def is_finished(self) -> bool:
        return bool(self._is_complete.all())

    @property
    def finished(self) -> list[Rollout]:
        """Of the problems all of whose completions have finished, in the order of the problems."""
        size = self.params.group_size
        firsts = (i * size for i in range(len(self.problems)))
        return [self._rollout(i) for i in firsts if self._is_complete[i : i + size].all()]

    def rollouts(self) -> list[Rollout]:
        """All of them, in the order of the problems.

        A rollout's version is the oldest that sampled any of its tokens: a generation that was
        resumed after a sync has gone on with the new weights.
        """
        if not self.is_finished:
            missing = len(self._completions) - self.num_completions
            raise EngineError(
                f"{missing} of {len(self._completions)} completions are unfinished; call run() "
                "until it returns True"
            )
        return self.finished

    @torch.no_grad()
    def run(self, max_steps: int | None = None) -> bool:
        """Go on, for at most so many decode steps; whether all completions have finished.

        Any exception, KeyboardInterrupt included, leaves the generation resumable.
        """
        if max_steps is not None and max_steps < 0:
            raise EngineError(f"max_steps = {max_steps} must be at least 0, or None for no limit")
        self._refuse_while_running()
        try:
            if not self.is_finished:
                self._acquire()
                self._is_running = True
                self._loop(max_steps)
            self._report(is_last=True)
        except BaseException:
            self._forget()
            raise
        finally:
            self._is_running = self._is_interrupted = False
        if self.is_finished:
            self.release()
        return self.is_finished

    def interrupt(self) -> None:
        """Make `run` return after the steps in flight; nothing that was sampled is lost.

        May be called from a signal handler, a callback or another thread. Without a run under way
        it stops the next one.
        """
        self._is_interrupted = True

    def release(self) -> None:
        """Give pages and memory back. A later `run` computes keys and values again."""
        self._refuse_while_running()
        self._forget()
        self._engine.take_back(self)

    @property
    def longest_problem(self) -> Problem:
        """The one whose requests need the most pages."""
        return max(self.problems, key=lambda p: len(p.prompt_ids))

    def _loop(self, max_steps: int | None) -> None:
        scheduler, depth, num_steps = self._scheduler, self._engine.depth, 0
        assert scheduler is not None
        while scheduler.has_work and num_steps != max_steps and not self._is_interrupted:
            self._admit(scheduler)
            self._reserve(scheduler)
            if scheduler.num_running:
                self._launch(scheduler)
                num_steps += 1
            while len(self._in_flight) > depth:
                self._read()
            self._report()
        self._drain()

    def _admit(self, scheduler: Scheduler) -> None:
        """Let waiting requests join, with their keys and values in the cache."""
        admission = scheduler.admit()
        if not admission.started:
            return
        actor, rows = self._engine.stepper.actor, self._engine.stepper.rows
        actor.prefill(admission.prefills)
        for saved, pages in admission.restores:
            actor.cache.restore_(saved, pages)
        actor.cache.copy_(admission.copies)
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
        self._engine.num_steps += 1
        scheduler.advance()

    def _drain(self) -> None:
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        """Take over the tokens of the oldest step in flight."""
        step, indices = self._in_flight.popleft()
        tokens, logprobs = self._engine.stepper.read(step)
        is_late = self._is_complete[indices]  # launched before the end was seen
        if is_late.any():
            indices, tokens, logprobs = indices[~is_late], tokens[~is_late], logprobs[~is_late]
        self._check_finite(indices, logprobs)
        self._transcript.append(indices, tokens, logprobs, self._engine.version)
        counts = self._transcript.counts[indices]
        has_ended = self._is_end[tokens] | (counts == self.params.max_tokens)
        # Whether a string ends a completion takes its text.
        may_end = indices if self._stop.strings else indices[has_ended]
        for index in may_end.tolist():
            self._complete(index)

    def _check_finite(self, indices: np.ndarray, logprobs: np.ndarray) -> None:
        is_bad = ~np.isfinite(logprobs)
        if is_bad.any():
            index, logprob = int(indices[is_bad][0]), float(logprobs[is_bad][0])
            problem = self.problems[index // self.params.group_size]
            check_finite(logprob, problem, int(self._transcript.counts[index]))

    def _complete(self, index: int) -> None:
        """Finish a completion if its last token ends it."""
        tail = self._transcript.tail(index, self._stop.tail_length)
        finish = self._stop.finish(tail, int(self._transcript.counts[index]))
        if finish is None:
            return
        token_ids, logprobs = self._transcript.token_ids(index), self._transcript.logprobs(index)
        self._completions[index] = self._stop.complete(token_ids, logprobs, finish)
        self._is_complete[index] = True
        problem = self.problems[index // self.params.group_size]
        self._engine.lengths.record(problem, len(token_ids))
        request = self._requests.get(index)
        if self._scheduler is not None and request is not None and request.row is not None:
            self._scheduler.leave(request)

    def _acquire(self) -> None:
        """Pages and rows for the unfinished requests, unless they still have theirs."""
        if self._scheduler is not None:
            return
        for index in np.flatnonzero(~self._is_complete & (self._transcript.counts > 0)).tolist():
            self._complete(index)  # where an exception came between a token and its consequences
        pool = self._engine.lend(self)
        save = self._engine.stepper.actor.cache.save if self._engine.deterministic else None
        requests = self._make_requests()
        self._requests = {r.index: r for r in requests}
        self._scheduler = Scheduler(
            requests, pool, self._engine.max_batch, patience=self._engine.patience, save=save
        )

    def _make_requests(self) -> list[Request]:
        """The unfinished ones, problem by problem, longest expected first."""
        size, seed = self.params.group_size, self.params.seed
        requests = []
        for i in self._order:
            problem, first = self.problems[i], i * size
            members = [j for j in range(first, first + size) if not self._is_complete[j]]
            is_new = {j: self._transcript.counts[j] == 0 for j in members}
            group = Group(num_unadmitted=sum(is_new.values()))
            for j in members:
                key = request_key(seed, problem.id, j - first)
                requests.append(Request(j, problem, group, key, self._transcript, bool(is_new[j])))
        return requests

    def _refuse_while_running(self) -> None:
        """A callback, or another thread, must not pull the pages away under a step."""
        if self._is_running:
            raise EngineError(
                "sync, generate, start, run and release cannot be called while a generation runs, "
                "as from on_progress; call its interrupt(), and go on when run() has returned"
            )

    def _forget(self) -> None:
        """Drop pages, rows and steps in flight, all of which the transcript can bring back."""
        if self._scheduler is not None:
            self._engine.num_preemptions += self._scheduler.num_preemptions
        self._scheduler = None
        self._requests = {}
        self._in_flight.clear()

    def _rollout(self, first: int) -> Rollout:
        size = self.params.group_size
        completions = [c for c in self._completions[first : first + size] if c is not None]
        version = int(self._transcript.versions[first : first + size].min())
        return Rollout(self.problems[first // size], completions, version, self.params.temperature)

    def _report(self, *, is_last: bool = False) -> None:
        if self._engine.on_progress and (is_last or time.monotonic() >= self._next_report):
            self._next_report = time.monotonic() + REPORT_SECONDS
            self._engine.on_progress(self.num_completions, self.num_tokens)
