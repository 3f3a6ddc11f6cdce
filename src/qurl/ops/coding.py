"""Gradients as factors of the next product, in one pass over memory.

    scale[m] = max_n |g[m, n] channel_scale[n]| / largest
    codes[m, n] = round(g[m, n] channel_scale[n] / scale[m])

A weight's scale runs along the sum of its input gradient, so it is folded into g beforehand, and
the codes of the weight serve as they are.
Shapes: M tokens, N channels.
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
    g: Tensor, channel_scale: Tensor, codes: Tensor, scale: Tensor, largest: float
) -> None:
    """Write codes [M, N] and scale [M] of g [M, N]."""
    rows, width = g.shape
    assert codes.shape == g.shape
    assert channel_scale.numel() == width
    assert all(tensor.is_contiguous() for tensor in (g, channel_scale, codes, scale))
    columns = next_power_of_2(width)
    tile: dict[str, Any] = {"N": width, "ROWS": max(1, TILE // columns), "LARGEST": largest}
    tile["num_warps"] = min(16, max(4, columns // 512))
    programs = min(PROGRAMS, divide_up(rows, tile["ROWS"]))
    code_gradient_kernel[(programs,)](g, channel_scale, codes, scale, rows, **tile)


@triton.jit(do_not_specialize=["rows"])
def code_gradient_kernel(
    g,
    channel_scale,
    codes,
    scale,
    rows,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Programs take tiles of rows in turn, so the channels' scales are loaded once."""
    column = tl.arange(0, triton.next_power_of_2(N))
    factor = load_float(channel_scale + column, column < N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * N + column[None, :]
        mask = (row < rows)[:, None] & (column < N)[None, :]
        values = load_float(g + at, mask) * factor
        step = scale_for(tl.max(tl.abs(values), 1), LARGEST)
        tl.store(scale + row, step, mask=row < rows)
        store_rounded(codes + at, values * (1.0 / step)[:, None], mask)
