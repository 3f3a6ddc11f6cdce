"""Bias and variance of a gradient estimate, from chunks of independent samples.

Chunk i of K gives an estimate G_i and, from other samples of the same problems, a target T_i. Inner
products of different chunks have no noise of their own: for i != j,

    E < G_i - T_i, G_j - T_j > = |E G - E T|^2        squared bias
    E < G_i, T_j >             = < E G, E T >
    E ( < G_i, G_i > - < G_i, G_j > )                 variance of one chunk

A pair average runs over all i != j. Intervals come from resampling chunks.

Shapes: K chunks, D numbers of a gradient, R resamplings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qurl.run.intervals import Estimate
from qurl.seeds import derive_seed

NUM_BUCKETS = 2**18
"""Numbers that are kept of a group's gradient."""
RESAMPLINGS = 2000
GROUPS: Mapping[str, Sequence[str]] = {
    "embedding and head": ("embed", "lm_head", "wte"),
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "experts"),
}
"""Layer groups by parts of a parameter's name; "other" has the rest."""


@dataclass(frozen=True)
class Moments:
    """Inner products of an estimate and its target over chunks, [K, K] each."""

    estimate: Tensor
    cross: Tensor
    target: Tensor
    change: Tensor
    """Those of the difference to another estimate from the same samples."""

    @staticmethod
    def of(estimate: Tensor, target: Tensor, other: Tensor) -> Moments:
        """From gradients [K, D]."""
        g, t, o = estimate.double(), target.double(), other.double()
        return Moments(g @ g.T, g @ t.T, t @ t.T, (g - o) @ (g - o).T)

    def __add__(self, other: Moments) -> Moments:
        """The moments of two layer groups as one."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(a + b for a, b in pairs))

    def describe(self, batches_per_chunk: float = 1.0) -> dict[str, Estimate]:
        """Relative to the target's squared length |T|^2.

        bias      |E G - T|^2 / |T|^2
        cosine    < E G, T > / (|E G| |T|)
        variance  of an estimate from one mini-batch, / |T|^2
        change    |E G - E O|^2 / |T|^2, O the other estimate; it shares G's noise

        All are nan if the target is lost in noise.
        """
        draws = _resample(len(self.target))
        g, gt, t, change = (_pair_average(matrix, draws) for matrix in vars(self).values())
        length = (draws * self.estimate.diagonal()).sum(-1) / draws.sum(-1)
        if not bool((t > 0).double().mean() > 0.975):
            t = torch.full_like(t, torch.nan)
        return {
            "bias": _interval((g - 2 * gt + t) / t),
            "cosine": _interval(gt / (g * t).sqrt()),
            "variance": _interval((length - g) / t * batches_per_chunk),
            "change": _interval(change / t),
        }

    def sizes(self) -> dict[str, Estimate]:
        """|E G|^2, |E T|^2 and |E G - E O|^2 themselves: known also if the target is lost."""
        draws = _resample(len(self.target))
        found = {"estimate": self.estimate, "target": self.target, "difference": self.change}
        return {name: _interval(_pair_average(matrix, draws)) for name, matrix in found.items()}


def _resample(num_chunks: int) -> Tensor:
    """[1 + R, K]: how often each chunk is drawn. The first row draws each once."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(num_chunks, (RESAMPLINGS, num_chunks), generator=generator)
    counts = torch.zeros(RESAMPLINGS, num_chunks, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, num_chunks, dtype=torch.float64), counts])


def _pair_average(matrix: Tensor, draws: Tensor) -> Tensor:
    """Mean of matrix[i, j] over drawn pairs of different chunks, for each resampling."""
    total = torch.einsum("ri,ij,rj->r", draws, matrix, draws)
    same = (draws.square() * matrix.diagonal()).sum(-1)
    return (total - same) / (draws.sum(-1).square() - draws.square().sum(-1))


def _interval(values: Tensor) -> Estimate:
    """The first value, and the middle 95 % of the others."""
    ends = torch.tensor([0.025, 0.975], dtype=values.dtype)
    low, high = values[1:].nanquantile(ends).tolist()
    return Estimate(float(values[0]), low, high)


def group_of(name: str) -> str:
    """The layer group of a parameter."""
    parts = name.lower()
    return next((g for g, words in GROUPS.items() if any(w in parts for w in words)), "other")


class Sketcher:
    """Reads a model's gradients as one vector per layer group, and clears them.

    A group of at most `NUM_BUCKETS` parameters is kept as it is. A larger one becomes a count
    sketch: each number is added, with a random sign, to a random bucket. Inner products of sketches
    are those of the gradients in expectation.
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.groups.setdefault(group_of(name), []).append((name, parameter))

    def take(self) -> dict[str, Tensor]:
        """[D] of each group, on the CPU."""
        return {group: self._sketch(members) for group, members in self.groups.items()}

    @torch.no_grad()
    def _sketch(self, members: Sequence[tuple[str, nn.Parameter]]) -> Tensor:
        gradients = {name: _take_gradient(parameter) for name, parameter in members}
        if sum(g.numel() for g in gradients.values()) <= NUM_BUCKETS:
            return torch.cat(list(gradients.values())).cpu()
        device = members[0][1].device
        buckets = torch.zeros(NUM_BUCKETS, device=device)
        for name, gradient in gradients.items():
            generator = torch.Generator(device).manual_seed(derive_seed(0, "sketch", name))
            shape, options = (gradient.numel(),), {"device": device, "generator": generator}
            sign = torch.randint(2, shape, **options) * 2 - 1
            buckets.index_add_(0, torch.randint(NUM_BUCKETS, shape, **options), sign * gradient)
        return buckets.cpu()


def _take_gradient(parameter: nn.Parameter) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    return gradient.flatten().float()
