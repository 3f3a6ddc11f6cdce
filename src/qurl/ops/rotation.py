"""Rotary positions of queries and keys, and their gradients, in one pass over memory.

    y1 = x1 cos1 - x2 sin1        dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2        dx2 = dy2 cos2 - dy1 sin1

where 1 and 2 are the halves of a head. Computed in FP32 and rounded once.
Shapes: N tokens, P angles, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.rounding import narrow

TILE = 2048
"""Pairs of numbers that a program rotates."""


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, is_gradient: bool = False
) -> Tensor:
    """y [N, H, D] of x, or with `is_gradient` dx of dy, in `dtype`.

    cos and sin are [P, D]; tokens beyond the first P take them from the first again.
    """
    tokens, heads, size = x.shape
    assert size % 2 == 0
    assert cos.shape == sin.shape == (len(cos), size)
    assert tokens % len(cos) == 0
    assert cos.dtype == sin.dtype
    for tensor in (x, cos, sin):
        assert tensor.is_contiguous()
    out = torch.empty_like(x, dtype=dtype)
    lanes = triton.next_power_of_2(size // 2)
    rows = max(1, TILE // lanes)
    shape: dict[str, Any] = {
        "HEADS": heads,
        "HALF": size // 2,
        "IS_GRADIENT": is_gradient,
        "ROWS": rows,
        "LANES": lanes,
        "num_warps": 4,
    }
    grid = (-(-tokens * heads // rows),)
    rotate_pairs_kernel[grid](x, cos, sin, out, tokens * heads, len(cos), **shape)
    return out


@triton.jit(do_not_specialize=["rows", "angles"])
def rotate_pairs_kernel(
    x,
    cos,
    sin,
    out,
    rows,
    angles,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per tile of rows, each a head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    is_inside = (row < rows)[:, None] & (lane < HALF)[None, :]
    first = row[:, None] * (2 * HALF) + lane[None, :]
    angle = (row // HEADS % angles)[:, None] * (2 * HALF) + lane[None, :]
    x1 = tl.load(x + first, mask=is_inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + first + HALF, mask=is_inside, other=0.0).to(tl.float32)
    cos1 = tl.load(cos + angle, mask=is_inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + angle + HALF, mask=is_inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=is_inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + angle + HALF, mask=is_inside, other=0.0).to(tl.float32)
    if IS_GRADIENT:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    tl.store(out + first, narrow(y1, out.dtype.element_ty), mask=is_inside)
    tl.store(out + first + HALF, narrow(y2, out.dtype.element_ty), mask=is_inside)
