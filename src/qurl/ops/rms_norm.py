# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns cannot be iterated.)
"""RMSNorm and its gradients, in one pass over memory each way.

    rms = sqrt(mean x^2 + eps);   y = weight x / rms

    g = weight dy / rms;   dx = g - x mean(g x) / rms^2;   dweight = sum over rows of dy x / rms

Everything is computed in FP32 and rounded once, into the dtype of what is stored.
Shapes: N rows, H numbers of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.rounding import narrow

TILE = 2048
"""Numbers that a program has at once, where a row is not longer."""
PROGRAMS = 512
"""At most so many add up the weight's gradient, each over rows of its own."""


def normalize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y [N, H] in `dtype` and 1 / rms [N], from x [N, H] and weight [H]."""
    _check(x, weight)
    rows, hidden = x.shape
    y = torch.empty_like(x, dtype=dtype)
    inverse = x.new_empty(rows, dtype=torch.float32)
    tile = _tile(hidden)
    norm_kernel[(-(-rows // tile["ROWS"]),)](x, weight, y, inverse, rows, eps, **tile)
    return y, inverse


def gradients(dy: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """dx [N, H] in x's dtype and dweight [H] in FP32."""
    _check(x, weight)
    assert dy.shape == x.shape
    assert dy.is_contiguous()
    rows, hidden = x.shape
    dx = torch.empty_like(x)
    tile = _tile(hidden)
    programs = max(1, min(PROGRAMS, -(-rows // tile["ROWS"])))
    parts = x.new_empty(programs, hidden, dtype=torch.float32)
    norm_gradients_kernel[(programs,)](dy, x, weight, inverse, dx, parts, rows, **tile)
    return dx, parts.sum(0)


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape == x.shape[1:]


def _tile(hidden: int) -> dict[str, Any]:
    columns = triton.next_power_of_2(hidden)
    rows = max(1, TILE // columns)
    warps = min(16, max(4, columns // 1024))
    return {"H": hidden, "ROWS": rows, "COLUMNS": columns, "num_warps": warps}


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    weight,
    y,
    inverse,
    rows,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per tile of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * H + column[None, :]
    is_inside = (row < rows)[:, None] & (column < H)[None, :]
    values = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / H + eps)
    factor = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    result = values * scale[:, None] * factor[None, :]
    tl.store(y + at, narrow(result, y.dtype.element_ty), mask=is_inside)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_gradients_kernel(
    dy,
    x,
    weight,
    inverse,
    dx,
    parts,
    rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs take tiles of rows in turn; what each adds up is a row of `parts`."""
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * H + column[None, :]
        is_inside = (row < rows)[:, None] & (column < H)[None, :]
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(dy + at, mask=is_inside, other=0.0).to(tl.float32)
        total += upstream * unit
        slope = upstream * factor[None, :]
        shared = tl.sum(slope * unit, 1)[:, None] / H
        result = (slope - unit * shared) * scale
        tl.store(dx + at, narrow(result, dx.dtype.element_ty), mask=is_inside)
    tl.store(parts + tl.program_id(0) * H + column, tl.sum(total, 0), mask=column < H)
