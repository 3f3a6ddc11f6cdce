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
"""Numbers that a program holds at once, unless a row is longer."""
PROGRAMS = 132 * 4


def code_gradient(
    g: Tensor, channel_scale: Tensor, codes: Tensor, scale: Tensor, largest: float, parts: int = 1
) -> None:
    """Write codes [M, N] and scale [M] of g [M, N]."""
    rows, width = g.shape
    assert codes.shape == g.shape
    assert channel_scale.numel() == width
    assert width % parts == 0
    assert all(tensor.is_contiguous() for tensor in (g, channel_scale, codes, scale))
    columns = parts * next_power_of_2(width // parts)
    tile: dict[str, Any] = {"W": width // parts, "P": parts, "ROWS": max(1, TILE // columns)}
    tile |= {"LARGEST": largest, "num_warps": min(16, max(4, columns // 512))}
    programs = min(PROGRAMS, divide_up(rows, tile["ROWS"]))
    code_gradient_kernel[(programs,)](g, channel_scale, codes, scale, rows, **tile)


@triton.jit(do_not_specialize=["rows"])
def code_gradient_kernel(
    g,
    channel_scale,
    codes,
    scale,
    rows,
    W: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Programs take tiles of rows in turn, so the channels' scales are loaded once."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(W)
    part = tl.arange(0, P)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    place = tl.arange(0, P * COLUMNS)[None, :]  # of a channel in the codes
    factor = load_float(channel_scale + column * P + part, column < W)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None, None] * (P * W) + part * W + column
        is_inside = (row < rows)[:, None, None] & (column < W)
        values = load_float(g + at, is_inside) * factor
        values = tl.reshape(tl.permute(values, (0, 2, 1)), [ROWS, P * COLUMNS])
        step = scale_for(tl.max(tl.abs(values), 1), LARGEST)
        tl.store(scale + row, step, mask=row < rows)
        target = codes + row[:, None] * (P * W) + place
        mask = (row < rows)[:, None] & (place < P * W)
        store_rounded(target, values * (1.0 / step)[:, None], mask)
