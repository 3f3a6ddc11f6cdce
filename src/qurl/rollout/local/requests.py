"""Requests, what has been sampled for them, and how long they may become."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from qurl.types import Problem


class Transcript:
    """What has been sampled so far: one row per completion, in the order of the results."""

    def __init__(self, num_requests: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.counts = np.zeros(num_requests, np.int64)
        self.versions = np.zeros(num_requests, np.int64)
        """Of the weights that sampled the first token."""
        self._token_ids = np.empty((num_requests, max_tokens), np.int32)
        self._logprobs = np.empty((num_requests, max_tokens), np.float32)

    def append(
        self, indices: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> None:
        """One more token for each of the given requests."""
        at = self.counts[indices]
        self._token_ids[indices, at] = tokens
        self._logprobs[indices, at] = logprobs
        self.versions[indices[at == 0]] = version
        self.counts[indices] = at + 1  # last: an interrupted append has not happened

    def token_ids(self, index: int) -> list[int]:
        return self._token_ids[index, : self.counts[index]].tolist()

    def tail(self, index: int, length: int) -> list[int]:
        """The last `length` tokens, or all where there are fewer."""
        count = self.counts[index]
        return self._token_ids[index, max(count - length, 0) : count].tolist()

    def logprobs(self, index: int) -> list[float]:
        return self._logprobs[index, : self.counts[index]].tolist()


@dataclass(eq=False)
class Group:
    """Requests with the same prompt."""

    num_unadmitted: int
    """Of those without a token of their own, which share the prompt's pages."""
    prefix: list[int] = field(default_factory=list)
    """Pages of the prompt, held for members that are yet to come."""


@dataclass(eq=False)
class Request:
    """One completion in the making."""

    index: int
    """Its row of the transcript."""
    problem: Problem
    group: Group
    key: int
    transcript: Transcript
    is_new: bool = True
    """Never admitted so far, and no token sampled."""
    pages: list[int] = field(default_factory=list)
    row: int | None = None
    """Of the decode batch, while it runs."""
    serial: int = 0
    """Of running requests the newest has the largest."""
    saved: Tensor | None = None
    """Keys and values that were in the cache when it was preempted, where they are kept."""

    @property
    def token_ids(self) -> list[int]:
        return self.transcript.token_ids(self.index)

    @property
    def num_sampled(self) -> int:
        return int(self.transcript.counts[self.index])

    @property
    def num_tokens(self) -> int:
        return len(self.problem.prompt_ids) + self.num_sampled

    @property
    def last_token(self) -> int:
        sampled = self.transcript.tail(self.index, 1)
        return sampled[0] if sampled else self.problem.prompt_ids[-1]

    @property
    def cached_tokens(self) -> list[int]:
        """What prefill computes: everything but the last token."""
        return [*self.problem.prompt_ids, *self.token_ids][:-1]

    @property
    def most_cached(self) -> int:
        """Tokens in the cache at the end; the last one is never cached."""
        return len(self.problem.prompt_ids) + self.transcript.max_tokens - 1


class LengthHistory:
    """The longest completion of each problem so far: a forecast of the next one."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def record(self, problem: Problem, num_tokens: int) -> None:
        name = _name(problem)
        self._longest[name] = max(num_tokens, self._longest.get(name, 0))

    def order(self, problems: Sequence[Problem]) -> list[int]:
        """Longest expected first, unknown ones before all: a long one must not start last."""
        expected = [self._longest.get(_name(p), math.inf) for p in problems]
        return sorted(range(len(problems)), key=lambda i: -expected[i])


def _name(problem: Problem) -> str:
    """The id without the epoch that `qurl.sampling.ProblemStream` appends."""
    return re.sub(r"@\d+$", "", problem.id)
