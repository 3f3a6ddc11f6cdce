"""Masters as a BF16 weight and what its rounding lost, in the 4 bytes of an FP32 master.

    master = weight + rest;   weight = master rounded to BF16;   rest = the bits that this dropped

This is Kahan's compensated sum with a compensation that is exact: 16 bits of an integer instead of
a BF16 number. The latter has 8 bits, so an update below 2^-17 of its weight can be lost; at a rate
of 1e-6, weights of 0.2 lose half of what they should move. Here runs equal those of FP32 masters to
the bit, as long as no master lies halfway between two BF16 numbers.

Only projections are kept so. A BF16 trainer rounds them for each product anyway, and then needs no
copies of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qurl.quant.linear import projections

REST = "rest"
"""Its name in an optimizer's state."""


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An FP32 tensor as BF16 and INT16, which holds the rest if ties are rounded away from 0."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.short().view(torch.bfloat16), (bits - (upper << 16)).short()


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The FP32 tensor that `split` took."""
    return ((weight.view(torch.int16).int() << 16) + rest).view(torch.float32)


def widen(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """A parameter's master in FP32; itself unless it is split."""
    return join(parameter, state[REST]) if REST in state else parameter


def store_(parameter: Tensor, state: dict[str, Any], master: Tensor) -> None:
    """Keep a master that was widened and then updated in place."""
    if REST in state:
        weight, rest = split(master)
        parameter.copy_(weight)
        state[REST].copy_(rest)


@torch.no_grad()
def narrow_masters_(model: nn.Module, optimizer: Optimizer) -> None:
    """Split the projections' weights: BF16 in the model, the rest in the optimizer's state.

    Gradients stay FP32. Layers with the same parent and width are laid next to each other, so that
    `qurl.trainer.projection` can multiply several at once without a copy.
    """
    stacks: dict[tuple[str, int], list[Tensor]] = {}
    for name, layer in projections(model):
        key = (name.rpartition(".")[0], layer.in_features)
        stacks.setdefault(key, []).append(layer.weight)
    for weights in stacks.values():
        rounded, rests = zip(*(split(weight.detach()) for weight in weights), strict=True)
        parts = torch.cat(rounded).split([len(weight) for weight in weights])
        for weight, part, rest in zip(weights, parts, rests, strict=True):
            optimizer.state[weight][REST] = rest
            weight.data = part
            weight.grad_dtype = torch.float32
