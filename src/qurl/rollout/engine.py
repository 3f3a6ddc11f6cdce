"""What an engine is: it holds the quantized copy of the policy and samples from it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qurl.errors import DataError, EngineError
from qurl.types import Problem, Rollout, SamplingParams, SyncReport, TokenIds

Earlier = Sequence[Sequence[TokenIds]]
"""For each problem, its responses of an earlier epoch."""


class Stream(Protocol):
    """Problems go in, rollouts come out as they finish.

        with engine.stream(params) as stream:
            stream.submit(problems)
            for rollout in stream:
                ...  # more may be submitted here

    The randomness of a completion depends on the parameters and its problem's id alone, so that its
    tokens do not change with what else is in the batch, up to the rounding of the hardware.
    """

    def submit(
        self, problems: Sequence[Problem], sizes: Sequence[int] = (), earlier: Earlier = ()
    ) -> None:
        """Ask for completions of each problem: so many of each, or `params.group_size` of all.

        `earlier` has token ids of responses that an engine may draft from, for each problem. They
        change how fast tokens come and not which ones, so an engine may ignore them. Streams of a
        group of engines also take `engines`, the number of the one that should get each problem.
        """
        ...

    def __iter__(self) -> Iterator[Rollout]:
        """Rollouts in the order in which they finish, until all that were asked for are done."""
        ...

    def __enter__(self) -> Stream: ...

    def __exit__(self, *_: object) -> None:
        """Give the engine's memory back and drop what is unfinished."""
        ...


class Engine(Protocol):
    """The actor's side of the loop.

    An engine whose weights and arithmetic are in other processes may have `works_elsewhere = True`.
    With `rollout.ahead = 1`, a thread then submits and reads a stream while the trainer updates;
    the engine's other methods are not called meanwhile.
    """

    def sync(self, source: Any, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into the engine, in place, and verify the copy.

        The source is the trainer's model. Engines with an attribute `packing` also take a
        `qurl.quant.shipment.Shipment`, which they get from trainers on several ranks.
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


class Asked(NamedTuple):
    """A problem that was submitted to a stream."""

    problem: Problem
    size: int
    """Completions that it gets."""
    earlier: Sequence[TokenIds] = ()
    """Responses of an earlier epoch, to draft from."""


class QueueStream:
    """A stream whose `play` takes problems off a queue and yields their rollouts."""

    def __init__(
        self,
        params: SamplingParams,
        play: Callable[[deque[Asked]], Iterator[Rollout]],
        check: Callable[[Sequence[Problem]], None] = lambda problems: None,
    ) -> None:
        self._params, self._play, self._check = params, play, check
        self._waiting: deque[Asked] = deque()

    def submit(
        self, problems: Sequence[Problem], sizes: Sequence[int] = (), earlier: Earlier = ()
    ) -> None:
        self._check(problems)
        self._waiting.extend(list_asked(problems, sizes, self._params))

    def __iter__(self) -> Iterator[Rollout]:
        return self._play(self._waiting)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()


def list_asked(
    problems: Sequence[Problem], sizes: Sequence[int], params: SamplingParams, earlier: Earlier = ()
) -> list[Asked]:
    """What the arguments of `Stream.submit` ask for, problem by problem."""
    sizes = sizes or [params.group_size] * len(problems)
    columns = problems, sizes, earlier or [()] * len(problems)
    return [Asked(*one) for one in zip(*columns, strict=True)]


def generate(engine: Engine, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
    """The usual `Engine.generate`: all rollouts of one stream, in the order of the problems."""
    found: dict[str, list[Rollout]] = defaultdict(list)
    with engine.stream(params) as stream:
        stream.submit(problems)
        for rollout in stream:
            found[rollout.problem.id].append(rollout)
    return [_take(found[p.id], p) for p in problems]


def _take(rollouts: list[Rollout], problem: Problem) -> Rollout:
    """The rollout of one problem. Ids may repeat, and an episode may change the prompt."""
    for index, rollout in enumerate(rollouts):
        if tuple(rollout.problem.prompt_ids) == tuple(problem.prompt_ids):
            return replace(rollouts.pop(index), problem=problem)
    if not rollouts:
        raise EngineError(f"the stream ended without a rollout of problem {problem.id!r}")
    return rollouts.pop(0)


def token_logprobs(logits: Tensor, token_ids: Sequence[int] | Tensor) -> Tensor:
    """Log-probs [T] of tokens under logits [T, V]."""
    index = torch.as_tensor(token_ids, device=logits.device)
    return logits.float().log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)


def close(engine: Any) -> None:
    """Let an engine end what it started, if it started anything."""
    getattr(engine, "close", lambda: None)()


def context_length(config: Any) -> int | None:
    """The number of positions that a model was made for; None if its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_prompts(problems: Sequence[Problem], params: SamplingParams, model: Any) -> None:
    """Raise unless every prompt is in the vocabulary and leaves room for its completion."""
    check_prompts_for(model.config, model.get_input_embeddings().num_embeddings, problems, params)


def check_prompts_for(
    config: Any, vocabulary: int, problems: Sequence[Problem], params: SamplingParams
) -> None:
    """As `check_prompts`, for a model of which only the config is known."""
    longest = context_length(config) or math.inf
    for problem in problems:
        num_prompt, name = len(problem.prompt_ids), f"problem {problem.id!r}"
        if num_prompt == 0:
            raise DataError(f"{name} has an empty prompt; it needs at least one token")
        for i, token in enumerate(problem.prompt_ids):
            if not 0 <= token < vocabulary:
                raise DataError(
                    f"{name}: prompt_ids[{i}] = {token} is outside the model's vocabulary "
                    f"[0, {vocabulary}); was the prompt made by another tokenizer?"
                )
        if (limit := params.limit(problem)) < 1:
            raise DataError(f"{name} has max_tokens = {limit}; it needs at least one token")
        if num_prompt + limit > longest:
            raise EngineError(
                f"{name}: a prompt of {num_prompt} tokens and max_tokens = {limit} "
                f"make {num_prompt + limit}, beyond the model's "
                f"max_position_embeddings = {longest}; lower sampling.max_tokens"
            )


def check_finite(logprob: float, problem: Problem, position: int) -> None:
    """Raise if a token was drawn from a broken distribution."""
    if not math.isfinite(logprob):
        raise EngineError(
            f"problem {problem.id!r}: the log-prob of completion token {position} is {logprob}; "
            "the engine's weights or activations are not finite"
        )
