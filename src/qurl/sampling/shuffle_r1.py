"""Shuffle-R1: pairs of opposite advantages, and a batch in which telling pairs come more often."""

from __future__ import annotations

import torch
from torch import Tensor

from qurl.errors import ConfigError
from qurl.sampling.parts import Setup
from qurl.seeds import generator
from qurl.types import Batch, Trained

FLAT = 0.1
"""|A| below which a completion teaches next to nothing."""


def pair_up(advantages: Tensor, keep: float) -> Tensor:
    """[M, 2]: the i-th largest advantage with the i-th smallest, the M largest contrasts.

    M = int(keep N) of the N pairs of a group, one at least.
    """
    size = len(advantages)
    if size % 2:
        raise ConfigError(f"batch.subselect = 'shuffle-r1' pairs completions; a group has {size}")
    order = advantages.sort(descending=True, stable=True).indices
    pairs = torch.stack((order[: size // 2], order.flip(0)[: size // 2]), dim=1)
    return pairs[: max(1, int(keep * (size // 2)))]


def draw_rounds(weights: Tensor, rounds: int, seed: int) -> Tensor:
    """As many numbers of pairs as there are weights, in `rounds` draws.

    Each draw is without repetition, with probabilities w / sum(w); a pair may be in several.
    """
    sizes = [len(part) for part in torch.arange(len(weights)).tensor_split(rounds) if len(part)]
    weights = weights.double().cpu()
    if int((weights > 0).sum()) < max(sizes):  # all-zero weights draw uniformly
        weights = weights + max(1e-6 * float(weights.max()), 1e-12)
    draw = generator(seed, "shuffle-r1")
    return torch.cat([torch.multinomial(weights, n, generator=draw) for n in sizes])


class ShuffleR1:
    """A sub-selection of pairs. Advantages stay those within the whole groups."""

    reads_batch = False

    def __init__(self, setup: Setup) -> None:
        self.config = setup.config.systems.shuffle_r1
        self._metrics: dict[str, float] = {}

    def __call__(self, batch: Batch, advantages: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        kept = []
        for group in batch.group.unique(sorted=True):
            rows = (batch.group == group).nonzero().squeeze(-1)
            kept.append(rows[pair_up(advantages[rows], self.config.keep)])
        pairs = torch.cat(kept)  # [P, 2]
        if self.config.rounds:
            weights = advantages[pairs].abs().sum(-1)
            pairs = pairs[draw_rounds(weights, self.config.rounds, seed).to(pairs.device)]
        trained = advantages[pairs]
        self._metrics = {
            "sampling/unique_frac": len(pairs.flatten().unique()) / pairs.numel(),
            "sampling/flat_frac": float((advantages.abs() < FLAT).float().mean()),
            "sampling/flat_frac_kept": float((trained.abs() < FLAT).float().mean()),
            "sampling/contrast": float((trained[:, 0] - trained[:, 1]).mean()),
        }
        return pairs, trained

    def metrics(self, trained: Trained) -> dict[str, float]:
        return self._metrics
