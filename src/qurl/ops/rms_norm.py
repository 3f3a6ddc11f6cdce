"""RMSNorm and its gradients, in one pass over memory each way.

    rms = sqrt(mean x^2 + eps);   y = weight x / rms

    g = weight dy / rms;   dx = g - x mean(g x) / rms^2;   dweight = sum over rows of dy x / rms

Everything is computed in FP32 and rounded once, to the dtype of the result.
Shapes: N rows, H numbers of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up, next_power_of_2
from qurl.ops.rounding import load_float, store_rounded

TILE = 2048
"""Numbers that a program holds at once, unless a row is longer."""
PROGRAMS = 512
"""Most programs that add up the weight's gradient."""


def normalize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y [N, H] in `dtype` and 1 / rms [N], from x [N, H] and weight [H]."""
    y = torch.empty_like(x, dtype=dtype)
    inverse = x.new_empty(len(x), dtype=torch.float32)
    programs, tile = _tiling(x, weight)
    norm_kernel[(programs,)](x, weight, y, inverse, len(x), eps, **tile)
    return y, inverse


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    *,
    onto: Tensor | None = None,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dx [N, H] in x's dtype, added to `onto` if given, and dweight [H] in FP32.

    `rounded` [N, H] receives dx once more, in its own dtype.
    """
    assert all(t is None or t.shape == x.shape for t in (dy, onto, rounded))
    assert all(t is None or t.is_contiguous() for t in (dy, onto, rounded))
    dx = torch.empty_like(x)
    programs, tile = _tiling(x, weight)
    programs = max(1, min(PROGRAMS, programs))
    parts = x.new_empty(programs, x.shape[1], dtype=torch.float32)
    tensors = (dy, x, weight, inverse, onto, dx, rounded, parts)
    norm_gradients_kernel[(programs,)](*tensors, len(x), **tile)
    return dx, parts.sum(0)


def _tiling(x: Tensor, weight: Tensor) -> tuple[int, dict[str, Any]]:
    """Tiles of x, and the constants of a launch."""
    assert weight.shape == x.shape[1:]
    assert all(tensor.is_contiguous() for tensor in (x, weight))
    columns = next_power_of_2(len(weight))
    rows = max(1, TILE // columns)
    warps = min(16, max(4, columns // 1024))
    return divide_up(len(x), rows), {"H": len(weight), "ROWS": rows, "num_warps": warps}


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(x, weight, y, inverse, rows, eps, H: tl.constexpr, ROWS: tl.constexpr):
    """One program per tile of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(H))
    at = row[:, None] * H + column[None, :]
    is_inside = (row < rows)[:, None] & (column < H)[None, :]
    values = load_float(x + at, is_inside)
    # In FP64: an engine adds up in another order (`rotate_and_store`) and gets the same.
    squares = (values * values).to(tl.float64)
    scale = tl.rsqrt((tl.sum(squares, 1) / H).to(tl.float32) + eps)
    factor = load_float(weight + column, column < H)
    result = values * scale[:, None] * factor[None, :]
    store_rounded(y + at, result, is_inside)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_gradients_kernel(
    dy,
    x,
    weight,
    inverse,
    onto,
    dx,
    rounded,
    parts,
    rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Programs take tiles of rows in turn; each stores its sum as a row of `parts`."""
    column = tl.arange(0, triton.next_power_of_2(H))
    factor = load_float(weight + column, column < H)
    total = tl.zeros([ROWS, triton.next_power_of_2(H)], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * H + column[None, :]
        is_inside = (row < rows)[:, None] & (column < H)[None, :]
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        unit = load_float(x + at, is_inside) * scale
        upstream = load_float(dy + at, is_inside)
        total += upstream * unit
        slope = upstream * factor[None, :]
        shared = tl.sum(slope * unit, 1)[:, None] / H
        result = (slope - unit * shared) * scale
        if onto is not None:
            result += load_float(onto + at, is_inside)
        store_rounded(dx + at, result, is_inside)
        if rounded is not None:
            store_rounded(rounded + at, result, is_inside)
    tl.store(parts + tl.program_id(0) * H + column, tl.sum(total, 0), mask=column < H)
