"""Requests, what has been sampled for them, and how long they may become."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from qurl.types import Completion, Problem


class Transcript:
    """What has been sampled so far: one row per completion."""

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Sampled so far, in rows that have been cleared too."""
        self.counts = np.zeros(0, np.int64)
        self.is_complete = np.zeros(0, bool)
        self._token_ids = np.empty((0, max_tokens), np.int32)
        self._logprobs = np.empty((0, max_tokens), np.float32)
        self._starts: list[tuple[int, np.ndarray]] = []
        """(version, counts of all rows when it began) of each version that has sampled."""
        self.reserve(num_rows)

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows."""
        if num_rows > len(self.counts):
            num_rows = max(num_rows, 2 * len(self.counts))
            for name in ("counts", "is_complete", "_token_ids", "_logprobs"):
                setattr(self, name, _lengthen(getattr(self, name), num_rows))

    def clear(self, rows: slice) -> None:
        """Empty rows, to be used again."""
        self.counts[rows], self.is_complete[rows] = 0, False
        for _, counts in self._starts:
            counts[rows] = 0

    def append(
        self, indices: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> None:
        """One more token for each of the given rows."""
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, self.counts.copy()))
            while len(self._starts) > 1 and not self._starts[1][1].any():
                del self._starts[0]  # nothing of it is left
        at = self.counts[indices]
        self._token_ids[indices, at] = tokens
        self._logprobs[indices, at] = logprobs
        self.counts[indices] = at + 1  # last: an interrupted append has not happened
        self.num_tokens += len(indices)

    def token_ids(self, index: int) -> list[int]:
        return self._token_ids[index, : self.counts[index]].tolist()

    def tail(self, index: int, length: int) -> list[int]:
        """The last `length` tokens, or all if there are fewer."""
        count = self.counts[index]
        return self._token_ids[index, max(count - length, 0) : count].tolist()

    def logprobs(self, index: int) -> list[float]:
        return self._logprobs[index, : self.counts[index]].tolist()

    def versions(self, index: int) -> list[int]:
        """Version of the weights that sampled each token."""
        starts = [int(c[index]) if index < len(c) else 0 for _, c in self._starts]
        spans = zip(self._starts, starts, [*starts[1:], self.counts[index]], strict=True)
        return [version for (version, _), start, end in spans for _ in range(start, end)]


@dataclass(eq=False)
class Group:
    """The requests of one problem, which share the pages of its prompt."""

    problem: Problem
    completions: list[Completion | None]
    first: int = -1
    """Its first row of the transcript, once it has any."""
    num_unadmitted: int = 0
    """Members that were never admitted and have no token of their own."""
    prefix: list[int] = field(default_factory=list)
    """Pages of the prompt, held for these members."""

    @property
    def is_complete(self) -> bool:
        return all(c is not None for c in self.completions)


@dataclass(eq=False)
class Request:
    """One completion in the making."""

    index: int
    """Its row of the transcript."""
    group: Group
    key: int
    transcript: Transcript
    is_new: bool = True
    """Never admitted so far, and no token sampled."""
    pages: list[int] = field(default_factory=list)
    row: int | None = None
    """Of the decode batch, while it runs."""
    serial: int = 0
    """The newest running request has the largest."""
    saved: Tensor | None = None
    """Keys and values at its preemption, if they are kept."""

    @property
    def token_ids(self) -> list[int]:
        return self.transcript.token_ids(self.index)

    @property
    def num_sampled(self) -> int:
        return int(self.transcript.counts[self.index])

    @property
    def num_tokens(self) -> int:
        return len(self.group.problem.prompt_ids) + self.num_sampled

    @property
    def last_token(self) -> int:
        sampled = self.transcript.tail(self.index, 1)
        return sampled[0] if sampled else self.group.problem.prompt_ids[-1]

    @property
    def cached_tokens(self) -> list[int]:
        """What prefill computes: everything but the last token."""
        return [*self.group.problem.prompt_ids, *self.token_ids][:-1]

    @property
    def most_cached(self) -> int:
        """Tokens in the cache at the end; the last one is never cached."""
        return len(self.group.problem.prompt_ids) + self.transcript.max_tokens - 1


class LengthHistory:
    """The longest completion of each problem so far, as a forecast of the next one."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def record(self, problem: Problem, num_tokens: int) -> None:
        name = _name(problem)
        self._longest[name] = max(num_tokens, self._longest.get(name, 0))

    def order(self, problems: Sequence[Problem]) -> list[Problem]:
        """Unknown ones first, then the longest expected: a long one must not start last."""
        return sorted(problems, key=lambda p: -self._longest.get(_name(p), math.inf))


def _name(problem: Problem) -> str:
    """The id without the epoch that `qurl.sampling.ProblemStream` appends."""
    return re.sub(r"@\d+$", "", problem.id)


def _lengthen(array: np.ndarray, num_rows: int) -> np.ndarray:
    """More rows. Where zeros matter, they cost nothing: memory is mapped when it is first used."""
    longer = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
