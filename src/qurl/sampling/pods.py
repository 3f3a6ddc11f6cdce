"""PODS: of each group, train on the completions whose rewards vary most."""

from __future__ import annotations

import torch
from torch import Tensor

from qurl.sampling.parts import Setup
from qurl.types import Batch, Trained


def most_varied(rewards: Tensor, keep: int) -> Tensor:
    """Positions of the `keep` rewards with the largest variance, in ascending order.

    The best choice is some of the lowest and otherwise the highest, so that only `keep` + 1 choices
    need a look. Of binary rewards it is as balanced as can be.
    """
    if keep >= len(rewards):
        return torch.arange(len(rewards), device=rewards.device)
    order = rewards.double().sort(stable=True).indices
    values = rewards.double()[order]
    choices = [[*range(a), *range(len(rewards) - keep + a, len(rewards))] for a in range(keep + 1)]
    variances = torch.stack([values[choice].var(correction=0) for choice in choices])
    # Equal variances may differ in their last bit; the first one counts.
    best = int((variances >= variances.max() - 1e-12).nonzero()[0])
    return order[torch.tensor(choices[best], device=rewards.device)].sort().values


class Pods:
    """A sub-selection of `systems.pods.keep` completions per group."""

    reads_batch = False

    def __init__(self, setup: Setup) -> None:
        self.config = setup.config.systems.pods
        self._deviation = 0.0

    def __call__(self, batch: Batch, advantages: Tensor, seed: int) -> Tensor | tuple:
        kept = []
        for group in batch.group.unique(sorted=True):
            rows = (batch.group == group).nonzero().squeeze(-1)
            kept.append(rows[most_varied(batch.rewards[rows], self.config.keep)])
        deviations = torch.stack([batch.rewards[rows].std(correction=0) for rows in kept])
        self._deviation = float(deviations.mean())
        rows = torch.cat(kept)
        return rows if self.config.statistics == "kept" else (rows, advantages[rows])

    def metrics(self, trained: Trained) -> dict[str, float]:
        return {"sampling/kept_reward_std": self._deviation}
