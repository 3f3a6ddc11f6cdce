"""What an engine is: it holds the quantized copy of the policy and samples from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from qurl.types import Problem, Rollout, SamplingParams, SyncReport


class Stream(Protocol):
    """Problems go in, rollouts come out as they finish.

        with engine.stream(params) as stream:
            stream.submit(problems)
            for rollout in stream:
                ...  # more may be submitted here

    The randomness of a completion depends on the parameters and its problem's id alone, so that its
    tokens do not change with what else is in the batch, up to the rounding of the hardware.
    """

    def submit(self, problems: Sequence[Problem]) -> None:
        """Ask for `params.group_size` completions of each problem."""
        ...

    def __iter__(self) -> Iterator[Rollout]:
        """Rollouts in the order in which they finish, until all that were asked for are done."""
        ...

    def __enter__(self) -> Stream: ...

    def __exit__(self, *_: object) -> None:
        """Give the engine's memory back and drop what is unfinished."""
        ...


class Engine(Protocol):
    """The actor's side of the loop."""

    def sync(self, source: nn.Module, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into the engine, in place, and verify the copy.

        On one device the source is the trainer's model.
        """
        ...

    def stream(self, params: SamplingParams) -> Stream:
        """A stream of completions that are drawn like this."""
        ...

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """All rollouts of one stream, in the order of the problems."""
        ...

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1."""
        ...


def generate(engine: Engine, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
    """The usual `Engine.generate`: all rollouts of one stream, in the order of the problems."""
    found: dict[object, list[Rollout]] = defaultdict(list)
    with engine.stream(params) as stream:
        stream.submit(problems)
        for rollout in stream:
            found[_key(rollout.problem)].append(rollout)
    return [replace(found[_key(p)].pop(), problem=p) for p in problems]


def _key(problem: Problem) -> tuple[object, ...]:
    """Problems that share it draw the same completions; ids alone may repeat."""
    return (problem.id, *problem.prompt_ids)
