"""Rotary positions of queries and keys, and their gradients, in one pass over memory.

    y1 = x1 cos1 - x2 sin1        dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2        dx2 = dy2 cos2 - dy1 sin1

for the halves 1 and 2 of a head. Computed in FP32 and rounded once, or with scales to what an FP8
cache would give back (`qurl.quant.kv`). Values do not turn, but are rounded likewise.
Shapes: N tokens, P angles, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import EXACT, divide_up, next_power_of_2
from qurl.ops.rounding import (
    divide_clamped,
    load_float,
    narrow,
    round_to_code,
    store_rounded,
)

TILE = 2048
"""Pairs of numbers that a program rotates."""
Options = dict[str, Any]


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    is_gradient: bool = False,
    scale: Tensor | None = None,
    center: Tensor | None = None,
) -> Tensor:
    """y [N, H, D] of x, or with `is_gradient` dx of dy, written to `out`.

    cos and sin are [P, D]; token n takes row n % P. The heads of a token lie side by side in x and
    out; their tokens may lie apart. With scale [H] and center [H, D], y is rounded to FP8 codes.
    """
    assert cos.shape == sin.shape == (len(cos), x.shape[2])
    assert len(x) % len(cos) == 0
    assert cos.dtype == sin.dtype
    assert all(tensor.is_contiguous() for tensor in (cos, sin))
    assert (scale is None) == (center is None)
    angles: Options = {"cos": cos, "sin": sin, "angles": len(cos)}
    return _launch(x, out, angles | {"scale": scale, "center": center}, is_gradient)


def round_values(x: Tensor, out: Tensor, scale: Tensor) -> Tensor:
    """x [N, H, D] rounded to FP8 codes of scale [H], written to `out`; memory as for `rotate`."""
    absent: Options = dict.fromkeys(("cos", "sin", "center"))
    return _launch(x, out, absent | {"angles": 1, "scale": scale}, is_gradient=False)


def _launch(x: Tensor, out: Tensor, options: Options, is_gradient: bool) -> Tensor:
    tokens, heads, size = x.shape
    assert size % 2 == 0
    assert out.shape == x.shape
    assert all(tensor.stride()[1:] == (size, 1) for tensor in (x, out))
    half = size // 2
    rows = max(1, TILE // next_power_of_2(half))
    shape: Options = {"HEADS": heads, "HALF": half, "IS_GRADIENT": is_gradient, "ROWS": rows}
    strides: Options = {"x_stride": x.stride(0), "out_stride": out.stride(0)}
    args: Options = {**options, **strides, **shape, **EXACT}
    rotate_pairs_kernel[(divide_up(tokens * heads, rows),)](x, out, rows=tokens * heads, **args)
    return out


@triton.jit(do_not_specialize=["rows", "angles"])
def rotate_pairs_kernel(
    x,
    out,
    cos,
    sin,
    angles,
    scale,
    center,
    rows,
    x_stride,
    out_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per tile of rows, each a head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, triton.next_power_of_2(HALF))
    is_inside = (row < rows)[:, None] & (lane < HALF)[None, :]
    place = (row % HEADS * (2 * HALF))[:, None] + lane[None, :]
    first = x + (row // HEADS * x_stride)[:, None] + place
    target = out + (row // HEADS * out_stride)[:, None] + place
    x1 = load_float(first, is_inside)
    x2 = load_float(first + HALF, is_inside)
    y1, y2 = x1, x2
    if cos is not None:
        angle = (row // HEADS % angles)[:, None] * (2 * HALF) + lane[None, :]
        cos1 = load_float(cos + angle, is_inside)
        cos2 = load_float(cos + angle + HALF, is_inside)
        sin1 = load_float(sin + angle, is_inside)
        sin2 = load_float(sin + angle + HALF, is_inside)
        if IS_GRADIENT:
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
    if scale is not None:
        step = tl.load(scale + row % HEADS)[:, None]
        y1 = narrow(y1, out.dtype.element_ty).to(tl.float32)
        y2 = narrow(y2, out.dtype.element_ty).to(tl.float32)
        if center is not None:
            y1 -= load_float(center + place, is_inside)
            y2 -= load_float(center + place + HALF, is_inside)
        y1 = round_to_code(divide_clamped(y1, step), False) * step
        y2 = round_to_code(divide_clamped(y2, step), False) * step
    store_rounded(target, y1, is_inside)
    store_rounded(target + HALF, y2, is_inside)
