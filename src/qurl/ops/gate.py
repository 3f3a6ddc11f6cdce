# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns cannot be iterated.)
"""The gradients of an MLP's gate, in one pass over memory.

    s = 1 / (1 + exp(-gate));   y = gate s up

    dgate = dy up s (1 + gate (1 - s));   dup = dy gate s

Everything is computed in FP32 and rounded once, to the dtype of the result. y is computed once
more, so that no one needs to keep it; if the next product read codes of y, what they stand for.

gate_up [N, 2 I] has the gates first, or gates and ups alternate, as in the engine's weights; its
gradient has the gates first, and codes of the gradient have the order of gate_up.

Shapes: N tokens, I intermediate channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up, next_power_of_2
from qurl.ops.rounding import divide, load_float, narrow, round_to_code, scale_for, store_rounded

TILE = 2048


@dataclass(frozen=True)
class CodedGradient:
    """Where codes of d gate_up * channel_scale go, with one scale per token."""

    channel_scale: Tensor  # [2 I], in the order of gate_up, as the codes
    codes: Tensor  # [N, 2 I]
    scale: Tensor  # [N]
    largest: float


def gate_gradients(
    dy: Tensor,
    gate_up: Tensor,
    *,
    y_scale: Tensor | None = None,
    is_integer: bool = False,
    is_alternating: bool = False,
    coded: CodedGradient | None = None,
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
    tensors = (dy, gate_up, y_scale, d_gate_up, y)
    if coded is None:
        tiles = divide_up(width, shape["TILE"])
        gate_gradients_kernel[(rows, tiles)](*tensors, **shape)
    else:
        outputs = (coded.channel_scale, coded.codes, coded.scale)
        # Eight columns of a tile per thread, and all threads that fit for the longest rows.
        warps = 8 if width <= 6 * 2048 else 16
        shape |= {"TILE": 256 * warps, "TILES": divide_up(width, 256 * warps), "num_warps": warps}
        shape |= {"LARGEST": coded.largest}
        gate_gradients_coded_kernel[(rows,)](*tensors, *outputs, **shape)
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
    dgate, dup, value = _gradients(dy, gate_up, row, first, WIDTH, TILE, ALTERNATING)
    at = d_gate_up + row * (2 * WIDTH) + column
    store_rounded(at, dgate, column < WIDTH)
    store_rounded(at + WIDTH, dup, column < WIDTH)
    _store_value(y, y_scale, value, row, column, WIDTH, GROUPS, GROUP, IS_INT)


@triton.jit
def gate_gradients_coded_kernel(
    dy,
    gate_up,
    y_scale,
    d_gate_up,
    y,
    channel_scale,
    codes,
    scale,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INT: tl.constexpr,
    ALTERNATING: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program per token, whose gradients stay in registers until their scale is known."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([TILE], tl.float32)
    folded = ()
    for tile in tl.static_range(TILES):
        column = tile * TILE + tl.arange(0, TILE)
        mask = column < WIDTH
        dgate, dup, value = _gradients(dy, gate_up, row, tile * TILE, WIDTH, TILE, ALTERNATING)
        at = d_gate_up + row * (2 * WIDTH) + column
        store_rounded(at, dgate, mask)
        store_rounded(at + WIDTH, dup, mask)
        _store_value(y, y_scale, value, row, column, WIDTH, GROUPS, GROUP, IS_INT)
        of_gate, of_up = _load_pair(channel_scale, tile * TILE, WIDTH, TILE, ALTERNATING)
        dgate *= of_gate
        dup *= of_up
        peak = tl.maximum(peak, tl.maximum(tl.abs(dgate), tl.abs(dup)))
        folded = folded + (dgate, dup)  # noqa: RUF005 (Triton has no unpacking)
    step = scale_for(tl.max(peak, 0), LARGEST)
    tl.store(scale + row, step)
    inverse = 1.0 / step
    for tile in tl.static_range(TILES):
        target = codes + row * (2 * WIDTH)
        dgate, dup = folded[2 * tile] * inverse, folded[2 * tile + 1] * inverse
        if ALTERNATING:
            column = 2 * tile * TILE + tl.arange(0, 2 * TILE)
            store_rounded(target + column, tl.interleave(dgate, dup), column < 2 * WIDTH)
        else:
            column = tile * TILE + tl.arange(0, TILE)
            store_rounded(target + column, dgate, column < WIDTH)
            store_rounded(target + WIDTH + column, dup, column < WIDTH)


@triton.jit
def _gradients(
    dy, gate_up, row, first, WIDTH: tl.constexpr, TILE: tl.constexpr, ALTERNATING: tl.constexpr
):
    """dgate, dup and y of TILE channels of a token."""
    column = first + tl.arange(0, TILE)
    upstream = load_float(dy + row * WIDTH + column, column < WIDTH)
    x, up = _load_pair(gate_up + row * (2 * WIDTH), first, WIDTH, TILE, ALTERNATING)
    share = 1.0 / (1.0 + tl.exp(-x))
    silu = x * share
    return upstream * up * (share + silu * (1 - share)), upstream * silu, silu * up


@triton.jit
def _load_pair(source, first, WIDTH: tl.constexpr, TILE: tl.constexpr, ALTERNATING: tl.constexpr):
    """Numbers of TILE gates and of their ups."""
    if ALTERNATING:
        column = 2 * first + tl.arange(0, 2 * TILE)
        both = load_float(source + column, column < 2 * WIDTH)
        gate, up = tl.split(tl.reshape(both, [TILE, 2]))
    else:
        column = first + tl.arange(0, TILE)
        gate = load_float(source + column, column < WIDTH)
        up = load_float(source + WIDTH + column, column < WIDTH)
    return gate, up


@triton.jit
def _store_value(
    y,
    y_scale,
    value,
    row,
    column,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INT: tl.constexpr,
):
    mask = column < WIDTH
    if y_scale is not None:
        step = tl.load(y_scale + row * GROUPS + column // GROUP, mask=mask, other=1.0)
        value = narrow(value, y.dtype.element_ty).to(tl.float32)  # as the quantizer read it
        value = round_to_code(divide(value, step), IS_INT) * step
    store_rounded(y + row * WIDTH + column, value, mask)
