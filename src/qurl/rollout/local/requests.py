"""Requests, what has been sampled for them, and how long they may become."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from qurl.rollout.engine import Asked
from qurl.rollout.local.patterns import PatternIndex
from qurl.types import Completion, Problem, TokenIds

FIRST_WINDOW = 2
"""Draft tokens of a request at its start, and the fewest that are worth a step with drafts."""
MOST_LENGTHS = 2**18
"""Problems whose lengths are remembered."""


class Transcript:
    """What has been sampled so far: one row per unfinished completion."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_rows = 0
        self.counts = np.zeros(0, np.int64)
        self.limits = np.zeros(0, np.int64)
        """Most tokens of each row, `max_tokens` at first."""
        self.is_closed = np.zeros(0, bool)
        self._token_ids = np.zeros((0, max_tokens), np.int32)
        self._logprobs = np.zeros((0, max_tokens), np.float32)
        self._versions = np.zeros((0, max_tokens), np.int32)
        self._closed: deque[int] = deque()

    def open(self, count: int, busy: Container[int]) -> list[int]:
        """Empty rows: closed ones, the oldest first, up to one in `busy`; then new ones."""
        rows: list[int] = []
        while len(rows) < count and self._closed and self._closed[0] not in busy:
            rows.append(self._closed.popleft())
        self.counts[rows], self.is_closed[rows] = 0, False
        first, self.num_rows = self.num_rows, self.num_rows + count - len(rows)
        if self.num_rows > len(self.counts):
            length = max(self.num_rows, 2 * len(self.counts))
            for name in ("counts", "limits", "is_closed", "_token_ids", "_logprobs", "_versions"):
                old = getattr(self, name)
                # Memory is mapped when it is first used, so the zeros cost nothing.
                longer = np.zeros((length, *old.shape[1:]), old.dtype)
                longer[:first] = old[:first]
                setattr(self, name, longer)
        rows += range(first, self.num_rows)
        self.limits[rows] = self.max_tokens
        return rows

    def close(self, row: int) -> None:
        """The completion is over; another one may use the row."""
        self.is_closed[row] = True
        self._closed.append(row)

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> None:
        """One more token for each of the given rows, sampled by the weights of `version`."""
        at = self.counts[rows]
        self._token_ids[rows, at] = tokens
        self._logprobs[rows, at] = logprobs
        self._versions[rows, at] = version
        self.counts[rows] = at + 1

    def token_ids(self, row: int) -> list[int]:
        return self._token_ids[row, : self.counts[row]].tolist()

    def tail(self, row: int, length: int) -> list[int]:
        """The last `length` tokens, or all if there are fewer."""
        count = self.counts[row]
        return self._token_ids[row, max(count - length, 0) : count].tolist()

    def logprobs(self, row: int) -> list[float]:
        return self._logprobs[row, : self.counts[row]].tolist()

    def versions(self, row: int) -> list[int]:
        return self._versions[row, : self.counts[row]].tolist()


@dataclass(eq=False)
class Group:
    """The requests of one problem, which share the pages of its prompt."""

    problem: Problem
    completions: list[Completion | None]
    num_unadmitted: int
    """Members that were never admitted and have no token of their own."""
    prefix: list[int] = field(default_factory=list)
    """Pages of the prompt, held for these members."""
    earlier: Sequence[TokenIds] = ()
    """Responses of an earlier epoch, for drafts."""
    index: PatternIndex | None = None
    """Made of these responses when the first draft is wanted."""


@dataclass(eq=False)
class Request:
    """One completion in the making."""

    index: int
    """Its row of the transcript."""
    group: Group
    member: int
    key: int
    transcript: Transcript
    is_new: bool = True
    """Never admitted so far, and no token sampled."""
    pages: list[int] = field(default_factory=list)
    row: int | None = None
    """Its row of the decode batch, while it runs."""
    serial: int = 0
    """The newest running request has the largest."""
    saved: Tensor | None = None
    """Keys and values at its preemption, if they are kept."""
    window: int = FIRST_WINDOW
    """Draft tokens that it may have."""

    def reset(self) -> None:
        """Only what was sampled is left. Its group has been reset before."""
        self.pages, self.row, self.saved = [], None, None
        self.is_new = self.num_sampled == 0
        self.group.num_unadmitted += self.is_new

    @property
    def num_sampled(self) -> int:
        return int(self.transcript.counts[self.index])

    @property
    def num_tokens(self) -> int:
        return len(self.group.problem.prompt_ids) + self.num_sampled

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return int(self.transcript.limits[self.index]) - self.num_sampled

    @property
    def last_token(self) -> int:
        return self.tail(1)[0]

    def tail(self, length: int) -> list[int]:
        """The last tokens of prompt and response, or all if there are fewer."""
        sampled = self.transcript.tail(self.index, length)
        missing = length - len(sampled)
        return [*self.group.problem.prompt_ids[-missing:], *sampled] if missing else sampled

    @property
    def cached_tokens(self) -> list[int]:
        """What prefill computes: everything but the last token."""
        return [*self.group.problem.prompt_ids, *self.transcript.token_ids(self.index)][:-1]

    @property
    def most_cached(self) -> int:
        """Tokens in the cache at the end; the last one is never cached."""
        return len(self.group.problem.prompt_ids) + int(self.transcript.limits[self.index]) - 1


class LengthHistory:
    """The longest completion of each problem so far, as a forecast of the next one.

    The later turns of an episode are problems that never come again, so old names are forgotten.
    """

    def __init__(self, most: int = MOST_LENGTHS) -> None:
        self.most = most
        self._longest: OrderedDict[str, int] = OrderedDict()
        """By the name of the problem, the one that was recorded last at the end."""
        self._longest_of_all = 1

    def record(self, problem: Problem, num_tokens: int) -> None:
        longest = self._longest.get(problem.name, 0)
        self._longest[problem.name] = max(num_tokens, longest)
        self._longest.move_to_end(problem.name)
        self._longest_of_all = max(num_tokens, self._longest_of_all)
        if len(self._longest) > self.most:
            self._longest.popitem(last=False)

    def expect(self, problem: Problem) -> int:
        """Tokens of a completion; of an unknown problem, as many as the longest so far."""
        return self._longest.get(problem.name, self._longest_of_all)

    def order(self, asked: Sequence[Asked]) -> list[Asked]:
        """Unknown problems first, then the longest expected: a long one must not start last."""
        return sorted(asked, key=lambda one: -self._longest.get(one.problem.name, math.inf))
