"""The gradients of an MLP's gate, in one pass over memory.

    s = 1 / (1 + exp(-gate));   y = gate s up

    dgate = dy up s (1 + gate (1 - s));   dup = dy gate s

Everything is computed in FP32 and rounded once, to the dtype of the result.
Shapes: N tokens, I intermediate channels; gate and up lie side by side in [N, 2 I].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up, next_power_of_2
from qurl.ops.rounding import load_float, store_rounded

TILE = 2048


def gate_gradients(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """d gate_up [N, 2 I] from dy [N, I], and y [N, I] again, so that no one needs to keep it."""
    rows, width = dy.shape
    assert gate_up.shape == (rows, 2 * width)
    assert all(tensor.is_contiguous() for tensor in (dy, gate_up))
    d_gate_up, y = torch.empty_like(gate_up), torch.empty_like(dy)
    tile = min(TILE, next_power_of_2(width))
    gate_gradients_kernel[(rows, divide_up(width, tile))](
        dy, gate_up, d_gate_up, y, WIDTH=width, TILE=tile, num_warps=4
    )
    return d_gate_up, y


@triton.jit
def gate_gradients_kernel(dy, gate_up, d_gate_up, y, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """One program per token and tile of channels."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    at = row * WIDTH + column
    of_gate = row * (2 * WIDTH) + column
    of_up = of_gate + WIDTH
    upstream = load_float(dy + at, mask)
    x = load_float(gate_up + of_gate, mask)
    value = load_float(gate_up + of_up, mask)
    share = tl.sigmoid(x)
    store_rounded(d_gate_up + of_gate, upstream * value * share * (1 + x * (1 - share)), mask)
    store_rounded(d_gate_up + of_up, upstream * x * share, mask)
    store_rounded(y + at, x / (1.0 + tl.exp(-x)) * value, mask)
