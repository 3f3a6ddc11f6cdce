"""Continuous batching: who decodes now, who waits, and whose pages are taken when they run out.

A request's last token is never in the cache before it is decoded: prefill covers all tokens but
the last, and every sampled token, the first included, comes out of a decode step. So a prompt is
computed once for its whole group, each member starts by copying only the partly filled page that it
will write to, and a preempted request resumes like a new one with a longer prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from qurl.rollout.local.cache import PagePool
from qurl.types import Problem


@dataclass(eq=False)
class Group:
    """Requests with the same prompt."""

    num_unadmitted: int
    prefix: list[int] = field(default_factory=list)
    """Pages of the prompt, held for members that are yet to come."""


@dataclass(eq=False)
class Request:
    """One completion in the making."""

    problem: Problem
    group: Group
    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    pages: list[int] = field(default_factory=list)
    is_new: bool = True
    """Never admitted so far."""

    @property
    def num_tokens(self) -> int:
        return len(self.problem.prompt_ids) + len(self.token_ids)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.problem.prompt_ids[-1]

    @property
    def cached_tokens(self) -> list[int]:
        """What prefill computes: everything but the last token."""
        return [*self.problem.prompt_ids, *self.token_ids][:-1]


@dataclass(frozen=True)
class Admission:
    """Work to do before newly admitted requests decode: prefill first, then copy pages."""

    prefills: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(tokens, pages) each."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source page, target page) each."""


class Scheduler:
    """Admits requests in order, as batch slots and pages permit."""

    def __init__(self, requests: Iterable[Request], pool: PagePool, max_batch: int) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> Admission:
        """Move requests from waiting to running."""
        admission = Admission()
        while self.waiting and len(self.running) < self.max_batch:
            if not self._admit_next(admission):
                break
        if not self.running and self.waiting:
            # Alone and still no room: holding a prefix for later members is what does not fit.
            self._drop_prefixes()
            self._admit_alone(self.waiting[0], admission)
        return admission

    def reserve(self) -> list[Request]:
        """The running requests, each with room for its last token; preempts when pages run out."""
        for request in list(self.running):
            while self._missing_pages(request) and request in self.running:
                if self.pool.num_free:
                    request.pages += self.pool.allocate(1)
                elif not self._drop_prefixes():
                    self._preempt(self.running[-1])
        return self.running

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)

    def _admit_next(self, admission: Admission) -> bool:
        request = self.waiting[0]
        group, pool = request.group, self.pool
        is_shared = request.is_new and (bool(group.prefix) or group.num_unadmitted > 1)
        num_prompt = request.num_tokens - 1
        if not is_shared or num_prompt == 0:
            if not self._has_room(pool.pages_for(request.num_tokens)):
                return False
            self._admit_alone(request, admission)
            return True
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
            # No further use for the prefix: the last member takes it over, partly filled page too.
            request.pages, group.prefix = group.prefix, []
            request.pages += pool.allocate(wanted)
        else:
            own = pool.allocate(num_own)
            request.pages = pool.share(group.prefix[:num_full]) + own
            if num_prefix > num_full:
                admission.copies.append((group.prefix[-1], own[0]))
        self._start(request)
        return True

    def _admit_alone(self, request: Request, admission: Admission) -> None:
        """With pages of its own for everything."""
        request.pages = self.pool.allocate(self.pool.pages_for(request.num_tokens))
        if request.num_tokens > 1:
            admission.prefills.append((request.cached_tokens, request.pages))
        self._start(request)

    def _start(self, request: Request) -> None:
        assert self.waiting.popleft() is request
        self.running.append(request)
        request.group.num_unadmitted -= request.is_new
        request.is_new = False

    def _has_room(self, num_pages: int) -> bool:
        """Leaves a free page to each running request, or the newcomer would soon be preempted."""
        return self.pool.num_free >= num_pages + len(self.running)

    def _missing_pages(self, request: Request) -> bool:
        return self.pool.pages_for(request.num_tokens) > len(request.pages)

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; tokens are kept, keys and values computed again."""
        assert len(self.running) > 1, "a single request fits: the engine has checked"
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []

    def _drop_prefixes(self) -> bool:
        """Give up prompts held for members still waiting; whether that freed a page."""
        before = self.pool.num_free
        for group in dict.fromkeys(request.group for request in self.waiting):
            self.pool.release(group.prefix)
            group.prefix = []
        return self.pool.num_free > before
