"""Rollout replay (DOTS-RR): groups of recent steps are trained on again.

A replayed group keeps the log-probs it was sampled with, so that the mismatch pi_prox / pi_behav of
its tokens covers age, quantization and temperature alike. The loss of DOTS-RR on such tokens is
then the `decoupled` objective; `tis` and `acr` truncate what age has made large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from qurl.losses import kl_penalty
from qurl.sampling.packed import pack, unpack
from qurl.sampling.parts import Setup
from qurl.sampling.sampler import has_signal
from qurl.seeds import generator
from qurl.types import Graded, Trained


class RecentReplay:
    """A buffer of the last groups with mixed outcomes, one per problem."""

    def __init__(self, setup: Setup) -> None:
        self.config = setup.config.systems.replay
        self._buffer: list[dict[str, Any]] = []
        """Packed groups, the oldest first."""
        self._num_fresh = self._age = 0.0

    def num_fresh(self, num_groups: int) -> int:
        wanted = num_groups - max(1, round(self.config.fresh * num_groups))
        return num_groups - min(wanted, len(self._buffer))

    def merge(self, fresh: Sequence[Graded], num_groups: int, seed: int) -> list[Graded]:
        """The fresh groups and others drawn from the buffer, to which the fresh ones are added."""
        order = torch.randperm(len(self._buffer), generator=generator(seed, "replay")).tolist()
        replayed = [unpack(self._buffer[i]) for i in order[: num_groups - len(fresh)]]
        now = max(group.rollout.version for group in fresh)
        self._num_fresh = len(fresh)
        self._age = fmean(now - g.rollout.version for g in replayed) if replayed else 0.0
        self._add(fresh)
        return [*fresh, *replayed]

    def _add(self, fresh: Sequence[Graded]) -> None:
        """Only the last group of a problem is kept, and only if its answers differ."""
        names = {group.rollout.problem.name for group in fresh}
        older = [packed for packed in self._buffer if packed["name"] not in names]
        room = max(0, self.config.capacity - len(fresh))
        added = {g.rollout.problem.name: pack(g) for g in fresh if has_signal(g)}
        self._buffer = [*older[max(0, len(older) - room) :], *added.values()]
        self._buffer = self._buffer[-self.config.capacity :]

    def metrics(self, trained: Trained) -> dict[str, float]:
        """Buffer, age, and the mismatch of fresh and of replayed tokens apart."""
        found = {"replay/buffer": float(len(self._buffer)), "replay/age": self._age}
        k3 = kl_penalty(trained.logp_behav, trained.logp_prox, "k3")
        rho = (trained.logp_prox - trained.logp_behav).exp()
        is_known = trained.mask.bool() & trained.has_prox[:, None]
        is_old = (trained.group >= self._num_fresh)[:, None]
        for name, rows in {"fresh": ~is_old, "replayed": is_old}.items():
            if len(values := k3[is_known & rows]):
                found[f"replay/k3_kl_{name}"] = float(values.mean())
                found[f"replay/is_max_{name}"] = float(rho[is_known & rows].max())
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": list(self._buffer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._buffer = list(state["buffer"])
