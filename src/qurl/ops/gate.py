# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns cannot be iterated.)
"""The gradients of an MLP's gate, in one pass over memory.

    s = 1 / (1 + exp(-gate));   y = gate s up

    dgate = dy up s (1 + gate (1 - s));   dup = dy gate s

Everything is computed in FP32 and rounded once, to the dtype of the result. y is computed once
more, so that no one needs to keep it; if the next product read codes of y, what they stand for.

gate_up [N, 2 I] has the gates first, or gates and ups alternate, as in the engine's weights; its
gradient has the gates first.

Shapes: N tokens, I intermediate channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up, next_power_of_2
from qurl.ops.rounding import divide, load_float, narrow, round_to_code, store_rounded

TILE = 2048


def gate_gradients(
    dy: Tensor,
    gate_up: Tensor,
    *,
    y_scale: Tensor | None = None,
    is_integer: bool = False,
    is_alternating: bool = False,
) -> tuple[Tensor, Tensor]:
    """d gate_up [N, 2 I] from dy [N, I], and y [N, I].

    With `y_scale` [N, groups], y is what its codes stand for: integers, or else E4M3.
    """
    rows, width = dy.shape
    assert gate_up.shape == (rows, 2 * width)
    assert all(tensor.is_contiguous() for tensor in (dy, gate_up))
    d_gate_up, y = torch.empty_like(gate_up), torch.empty_like(dy)
    groups = 1 if y_scale is None else y_scale.shape[1]
    shape: dict[str, Any] = {
        "WIDTH": width,
        "GROUPS": groups,
        "GROUP": width if groups == 1 else 128,
        "IS_INT": is_integer,
        "ALTERNATING": is_alternating,
        "TILE": min(TILE, next_power_of_2(width)),
        "num_warps": 4,
    }
    tiles = divide_up(width, shape["TILE"])
    gate_gradients_kernel[(rows, tiles)](dy, gate_up, y_scale, d_gate_up, y, **shape)
    return d_gate_up, y


@triton.jit
def gate_gradients_kernel(
    dy,
    gate_up,
    y_scale,
    d_gate_up,
    y,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INT: tl.constexpr,
    ALTERNATING: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per token and tile of channels."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    column = first + tl.arange(0, TILE)
    mask = column < WIDTH
    upstream = load_float(dy + row * WIDTH + column, mask)
    source = gate_up + row * (2 * WIDTH)
    if ALTERNATING:
        pair = 2 * first + tl.arange(0, 2 * TILE)
        both = load_float(source + pair, pair < 2 * WIDTH)
        x, up = tl.split(tl.reshape(both, [TILE, 2]))
    else:
        x = load_float(source + column, mask)
        up = load_float(source + WIDTH + column, mask)
    share = 1.0 / (1.0 + tl.exp(-x))
    silu = x * share
    at = d_gate_up + row * (2 * WIDTH) + column
    store_rounded(at, upstream * up * (share + silu * (1 - share)), mask)
    store_rounded(at + WIDTH, upstream * silu, mask)
    value = silu * up
    if y_scale is not None:
        step = tl.load(y_scale + row * GROUPS + column // GROUP, mask=mask, other=1.0)
        value = narrow(value, y.dtype.element_ty).to(tl.float32)  # as the quantizer read it
        value = round_to_code(divide(value, step), IS_INT) * step
    store_rounded(y + row * WIDTH + column, value, mask)
