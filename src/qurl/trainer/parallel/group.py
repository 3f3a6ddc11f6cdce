"""A learner on several ranks, with the signatures of `Learner`.

    driver: train()  ──▶  LearnerGroup  ──command──▶  rank 0 .. N - 1: a Learner on shards

1. The driver is rank 0. It samples, grades and logs as ever; the others wait for commands.
2. It loads the models into main memory, checks and prepares them. Ranks get them layer by layer,
   and each keeps its shard (FSDP2).
3. Each mini-batch of a step is dealt to the ranks row by row, by length. A rank takes the tokens
   of its rows off the shelves on which engines put them (`qurl.ops.shelf`, `dealing`).
4. All ranks run the same number of forwards; one that has fewer pieces runs idle ones.
5. Losses are divided by the mini-batch of all ranks, and gradients are added up over ranks.
6. What decides for all rows, and all metrics, is summed over ranks; log-probs stay where they are.
7. Losses and norms that are not finite are agreed on, so that all ranks raise, and may go on.
8. Any other failure of a rank ends it, which breaks the exchanges of the others (`processes`).
9. Rank 0 gathers whole weights weight by weight, for the engine and for Hugging Face folders.
10. Optimizer states and update tracking stay on shards; checkpoints fit any number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qurl.advantages import Estimator, compare, sequence_advantages
from qurl.config import Config
from qurl.errors import CheckpointError, QurlError, TrainingError
from qurl.losses import Surrogate
from qurl.objectives import Advantage
from qurl.ops.shelf import Address, Shelf, Shelves, Traffic
from qurl.quant.tracking import UpdateTracker
from qurl.trainer.batches import deal, outline, rows_of
from qurl.trainer.learner import CRITIC, Learner, step_minibatches
from qurl.trainer.parallel import dealing
from qurl.trainer.parallel.dealing import Dealt
from qurl.trainer.parallel.processes import Post, Workers
from qurl.trainer.parallel.sharding import outline_models, read_outline, shard_
from qurl.trainer.parallel.shipping import ShardShipment, gather, gather_whole
from qurl.trainer.policy import Policy
from qurl.trainer.saving import save_optimizers
from qurl.trainer.weight_files import UNREADABLE, UNWRITABLE
from qurl.types import Batch, Corrected, Graded, KVScales, Scored, Trainable, Trained

Snapshot = int
"""Stands for the rows that trackers kept at their n-th measurement."""


class LearnerGroup:
    """Learners on shards, led from rank 0.

    `train` is written for a `Learner`; here, a `Dealt` stands for each stage of a batch.
    """

    def __init__(self, workers: Workers, learner: Learner) -> None:
        """`learner` is whole and becomes the share of rank 0."""
        self.workers, self._learner = workers, learner
        self.policy: Policy = learner.policy.twin()
        """A whole copy of the policy in main memory, as `whole_model` saw it last."""
        self.device = learner.policy.device
        workers.post.held["made"] = learner, self.policy
        parts = (learner.config, learner.objective, learner.advantage)
        workers.run(_build, *parts, outline_models(learner.policy, learner.reference))
        self.shelves = open_shelves(workers)

    @property
    def version(self) -> int | None:
        return self._learner.version

    @property
    def traffic(self) -> Traffic:
        """Bytes that passed through this process."""
        return self.workers.post.traffic

    def deal(self, graded: Sequence[Graded], rows: Tensor, bundle: int, step: int) -> Any:
        """See `Learner.deal`: each rank gets rows of about as many tokens of every mini-batch."""
        sampled = rows_of(graded)
        dealt = [sampled[row] for row in rows.tolist()]
        parts = step_minibatches(self._learner.config, len(dealt), bundle, step)
        shares = deal([row.length for row in dealt], parts, self.workers.post.ranks.size)
        dealing.deal_rows(self.workers, dealt, bundle, shares, self.shelves.take_dropped())
        return Dealt(Batch, outline(dealt).replace(bundle=bundle))

    def recompute(self, batch: Any, step: int) -> Any:
        self.workers.run(dealing.recompute, step)
        return replace(batch, stage=Scored)

    def correct(self, scored: Any) -> Any:
        self.workers.run(dealing.correct)
        return replace(scored, stage=Corrected)

    def compare(self, corrected: Any, advantage: Estimator) -> Any:
        """See `Learner.compare`; an advantage that reads the whole batch gets it here."""
        reads = getattr(advantage, "facts", Advantage()).reads
        if reads == "rows":
            # Without what names its failures: ranks find the function by its own name.
            self.workers.run(dealing.compare, inspect.unwrap(advantage))
        elif reads == "outcomes":
            found = sequence_advantages(corrected.outline, advantage)
            self.workers.run(dealing.compare_known, found)
        else:
            is_whitened = self._learner.config.algo.whiten
            whole = compare(self.whole(corrected), advantage, is_whitened=is_whitened)
            self.workers.run(dealing.take_compared, whole.advantages, whole.returns)
        return replace(corrected, stage=Trainable)

    def update(self, batch: Any, step: int) -> tuple[Any, dict[str, float]]:
        try:
            num_tokens, metrics = self.workers.run(dealing.update, step)
        except TrainingError as error:
            if error.is_agreed:
                error.batch = self.whole(batch)
            raise
        return replace(batch, stage=Trained, num_tokens=num_tokens), metrics

    def describe(self, trained: Any, batch: Any) -> dict[str, float]:
        return self.workers.run(dealing.describe, trained.stage)

    def fetch(self, batch: Any, rows: Tensor) -> Any:
        """See `Learner.fetch`; in main memory."""
        return self.workers.run(dealing.fetch, batch.stage, rows)

    def whole(self, batch: Any) -> Any:
        return self.fetch(batch, torch.arange(len(batch)))

    def round_kv_(self, scales: KVScales) -> None:
        self.workers.run(_round_kv, scales.scale.cpu(), scales.center.cpu())

    def source(self, engine: Any) -> nn.Module | ShardShipment:
        if hasattr(engine, "packing"):
            return ShardShipment(self.workers.post, self.workers.run)
        return self.whole_model()

    def whole_model(self) -> nn.Module:
        """The weights as they are now, in one module of the leader."""
        self.workers.run(gather_whole)
        return self.policy.model

    def save(self, folder: Path) -> None:
        self.workers.run(_save, folder)

    def load(self, folder: Path) -> None:
        self.workers.run(_load, folder)

    def watch(self, tracker: UpdateTracker) -> GroupTracker:
        """The tracker on the shards of all ranks."""
        return GroupTracker(self.workers, tracker)


class GroupTracker:
    """An `UpdateTracker` on each rank, for the rows that it holds."""

    def __init__(self, workers: Workers, tracker: UpdateTracker) -> None:
        self._workers, self._number = workers, 0
        workers.run(_watch, tracker)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """As `UpdateTracker.measure`, on the shards and not on the whole model."""
        self._number += 1
        return self._workers.run(_measure, self._number)

    def state_dict(self) -> Snapshot:
        return self._number

    def collect(self, state: Snapshot) -> dict[str, Tensor]:
        """The rows of all ranks, of the last snapshot or the one before."""
        return self._workers.run(_collect, state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._workers.run(_load_tracker, self._number, dict(state))


def _build(
    post: Post, config: Config, objective: Surrogate, advantage: Advantage, models: bytes
) -> None:
    with post.ranks.agreeing(QurlError):
        if post.ranks.rank == 0:
            learner, post.held["whole"] = post.held.pop("made")
        else:
            policy, reference = read_outline(models)
            parts = {"objective": objective, "advantage": advantage}
            learner = Learner(policy, config, reference=reference, **parts)
    with post.ranks.agreeing(QurlError):
        shard_(learner, post.ranks)
    post.held["learner"] = learner


def open_shelves(workers: Workers) -> Shelves:
    return Shelves(workers.run(_open_shelf), workers.post.traffic)


def _open_shelf(post: Post) -> list[Address]:
    if "shelf" not in post.held:
        post.held["shelf"] = Shelf(post.ranks.rank)
    return post.ranks.pool(post.held["shelf"].address)


def _round_kv(post: Post, scale: Tensor, center: Tensor) -> None:
    device = post.learner.policy.device
    post.learner.round_kv_(KVScales(scale.to(device), center.to(device)))


def _save(post: Post, folder: Path) -> None:
    learner = post.learner
    gather_whole(post)
    critic: dict[str, Tensor] = {}
    for name, weight in learner.critic.state_dict().items() if learner.critic is not None else ():
        whole = gather(weight)
        if post.ranks.rank == 0:
            critic[name] = whole.cpu()
    with post.ranks.agreeing(CheckpointError):
        try:
            if post.ranks.rank == 0:
                post.held["whole"].save(folder / "policy")
                if critic:
                    torch.save(critic, folder / CRITIC)
        except UNWRITABLE as error:
            raise CheckpointError(f"{folder} could not be written: {error}") from error
    save_optimizers(folder, learner.optimizers, post.ranks)


def _load(post: Post, folder: Path) -> None:
    try:
        post.learner.load(folder)
    except UNREADABLE as error:
        raise CheckpointError(str(error) or type(error).__name__) from error


def _watch(post: Post, tracker: UpdateTracker) -> None:
    post.held["tracker"], post.held["snapshots"] = tracker, {0: {}}


def _measure(post: Post, number: Snapshot) -> dict[str, float]:
    tracker: UpdateTracker = post.held["tracker"]
    with post.ranks.agreeing(QurlError):
        metrics = tracker.measure(post.learner.policy.model)
    _remember(post, number)
    return metrics


def _remember(post: Post, number: Snapshot) -> None:
    """Keep the last snapshot and the one before, from which a failed step is repeated."""
    before = {n: rows for n, rows in post.held["snapshots"].items() if n == number - 1}
    post.held["snapshots"] = before | {number: post.held["tracker"].state_dict()}


def _collect(post: Post, number: Snapshot) -> dict[str, Tensor]:
    rows = {name: x.cpu() for name, x in post.held["snapshots"][number].items()}
    shares = post.ranks.pool(rows)
    return {name: torch.cat([share[name] for share in shares]) for name in rows}


def _load_tracker(post: Post, number: Snapshot, state: Mapping[str, Tensor]) -> None:
    with post.ranks.agreeing(QurlError):
        post.held["tracker"].load_share(state, post.learner.policy.model)
    _remember(post, number)
