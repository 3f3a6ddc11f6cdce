"""Checks what an engine of your own returns, and names the method that fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from qurl.errors import EngineError
from qurl.plugins import kind_of, naming_failures
from qurl.rollout.engine import Earlier, Engine, Stream
from qurl.types import Completion, Problem, Rollout, SamplingParams, SyncReport

_METHODS = ("submit", "__iter__", "__enter__", "__exit__")
_ROUNDING = 1e-3
"""How far above 0 rounding may lift a log-prob."""


class GuardedEngine:
    """Another engine, whose answers are checked before anything is trained on them."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self.engine, self.vocabulary = engine, vocabulary

    def __getattr__(self, name: str) -> Any:
        """What only some engines have (`close`, `packing`, `works_elsewhere`): that one's own."""
        if name == "engine":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.engine, name)

    def sync(self, source: Any, *, version: int) -> SyncReport:
        with naming_failures("rollout.engine: sync"):
            report = self.engine.sync(source, version=version)
        if not isinstance(report, SyncReport):
            raise EngineError(
                f"rollout.engine: sync returned {kind_of(report)}; it must return a "
                "qurl.types.SyncReport"
            )
        return report

    def score(self, token_ids: Sequence[int]) -> Tensor:
        with naming_failures("rollout.engine: score"):
            return self.engine.score(token_ids)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        with naming_failures("rollout.engine: generate"):
            rollouts = list(self.engine.generate(problems, params))
        if len(rollouts) != len(problems):
            raise EngineError(
                f"rollout.engine: generate returned {len(rollouts)} rollouts for {len(problems)} "
                "problems; it must return one for each, in order"
            )
        for rollout in rollouts:
            _check(rollout, params.group_size, self.vocabulary)
        return rollouts

    def stream(self, params: SamplingParams) -> Stream:
        with naming_failures("rollout.engine: stream"):
            stream = self.engine.stream(params)
        if lacks := ", ".join(name for name in _METHODS if not hasattr(stream, name)):
            raise EngineError(
                f"rollout.engine: stream returned {kind_of(stream)}, which lacks {lacks} "
                "(qurl.rollout.Stream)"
            )
        return _GuardedStream(stream, params, self.vocabulary)


class _GuardedStream:
    def __init__(self, stream: Stream, params: SamplingParams, vocabulary: int) -> None:
        self._stream, self._params, self._vocabulary = stream, params, vocabulary
        self._missing: dict[str, list[int]] = {}
        """Completions that the rollouts of each problem still to come must have."""

    def submit(
        self, problems: Sequence[Problem], sizes: Sequence[int] = (), earlier: Earlier = ()
    ) -> None:
        with naming_failures("rollout.engine: submit of the stream"):
            if earlier:
                self._stream.submit(problems, sizes, earlier)
            elif sizes:
                self._stream.submit(problems, sizes)
            else:  # engines need not know what nobody asks for
                self._stream.submit(problems)
        sizes = sizes or [self._params.group_size] * len(problems)
        for problem, size in zip(problems, sizes, strict=True):
            self._missing.setdefault(problem.id, []).append(size)

    def __iter__(self) -> Iterator[Rollout]:
        rollouts = iter(self._stream)
        while True:
            with naming_failures("rollout.engine: the stream"):
                rollout = next(rollouts, None)
            if rollout is None:
                break
            if not isinstance(rollout, Rollout):
                raise EngineError(
                    f"rollout.engine: the stream gave {kind_of(rollout)}; it must give a "
                    "qurl.types.Rollout for each problem"
                )
            self._settle(rollout)
            yield rollout
        if num_missing := sum(map(len, self._missing.values())):
            raise EngineError(
                f"rollout.engine: the stream ended before {num_missing} of the problems that were "
                "submitted had a rollout"
            )

    def _settle(self, rollout: Rollout) -> None:
        """Check a rollout against what was asked for; a problem may be asked more than once."""
        sizes = self._missing.get(rollout.problem.id)
        if not sizes:
            raise EngineError(
                f"rollout.engine: the stream gave a rollout of problem {rollout.problem.id!r}, "
                "which nothing asks for"
            )
        found = len(rollout.completions)
        size = found if found in sizes else sizes[0]
        _check(rollout, size, self._vocabulary)
        sizes.remove(size)

    def __enter__(self) -> Stream:
        with naming_failures("rollout.engine: the stream"):
            self._stream = self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)


def _check(rollout: Rollout, size: int, vocabulary: int) -> None:
    name = f"rollout.engine: the rollout of problem {rollout.problem.id!r}"
    if len(rollout.completions) != size:
        raise EngineError(
            f"{name} has {len(rollout.completions)} completions; {size} were asked for"
        )
    for number, completion in enumerate(rollout.completions):
        if flaw := _find_flaw(completion, vocabulary):
            raise EngineError(f"{name}, completion {number}: {flaw}")


def _find_flaw(completion: Completion, vocabulary: int) -> str | None:
    length = len(completion.token_ids)
    for name in ("logprobs", "trained", "versions"):
        if (count := len(getattr(completion, name))) != length:
            return f"{count} {name} for {length} tokens; each token has one"
    for position, token in enumerate(completion.token_ids):
        if not 0 <= token < vocabulary:
            return f"token_ids[{position}] = {token} is outside the vocabulary [0, {vocabulary})"
    for position, (logprob, is_trained) in enumerate(
        zip(completion.logprobs, completion.trained, strict=True)
    ):
        if is_trained and not -math.inf < logprob <= _ROUNDING:
            return f"logprobs[{position}] = {logprob} is not the logarithm of a probability"
    return None
