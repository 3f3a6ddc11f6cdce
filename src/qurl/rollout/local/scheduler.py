"""Continuous batching: who decodes now, who waits, and who is preempted when pages run out.

Prefill covers all tokens but the last, and every sampled token comes out of a decode step. So a
prompt is computed once for its group, each member copies only the partly filled page that it will
write to, and a preempted request resumes like a new one with a longer prompt. The scheduler counts
steps when they are launched; the `Transcript` holds what has been read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from qurl.rollout.local.cache import SCRATCH_PAGE, PagePool
from qurl.rollout.local.requests import Request

LOOKAHEAD = 64
"""Tokens ahead for which pages are reserved, so that the page table seldom changes."""
MOST_SAMPLED = 256
"""Slots that are remembered for statistics."""
GPU_PATIENCE = 4.0
"""Estimated cost of a small prefill in decode steps: the host launches its kernels one by one."""


@dataclass(frozen=True)
class Admission:
    """Newly admitted requests, and what to do before they decode, in this order."""

    prefills: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(tokens, pages) each."""
    restores: list[tuple[Tensor, list[int]]] = field(default_factory=list)
    """(saved keys and values, pages) each."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source page, target page) each."""
    started: list[Request] = field(default_factory=list)


class Scheduler:
    """Admits requests in order, as rows of the batch and pages permit.

    A running request keeps its row until `compact`. Per row, `lengths` counts the tokens that are
    cached after the coming step, and `table` [rows, pages] holds its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        max_batch: int,
        *,
        lookahead: int = LOOKAHEAD,
        patience: float = 0.0,
        save: Callable[[list[int]], Tensor] | None = None,
    ) -> None:
        """`save` keeps the pages of a preempted request; without it they are computed again.

        While others run, requests wait until idle rows have cost as much as `patience` steps of the
        whole batch, about the cost of a prefill. Completions that end one by one then do not cause
        prefills one by one.
        """
        self.pool, self.max_batch = pool, max_batch
        self.waiting: deque[Request] = deque()
        self.num_running = self.num_preemptions = 0
        self.is_table_changed = False
        self.table = np.full((max_batch, 0), SCRATCH_PAGE, np.int32)
        numbers = np.zeros((4, max_batch), np.int64)
        self.indices, self.lengths, self._capacities, self._limits = numbers
        self._rows: list[Request | None] = []
        self._serials = itertools.count()
        self._lookahead, self._patience, self._save = lookahead, patience, save
        self._num_idle = 0
        """Rows of launched steps that stayed empty while requests waited."""
        self.sampled_slots: list[int] = []
        """One slot of each request that has left. Later holders of its page only write tokens of
        their own there, so these slots can be looked at when all is over."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.num_running)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def running(self) -> list[Request]:
        """In the order of their rows."""
        return [r for r in self._rows if r is not None]

    def add(self, requests: Sequence[Request]) -> None:
        """Let more requests wait."""
        self.waiting.extend(requests)
        most_pages = max((self.pool.pages_for(r.most_cached) for r in requests), default=0)
        if (missing := most_pages - self.table.shape[1]) > 0:
            self.table = np.pad(self.table, ((0, 0), (0, missing)), constant_values=SCRATCH_PAGE)

    def suspend(self) -> list[Request]:
        """Preempt all that run, and return everybody in the order in which to go on."""
        for request in sorted(self.running, key=lambda r: -r.serial):
            self._preempt(request)
        self._drop_prefixes()
        return list(self.waiting)

    def admit(self) -> Admission:
        """Move requests from waiting to running."""
        admission = Admission()
        if self.num_running and self._num_idle < self._patience * self.max_batch:
            return admission
        while self.waiting and self.num_running < self.max_batch:
            if not self._admit_next(admission):
                break
        if not self.num_running and self.waiting:
            # Alone and still no room: the prefix held for later members does not fit.
            self._drop_prefixes()
            self._admit_alone(self.waiting[0], admission)
        if admission.started:
            self._num_idle = 0
        return admission

    def reserve(self, *, can_preempt: bool = True, num_drafted: int = 0) -> bool:
        """Room for the token of the coming step in every row, and for so many more if there is.

        If pages run out, it preempts the newest requests, or returns False if it may not.
        """
        rows = slice(self.num_rows)
        wanted = np.minimum(self.lengths[rows] + num_drafted, self._limits[rows])
        short = np.flatnonzero(wanted > self._capacities[rows])
        if len(short) == 0:
            return True
        for request in sorted(map(self._at, short), key=lambda r: r.serial):
            while request.row is not None and self._num_missing(request) > 0:
                if self.pool.num_free:
                    self._extend(request, 1)
                elif not (self._drop_prefixes() or self._reclaim()):
                    if not can_preempt:
                        return False
                    assert self.num_running > 1, "a single request fits: the engine has checked"
                    self._preempt(max(self.running, key=lambda r: r.serial))
        self._look_ahead()
        return True

    def spare(self) -> np.ndarray:
        """Tokens of each row, beyond that of the coming step, that its pages have room for."""
        return self._capacities[: self.num_rows] - self.lengths[: self.num_rows]

    def compact(self) -> list[tuple[int, int]]:
        """Close the gaps between rows: (source row, target row) of each request that moves."""
        if self.num_running == self.num_rows:
            return []
        gaps = [row for row in range(self.num_running) if self._rows[row] is None]
        beyond = [row for row in range(self.num_running, self.num_rows) if self._rows[row]]
        moves = list(zip(beyond, gaps, strict=True))
        for source, target in moves:
            request = self._at(source)
            self._rows[target], request.row = request, target
            for array in (self.indices, self.lengths, self._capacities, self._limits, self.table):
                array[target] = array[source]
            self._empty(source)
        del self._rows[self.num_running :]
        return moves

    def advance(self, num_tokens: int | np.ndarray = 1) -> None:
        """Count a launched step, which gives each row so many tokens.

        Requests that reach their longest length leave the batch.
        """
        if self.waiting:
            self._num_idle += self.max_batch - self.num_running
        lengths = self.lengths[: self.num_rows]
        lengths += num_tokens
        for row in np.flatnonzero(lengths > self._limits[: self.num_rows]):
            self.leave(self._at(row))

    def leave(self, request: Request) -> None:
        """Take a running request out of the batch and free its pages.

        A step in flight may still write to them. Their next holder writes later in the same stream
        and reads only what it wrote.
        """
        assert request.row is not None
        num_cached = int(self.lengths[request.row]) - 1
        if num_cached and len(self.sampled_slots) < MOST_SAMPLED:
            page, offset = divmod(request.key % num_cached, self.pool.page_size)
            self.sampled_slots.append(request.pages[page] * self.pool.page_size + offset)
        self._empty(request.row)
        self.num_running -= 1
        self.pool.release(request.pages)
        request.row, request.pages = None, []

    def _admit_next(self, admission: Admission) -> bool:
        request = self.waiting[0]
        group, pool = request.group, self.pool
        is_shared = request.is_new and (bool(group.prefix) or group.num_unadmitted > 1)
        num_prompt = request.num_tokens - 1
        if not is_shared or num_prompt == 0:
            if has_room := self._has_room(pool.pages_for(request.num_tokens)):
                self._admit_alone(request, admission)
            return has_room
        num_prefix = pool.pages_for(num_prompt)
        num_full = num_prompt // pool.page_size
        num_own = pool.pages_for(request.num_tokens) - num_full
        is_last = group.num_unadmitted == 1
        wanted = num_own - (num_prefix - num_full) * is_last + num_prefix * (not group.prefix)
        if not self._has_room(wanted):
            return False
        if not group.prefix:
            group.prefix = pool.allocate(num_prefix)
            admission.prefills.append((request.cached_tokens, group.prefix))
        if is_last:
            # The last member takes the prefix over, including its partly filled page.
            request.pages, group.prefix = group.prefix, []
            request.pages += pool.allocate(wanted)
        else:
            own = pool.allocate(num_own)
            request.pages = pool.share(group.prefix[:num_full]) + own
            if num_prefix > num_full:
                admission.copies.append((group.prefix[-1], own[0]))
        self._start(request, admission)
        return True

    def _admit_alone(self, request: Request, admission: Admission) -> None:
        """Admit a request that shares no page."""
        request.pages = self.pool.allocate(self.pool.pages_for(request.num_tokens))
        if request.saved is not None:
            admission.restores.append((request.saved, request.pages[: request.saved.shape[2]]))
            request.saved = None
        elif request.num_tokens > 1:
            admission.prefills.append((request.cached_tokens, request.pages))
        self._start(request, admission)

    def _start(self, request: Request, admission: Admission) -> None:
        assert self.waiting.popleft() is request
        if self.num_running == self.num_rows:
            self._rows.append(None)
        row = self._rows.index(None)
        self._rows[row], request.row, request.serial = request, row, next(self._serials)
        self.num_running += 1
        request.group.num_unadmitted -= request.is_new
        request.is_new = False
        self.indices[row] = request.index
        self.lengths[row] = request.num_tokens
        self._limits[row] = request.most_cached
        self._write_pages(request)
        admission.started.append(request)

    def _has_room(self, num_pages: int) -> bool:
        """Whether a free page remains for each running request: else it would soon preempt."""
        return self.pool.num_free >= num_pages + self.num_running

    def _num_missing(self, request: Request) -> int:
        """Pages that the request lacks for the coming step; negative if it has some in reserve."""
        assert request.row is not None
        return self.pool.pages_for(int(self.lengths[request.row])) - len(request.pages)

    def _extend(self, request: Request, num_pages: int) -> None:
        request.pages += self.pool.allocate(num_pages)
        self._write_pages(request)

    def _look_ahead(self) -> None:
        """Reserve pages for some more tokens, if enough remain for newcomers."""
        rows, page_size = slice(self.num_rows), self.pool.page_size
        lengths = np.minimum(self.lengths[rows] + self._lookahead, self._limits[rows])
        missing = -(-lengths // page_size) - self._capacities[rows] // page_size
        short = np.flatnonzero(missing > 0)
        if self._has_room(int(missing[short].sum())):
            for row in short:
                self._extend(self._at(row), int(missing[row]))

    def _reclaim(self) -> bool:
        """Free the pages that were reserved ahead; whether there were any."""
        before = self.pool.num_free
        for request in self.running:
            if (surplus := -self._num_missing(request)) > 0:
                self.pool.release(request.pages[-surplus:])
                del request.pages[-surplus:]
                self._write_pages(request)
        return self.pool.num_free > before

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; tokens are kept, keys and values saved or recomputed."""
        num_cached = request.num_tokens - 1
        if self._save is not None and num_cached > 0:
            request.saved = self._save(request.pages[: self.pool.pages_for(num_cached)])
        self.leave(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _write_pages(self, request: Request) -> None:
        row, pages = request.row, request.pages
        assert row is not None
        self.table[row, : len(pages)] = pages
        self.table[row, len(pages) :] = SCRATCH_PAGE
        self._capacities[row] = len(pages) * self.pool.page_size
        self.is_table_changed = True

    def _at(self, row: int) -> Request:
        request = self._rows[row]
        assert request is not None, "a gap"
        return request

    def _empty(self, row: int) -> None:
        self._rows[row] = None
        self.lengths[row] = self._capacities[row] = self._limits[row] = 0
        self.table[row] = SCRATCH_PAGE
        self.is_table_changed = True

    def _drop_prefixes(self) -> bool:
        """Give up prompts held for waiting members; whether that freed a page."""
        before = self.pool.num_free
        for group in dict.fromkeys(request.group for request in self.waiting):
            self.pool.release(group.prefix)
            group.prefix = []
        return self.pool.num_free > before
