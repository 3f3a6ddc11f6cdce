"""Gradients as factors of products of codes.

    input gradient    codes[m, n] = round(g[m, n] channel_scale[n] / scale[m])
                      scale[m] = max_n |g[m, n] channel_scale[n]| / largest

    weight gradient   codes[n, m] = round(g[m, n] token_scale[m] / scale[n])
                      scale[n] = max_m |g[m, n] token_scale[m]| / largest

The scale of the other factor runs along the sum, so it is folded into g beforehand, and the codes
of that factor serve as they are. If the rows of a weight are those of two layers in turn, then so
are the channels of the input gradient's codes and of channel_scale; g has one layer after the
other. Matrix units of 8 bits want both factors with the summed dimension last, so the weight
gradient's are transposed.

Shapes: M tokens, N channels in P parts of W.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up, next_power_of_2
from qurl.ops.rounding import from_magnitude, load_float, magnitude, scale_for, store_rounded

TILE = 8192
"""Numbers that a program holds at once: several rows, which share the channels' scales."""


def code_gradient(
    g: Tensor, channel_scale: Tensor, codes: Tensor, scale: Tensor, largest: float, parts: int = 1
) -> None:
    """Write codes [M, N] and scale [M] of g [M, N]."""
    rows, width = g.shape
    assert codes.shape == g.shape
    assert channel_scale.numel() == width
    assert width % parts == 0
    assert all(tensor.is_contiguous() for tensor in (g, channel_scale, codes, scale))
    columns = min(next_power_of_2(width // parts), TILE // (4 * parts))
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
    peak = tl.zeros([ROWS], tl.int32)
    for start in range(0, W, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        factor = load_float(channel_scale + column * P + part, column < W)
        is_inside = (row < rows)[:, None, None] & (column < W)
        size = magnitude(load_float(first + column, is_inside) * factor)
        peak = tl.maximum(peak, tl.max(tl.reshape(size, [ROWS, P * COLUMNS]), 1))
    step = scale_for(from_magnitude(peak, tl.float32), LARGEST)
    tl.store(scale + row, step, mask=row < rows)
    inverse = (1.0 / step)[:, None]
    for start in range(0, W, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        factor = load_float(channel_scale + column * P + part, column < W)
        is_inside = (row < rows)[:, None, None] & (column < W)
        values = load_float(first + column, is_inside) * factor
        if P > 1:
            values = tl.permute(values, (0, 2, 1))
        values = tl.reshape(values, [ROWS, P * COLUMNS])
        place = start * P + tl.arange(0, P * COLUMNS)[None, :]  # of a channel in the codes
        mask = (row < rows)[:, None] & (place < P * W)
        store_rounded(codes + row[:, None] * (P * W) + place, values * inverse, mask)


def code_columns(
    g: Tensor, token_scale: Tensor, codes: Tensor, scale: Tensor, largest: float
) -> None:
    """Write codes [N, M or more] and scale [N] of g [M, N], transposed; codes beyond M are zero."""
    rows, width = g.shape
    assert len(codes) == scale.numel() == width
    assert codes.shape[1] >= rows
    assert token_scale.numel() == rows
    assert all(tensor.is_contiguous() for tensor in (g, token_scale, codes, scale))
    peaks = g.new_zeros(width, dtype=torch.int32)
    tile: dict[str, Any] = {"ROWS": 32, "COLUMNS": 64, "STEPS": 16, "num_warps": 8}
    grid = (divide_up(width, tile["COLUMNS"]), divide_up(rows, tile["ROWS"] * tile["STEPS"]))
    column_peaks_kernel[grid](g, token_scale, peaks, rows, width, **tile)
    tile = {"ROWS": 64, "COLUMNS": 128, "LARGEST": largest, "num_warps": 4}
    grid = (divide_up(codes.shape[1], tile["ROWS"]), divide_up(width, tile["COLUMNS"]))
    code_columns_kernel[grid](
        g, token_scale, peaks, codes, scale, rows, width, codes.shape[1], **tile
    )


def transpose_codes(codes: Tensor, target: Tensor) -> Tensor:
    """Write codes [M, K] to [K, M or more], zero beyond M; returns which rows [M] are not zero.

    The scale of a zero row is 1. It must not be folded into g, where it would dwarf the others.
    """
    (rows, width), length = codes.shape, target.shape[1]
    assert len(target) == width
    assert length >= rows
    assert all(tensor.is_contiguous() for tensor in (codes, target))
    source, out = codes.view(torch.uint8), target.view(torch.uint8)
    tile: dict[str, Any] = {"ROWS": 128, "COLUMNS": 32, "num_warps": 4}
    grid = (divide_up(length, tile["ROWS"]), divide_up(width, tile["COLUMNS"]))
    largest = torch.zeros(rows, dtype=torch.int32, device=codes.device)
    transpose_codes_kernel[grid](source, out, largest, rows, width, length, **tile)
    return largest > 0


@triton.jit(do_not_specialize=["rows"])
def column_peaks_kernel(
    g,
    token_scale,
    peaks,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Bits of the largest magnitude in each column; one program per STEPS tiles of rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    peak = tl.zeros([ROWS, COLUMNS], tl.int32)
    for step in range(STEPS):
        row = (tl.program_id(1) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        factor = load_float(token_scale + row, row < rows)
        peak = tl.maximum(peak, magnitude(load_float(g + at, mask) * factor[:, None]))
    tl.atomic_max(peaks + column, tl.max(peak, 0), mask=column < width, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "length"])
def code_columns_kernel(
    g,
    token_scale,
    peaks,
    codes,
    scale,
    rows,
    width,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program per tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    peak = tl.load(peaks + column, mask=column < width, other=0)
    step = scale_for(from_magnitude(peak, tl.float32), LARGEST)
    tl.store(scale + column, step, mask=(column < width) & (tl.program_id(0) == 0))
    mask = (row < rows)[:, None] & (column < width)[None, :]
    factor = load_float(token_scale + row, row < rows)
    values = load_float(g + row.to(tl.int64)[:, None] * width + column[None, :], mask)
    values = values * factor[:, None] * (1.0 / step)[None, :]
    target = codes + column.to(tl.int64)[:, None] * length + row[None, :]
    is_inside = (column < width)[:, None] & (row < length)[None, :]
    store_rounded(target, tl.trans(values), is_inside)


@triton.jit(do_not_specialize=["rows", "length"])
def transpose_codes_kernel(
    source, out, largest, rows, width, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program per tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tile = tl.load(source + row.to(tl.int64)[:, None] * width + column[None, :], mask, 0)
    size = tl.max((tile & 0x7F).to(tl.int32), 1)  # FP8 has a zero with a sign
    tl.atomic_max(largest + row, size, mask=(row < rows) & (size > 0), sem="relaxed")
    target = out + column.to(tl.int64)[:, None] * length + row[None, :]
    tl.store(target, tl.trans(tile), (column < width)[:, None] & (row < length)[None, :])
