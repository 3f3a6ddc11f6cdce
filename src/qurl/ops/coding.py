"""Gradients as factors of the next product, in one pass over memory.

    scale[m] = max_n |g[m, n] channel_scale[n]| / largest
    codes[m, n] = round(g[m, n] channel_scale[n] / scale[m])

A weight's scale runs along the sum of its input gradient, so it is folded into g beforehand, and
the codes of the weight serve as they are. If the rows of the weight are those of two layers in
turn, then so are the channels of codes and channel_scale; g has one layer after the other.

Shapes: M tokens, N channels in P parts of W.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up, next_power_of_2
from qurl.ops.rounding import load_float, scale_for, store_rounded

TILE = 4096
"""Numbers that a program holds at once."""


def code_gradient(
    g: Tensor, channel_scale: Tensor, codes: Tensor, scale: Tensor, largest: float, parts: int = 1
) -> None:
    """Write codes [M, N] and scale [M] of g [M, N]."""
    rows, width = g.shape
    assert codes.shape == g.shape
    assert channel_scale.numel() == width
    assert width % parts == 0
    assert all(tensor.is_contiguous() for tensor in (g, channel_scale, codes, scale))
    columns = min(next_power_of_2(width // parts), TILE // (2 * parts))
    tile: dict[str, Any] = {"W": width // parts, "P": parts, "COLUMNS": columns}
    tile |= {"ROWS": TILE // (parts * columns), "LARGEST": largest, "num_warps": 8}
    grid = (divide_up(rows, tile["ROWS"]),)
    code_gradient_kernel[grid](g, channel_scale, codes, scale, rows, **tile)


@triton.jit(do_not_specialize=["rows"])
def code_gradient_kernel(
    g,
    channel_scale,
    codes,
    scale,
    rows,
    W: tl.constexpr,
    P: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program per tile of rows; the second pass over them finds them in the cache."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, P)[None, :, None]
    first = g + row[:, None, None] * (P * W) + part * W
    peak = tl.zeros([ROWS], tl.float32)
    for start in range(0, W, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        factor = load_float(channel_scale + column * P + part, column < W)
        is_inside = (row < rows)[:, None, None] & (column < W)
        size = tl.abs(load_float(first + column, is_inside) * factor)
        peak = tl.maximum(peak, tl.max(tl.reshape(size, [ROWS, P * COLUMNS]), 1))
    step = scale_for(peak, LARGEST)
    tl.store(scale + row, step, mask=row < rows)
    inverse = (1.0 / step)[:, None]
    for start in range(0, W, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        factor = load_float(channel_scale + column * P + part, column < W)
        is_inside = (row < rows)[:, None, None] & (column < W)
        values = load_float(first + column, is_inside) * factor
        values = tl.reshape(tl.permute(values, (0, 2, 1)), [ROWS, P * COLUMNS])
        place = start * P + tl.arange(0, P * COLUMNS)[None, :]  # of a channel in the codes
        mask = (row < rows)[:, None] & (place < P * W)
        store_rounded(codes + row[:, None] * (P * W) + place, values * inverse, mask)
