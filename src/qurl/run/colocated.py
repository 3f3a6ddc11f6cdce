"""An engine with each trainer rank: while rollouts are sampled, no GPU is idle.

    sync      each rank codes its rows, all gather the codes, and each writes them into its engine;
              a rank with whole weights syncs from these
    generate  the problems are dealt by expected length; rank 0 gets the rollouts of all, and their
              tokens stay on the shelves of the ranks (`qurl.ops.shelf`)

All ranks build, sync and sample at the same time (`qurl.trainer.parallel`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from qurl.errors import QurlError
from qurl.ops.shelf import Shelves, shelve
from qurl.quant.shipment import Packing
from qurl.rollout import build_engine
from qurl.rollout.engine import Asked, QueueStream, Stream, check_prompts, generate
from qurl.rollout.local import LocalEngine
from qurl.rollout.local.requests import LengthHistory
from qurl.trainer.batches import level
from qurl.trainer.parallel.processes import Post, Workers
from qurl.trainer.parallel.shipping import ShardShipment
from qurl.types import Problem, Rollout, SamplingParams, SyncReport

_NUMBERS = itertools.count()


class ColocatedEngines:
    """See `qurl.rollout.engine.Engine`; led from rank 0."""

    def __init__(
        self,
        workers: Workers,
        quant: str,
        options: Mapping[str, Any],
        shelves: Shelves | None = None,
    ) -> None:
        """Without shelves, rank 0 gets the tokens too."""
        self._workers, self._shelves = workers, shelves
        # A number of its own: an engine that takes another's place is built before that is closed.
        self._key = f"engine {next(_NUMBERS)}"
        self._lengths = LengthHistory()
        workers.run(_build, self._key, quant, dict(options))

    @property
    def _own(self) -> LocalEngine:
        return self._workers.post.held[self._key]

    @property
    def packing(self) -> Packing:
        return self._own.packing

    @property
    def kv_saturated_frac(self) -> float | None:
        return self._own.kv_saturated_frac

    def sync(self, source: Any, *, version: int) -> SyncReport:
        """From the learners of the ranks, whatever the source."""
        return self._workers.run(_sync, self._key, version)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        return self._own.score(token_ids)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        return generate(self, problems, params)

    def stream(self, params: SamplingParams) -> Stream:
        def play(waiting: deque[Asked]) -> Iterator[Rollout]:
            while waiting:
                self._workers.post.held["portions"] = self._deal(list(waiting))
                waiting.clear()
                is_shelved = self._shelves is not None
                for rollout in self._workers.run(_generate, self._key, params, is_shelved):
                    longest = max(len(c.token_ids) for c in rollout.completions)
                    self._lengths.record(rollout.problem, longest)
                    yield self._shelves.adopt(rollout) if self._shelves else rollout

        model = self._workers.post.learner.policy.model
        return QueueStream(params, play, lambda problems: check_prompts(problems, params, model))

    def close(self) -> None:
        if not self._workers.has_failed:
            self._workers.run(_forget, self._key)

    def _deal(self, asked: Sequence[Asked]) -> list[list[Asked]]:
        """About as many expected tokens for each rank."""
        tokens = [one.size * self._lengths.expect(one.problem) for one in asked]
        shares = level(tokens, self._workers.post.ranks.size)
        return [[asked[row] for row in rows] for rows in shares]


def _build(post: Post, key: str, quant: str, options: dict[str, Any]) -> None:
    learner = post.learner
    policy = learner.policy
    with post.ranks.agreeing(QurlError):
        if not learner.is_replica:
            options |= {"is_empty": True, "device": policy.device}
        post.held[key] = build_engine(
            "local", policy.model, policy.tokenizer, quant=quant, **options
        )
        if learner.is_replica and options.get("unified"):
            policy.adopt_codes_([layer.codes() for layer in post.held[key].weights.layers])


def _sync(post: Post, key: str, version: int) -> SyncReport:
    learner = post.learner
    source = learner.policy.model if learner.is_replica else ShardShipment.alike(post)
    with post.ranks.agreeing(QurlError):
        return post.held[key].sync(source, version=version)


def _generate(post: Post, key: str, params: SamplingParams, is_shelved: bool) -> list[Rollout]:
    """The rollouts of all ranks, on rank 0."""
    portion: list[Asked] = post.scatter("portions")
    with post.ranks.agreeing(QurlError), post.held[key].stream(params) as stream:
        stream.submit([one.problem for one in portion], [one.size for one in portion])
        rollouts = list(stream)
        if is_shelved:
            rollouts = [shelve(rollout, [post.held["shelf"].address]) for rollout in rollouts]
    return [rollout for share in post.gather(rollouts) for rollout in share]


def _forget(post: Post, key: str) -> None:
    post.held.pop(key, None)
