"""Dithered masters: a trainer in BF16 sees updates from the first one on.

    theta = w + d,  d uniform in the cell of w: all numbers that round to the BF16 number w

The masters of a BF16 checkpoint lie in the middle of their cells, so updates of less than half a
step do not show. From random places in the cells the right share of weights crosses into the next
cell: on average the forward moves by the update. Before training it stays the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qurl.seeds import generator


@torch.no_grad()
def dither_(model: nn.Module, seed: int) -> list[str]:
    """Move the weights and biases of linear layers, which autocast rounds, within their cells.

    Norms, embeddings and heads tied to them stay, because they are read in FP32. Other matrices,
    such as fused experts, stay too; their names are returned.
    """
    modules = list(model.modules())
    embeddings = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    rounded = {id(p) for m in linears for p in m.parameters(recurse=False)} - embeddings
    draw, kept = generator(seed, "dither"), []
    for name, parameter in model.named_parameters():
        if id(parameter) in rounded:
            places = torch.rand(parameter.shape, generator=draw)
            parameter.copy_(place_in_cell(parameter, places.to(parameter.device)))
        elif parameter.dim() > 1 and id(parameter) not in embeddings:
            kept.append(name)
    return kept


def place_in_cell(weight: Tensor, places: Tensor) -> Tensor:
    """FP32 numbers that round to the same BF16 number as `weight`.

    Places run from 0, the border towards zero, to 1. Zeros stay: their cell is as wide as the
    smallest number.
    """
    middle = weight.bfloat16()
    size = middle.abs().view(torch.int16)
    inner, outer = ((size + n).clamp(min=0).view(torch.bfloat16).float() for n in (-1, 1))
    inner, outer = (inner + middle.abs().float()) / 2, (outer + middle.abs().float()) / 2
    moved = (inner + places * (outer - inner)).copysign(middle.float())
    # At the very border a number may round to the next one; the largest number has no next.
    return torch.where(moved.bfloat16() == middle, moved, middle.float()) * (size != 0)
