"""A whole learner on each rank: gradients are added up, and weights stay the same everywhere.

    rank 0 .. N - 1:  its rows  ──forward, backward──▶  gradients  ──all-reduce──▶  the same update

Nothing is gathered and layers are fused, where a GPU has room for whole weights, gradients and
moments. What a learner does with them may be anything: adapters, other optimizers, compiled layers.
Ranks compare checksums of their weights after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from qurl.errors import QurlError
from qurl.quant.tracking import UpdateTracker
from qurl.trainer.learner import Learner
from qurl.trainer.parallel.group import LearnerGroup, open_shelves
from qurl.trainer.parallel.processes import Post, Workers


class ReplicaGroup(LearnerGroup):
    """Whole learners, led from rank 0, which saves and measures its own."""

    def __init__(self, workers: Workers, make: Callable[[], Learner]) -> None:
        """`make` loads the learner; every rank calls it."""
        workers.run(_build, make)
        self.workers, self._learner = workers, workers.post.learner
        self.policy, self.device = self._learner.policy, self._learner.device
        self.shelves = open_shelves(workers)

    def source(self, engine: Any) -> nn.Module:
        return self._learner.source(engine)

    def whole_model(self) -> nn.Module:
        return self._learner.whole_model()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def watch(self, tracker: UpdateTracker) -> UpdateTracker:
        return self._learner.watch(tracker)


def _build(post: Post, make: Callable[[], Learner]) -> None:
    with post.ranks.agreeing(QurlError):
        learner = make()
    learner.ranks, learner.is_replica = post.ranks, True
    with post.ranks.agreeing(QurlError):
        learner.check_alike(is_trained=False)
    post.held["learner"] = learner
