"""Episodes: completions of several turns, with tools in between.

An episode is a generator function of a problem and the tokenizer, such as the one in
`examples/episode_calculator.py`. It yields the token ids that the engine is to continue, first the
prompt, and receives the completion of that turn. To go on, it yields all tokens so far with its own
appended. To end, it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import index as as_index
from typing import Any

from torch import Tensor

from qurl.errors import EngineError
from qurl.plugins import load_plugin
from qurl.rollout.engine import Asked, Engine, QueueStream, Stream, generate
from qurl.types import Completion, Problem, Rollout, SamplingParams, SyncReport

Episode = Callable[[Problem, Any], Generator[Sequence[int], Completion, None]]


class EpisodeEngine:
    """An engine whose completions are episodes, played over another engine.

    `episode` is a function or its `module:name`. Tools run in this process, between two steps of
    the engine. All turns and tool tokens together have at most `max_tokens` tokens.
    """

    def __init__(self, engine: Engine, episode: str | Episode, tokenizer: Any) -> None:
        loaded = load_plugin(episode, "rollout.episode") if isinstance(episode, str) else episode
        self.engine, self.tokenizer = engine, tokenizer
        self.episode: Episode = loaded

    def __getattr__(self, name: str) -> Any:
        """What only some engines have (`close`, `packing`, `works_elsewhere`): that one's own."""
        if name == "engine":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.engine, name)

    def sync(self, source: Any, *, version: int) -> SyncReport:
        return self.engine.sync(source, version=version)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        return self.engine.score(token_ids)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        return generate(self, problems, params)

    def stream(self, params: SamplingParams) -> Stream:
        return QueueStream(params, lambda waiting: self._play(waiting, params))

    def _play(self, waiting: deque[Asked], params: SamplingParams) -> Iterator[Rollout]:
        """Play the first turn of a problem as a group, whose completions share the prompt. Later
        turns are problems of their own in a second stream, once all first turns are done."""
        while waiting:
            owners: dict[str, tuple[_Group, int]] = {}
            sizes: list[int] = []
            for asked in [waiting.popleft() for _ in range(len(waiting))]:
                problem, size, _ = asked
                if problem.id in owners:  # its turns would have the same ids
                    waiting.append(asked)
                    continue
                owners[problem.id] = _Group(problem, size, self, params), 0
                sizes.append(size)
            turns = [group.problem for group, _ in owners.values()]
            for is_later, size in ((False, params.group_size), (True, 1)):
                with self.engine.stream(replace(params, group_size=size)) as stream:
                    if is_later or set(sizes) == {size}:
                        stream.submit(turns)
                    else:
                        stream.submit(turns, sizes)
                    turns = []
                    for rollout in stream:
                        group, first = owners.pop(rollout.problem.id)
                        for g, turn in enumerate(rollout.completions, first):
                            if group.take(g, turn):
                                owners[group.turns[g].id] = group, g
                                turns.append(group.turns[g])
                        if is_later:
                            stream.submit(turns)
                            turns = []
                        yield from group.finished()


class _Group:
    """The completions of one problem in the making."""

    def __init__(
        self, problem: Problem, size: int, player: EpisodeEngine, params: SamplingParams
    ) -> None:
        self._temperature = params.temperature
        self._attempts = [_attempt(problem, g, player, params.limit(problem)) for g in range(size)]
        self._completions: dict[int, Completion] = {}
        self.turns = [next(attempt) for attempt in self._attempts]
        """The next turn of each completion, as a problem."""
        prompts = {turn.prompt_ids for turn in self.turns}
        if len(prompts) > 1:
            raise EngineError(f"the episodes of problem {problem.id} begin with different prompts")
        self.problem = replace(problem, prompt_ids=prompts.pop())

    def take(self, number: int, turn: Completion) -> bool:
        """Add a turn to a completion; is there another one?"""
        try:
            self.turns[number] = self._attempts[number].send(turn)
        except StopIteration as done:
            self._completions[number] = done.value
        return number not in self._completions

    def finished(self) -> Iterator[Rollout]:
        """The rollout, if all its completions are done."""
        if len(self._completions) == len(self._attempts):
            completions = [self._completions[g] for g in range(len(self._attempts))]
            version = min(v for c in completions for v in c.versions)
            yield Rollout(self.problem, completions, version, self._temperature)


def _attempt(
    problem: Problem, number: int, player: EpisodeEngine, max_tokens: int
) -> Generator[Problem, Completion, Completion]:
    """Play one episode: yields each turn as a problem, receives it, and returns them all joined.

    Every turn has an id of its own, so that engines draw anew.
    """

    def decode(token_ids: Sequence[int]) -> str:
        decoder = player.tokenizer
        return decoder.decode(list(token_ids), skip_special_tokens=True) if decoder else ""

    def join(finish: Any) -> Completion:
        """Stop strings cut the text of the last turn only."""
        parts = ("token_ids", "logprobs", "trained", "versions")
        joined = {x: tuple(chain(*(getattr(c, x) for c in played))) for x in parts}
        earlier = joined["token_ids"][: -len(turn.token_ids)]
        return Completion(text=decode(earlier) + turn.text, finish=finish, **joined)

    try:
        turns = player.episode(problem, player.tokenizer)
    except Exception as error:
        raise EngineError(f"the episode of problem {problem.id} failed: {error!r}") from error
    tokens = _next(turns, None, problem)
    end = len(tokens) + max_tokens
    played: list[Completion] = []
    while True:
        id = f"{problem.id}/{number}/{len(played)}"
        left = end - len(tokens)
        turn = yield replace(problem, id=id, prompt_ids=tuple(tokens), max_tokens=left)
        if len(turn.token_ids) > left:  # by an engine that does not know a problem's own limit
            # Tokens up to here are distributed as if it had stopped here.
            ids, logprobs, versions = turn.token_ids, turn.logprobs, turn.versions
            text = decode(ids[:left])
            turn = Completion(ids[:left], logprobs[:left], text, "length", (), versions[:left])
        tokens += turn.token_ids
        played.append(turn)
        more = _next(turns, turn, problem) if turn.finish == "stop" else []
        if not more:
            return join(turn.finish)
        if len(more) >= end:  # no room for another turn
            return join("length")
        if more[: len(tokens)] != tokens:
            raise EngineError(
                f"the episode of problem {problem.id} changed tokens of earlier turns; it must "
                "yield all tokens so far, and may append to them"
            )
        added, tokens = more[len(tokens) :], more
        if num := len(added):
            versions = [turn.versions[-1]] * num
            played.append(Completion(added, [0.0] * num, "", "stop", [False] * num, versions))


def _next(turns: Generator[Any, Any, None], turn: Completion | None, problem: Problem) -> list[int]:
    """The tokens that the episode wants continued; none if it has returned."""
    try:
        yielded = turns.send(turn)
    except StopIteration:
        if turn is not None:
            return []
        raise EngineError(f"the episode of problem {problem.id} yields no prompt") from None
    except Exception as error:
        raise EngineError(f"the episode of problem {problem.id} failed: {error!r}") from error
    try:
        return list(map(as_index, yielded))  # also of a tensor, whose elements are no int
    except TypeError:
        raise EngineError(
            f"the episode of problem {problem.id} yields {repr(yielded)[:100]}; it must yield all "
            "tokens so far, as token ids"
        ) from None
