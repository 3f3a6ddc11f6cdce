# pyright: reportGeneralTypeIssues=false
# (To pyright `tl.static_range` cannot be iterated.)
"""Quantizes a weight into the engine's buffers, in one pass over memory.

    scale = max|w| / largest;  codes = round(clamp(w / scale, -largest, largest))

with w rounded to the trainer's dtype first. The bits equal those of `qurl.quant.formats.quantize`,
per row or per 128x128 tile. The kernels also read the old codes and count those that change. A
weight costs the bytes of its source (4 or 2), one for the old code and one for the new. A row of up
to `LONGEST_IN_REGISTERS` columns stays in registers while its largest value is found.

Shapes: N output channels, K input channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import DTYPES as SOURCE_DTYPES
from qurl.ops.rounding import (
    divide,
    float8_bits,
    from_magnitude,
    integer_bits,
    magnitude,
    narrow,
    scale_for,
)
from qurl.quant.formats import Quantized
from qurl.quant.kernels.packed import requantize_packed_

LONGEST_IN_REGISTERS = 32768
"""Columns; a longer row is read twice."""

# Loads of old codes in flight while values are coded; each takes a register.
_AHEAD = tl.constexpr(8)


def requantize_(
    source: Tensor, target: Quantized, flips: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """Rewrite codes [N, K] and scale of `target` with those of source [N, K] rounded to `dtype`.

    `flips` (int32, shaped like the scale) receives how many codes under each scale changed as
    numbers; a zero that changes its sign does not count. The target's rows may be strided. Flips of
    NVFP4 are counted by row [N, 1].
    """
    codes, scale, format = target.codes, target.scale, target.format
    if format.is_weight_only:
        requantize_packed_(source, target, flips, dtype)
        return
    rows, columns = codes.shape
    assert source.shape == codes.shape
    assert flips.shape == scale.shape
    assert (codes.dtype, scale.dtype, flips.dtype) == (format.dtype, torch.float32, torch.int32)
    assert all(tensor.is_contiguous() for tensor in (source, flips))
    assert all(tensor.stride(1) == 1 or tensor.shape[1] == 1 for tensor in (codes, scale))
    pointers = (source, codes.view(torch.uint8), scale, flips)
    shape: dict[str, Any] = {
        "K": columns,
        "CODE_STRIDE": codes.stride(0),
        "LARGEST": float(format.largest),
        "IS_INT": format.is_integer,
        "DTYPE": SOURCE_DTYPES[source.dtype if dtype == torch.float32 else dtype],
    }
    if format.block is not None:
        shape |= {"BLOCK": format.block, "ROWS": 8, "num_warps": 8, "maxnreg": 128}
        grid = (scale.shape[1], scale.shape[0])
        requantize_tiles_kernel[grid](*pointers, rows, scale.stride(0), **shape)
    else:
        is_long = columns > LONGEST_IN_REGISTERS
        tiling = {"CHUNK": 4096, "num_warps": 16} if is_long else _tile(columns, source.itemsize)
        shape |= {**tiling, "IS_LONG": is_long}
        requantize_rows_kernel[(rows,)](*pointers, scale.stride(0), **shape)


def _tile(columns: int, itemsize: int) -> dict[str, int]:
    """How a program holds a row in registers: columns per load, and warps.

    A thread loads 16 bytes at once. Short rows have few warps and long ones many registers, so
    several programs share a multiprocessor, and one loads while another computes.
    """
    per_warp = 32 * 16 // itemsize
    if columns <= 8 * 32 * 40:
        warps = 1 << (-(-columns // (32 * 40)) - 1).bit_length()
        return {"CHUNK": per_warp * warps, "num_warps": warps}
    if columns <= 8 * 32 * 76:
        return {"CHUNK": per_warp * 8, "num_warps": 8, "maxnreg": 128}  # two programs at a time
    return {"CHUNK": per_warp * 16, "num_warps": 16}


@triton.jit
def requantize_rows_kernel(
    source,
    codes,
    scale,
    flips,
    scale_stride,
    K: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LONG: tl.constexpr,
):
    """One row in chunks, which stay in registers; a long one is read again, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNK)
    codes += row * CODE_STRIDE
    if IS_LONG:
        peak = magnitude(tl.zeros([CHUNK], DTYPE))
        for first in range(0, K, CHUNK):
            column = first + columns
            value = _load(source + row * K + column, column < K, DTYPE)
            peak = tl.maximum(peak, magnitude(value))
        row_scale = _scale_of(peak, DTYPE, LARGEST)
        changes = tl.zeros([CHUNK], tl.int32)
        for first in range(0, K, CHUNK):
            column = first + columns
            value = _load(source + row * K + column, column < K, DTYPE)
            held = tl.load(codes + column, mask=column < K, other=0)
            changes += _recode(codes + column, value, held, row_scale, column < K, IS_INT)
    else:
        values, helds = (), ()
        for first in tl.static_range(0, K, CHUNK):
            column = first + columns
            values += (_load(source + row * K + column, column < K, DTYPE),)
            if first < _AHEAD * CHUNK:
                helds += (tl.load(codes + column, mask=column < K, other=0),)
        row_scale = _scale_of(_peak(values), DTYPE, LARGEST)
        changes = tl.zeros([CHUNK], tl.int32)
        for index in tl.static_range(len(values)):
            column = index * CHUNK + columns
            later = column + _AHEAD * CHUNK
            if index + _AHEAD < len(values):
                helds += (tl.load(codes + later, mask=later < K, other=0),)
            value, held = values[index], helds[index]
            changes += _recode(codes + column, value, held, row_scale, column < K, IS_INT)
    tl.store(scale + row * scale_stride, row_scale)
    tl.store(flips + row, tl.sum(changes, axis=0))


@triton.jit
def requantize_tiles_kernel(
    source,
    codes,
    scale,
    flips,
    num_rows,
    scale_stride,
    K: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One tile of BLOCK x BLOCK, cut off at the edges of the weight; ROWS rows per load."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tile_row * BLOCK + tl.arange(0, ROWS)[:, None]
    column = tile_column * BLOCK + tl.arange(0, BLOCK)[None, :]
    values, held = (), ()
    for first in tl.static_range(0, BLOCK, ROWS):
        row = rows + first
        mask = (row < num_rows) & (column < K)
        values += (_load(source + row * K + column, mask, DTYPE),)
        if first < _AHEAD * ROWS:
            held += (tl.load(codes + row * CODE_STRIDE + column, mask=mask, other=0),)
    tile_scale = _scale_of(_peak(values), DTYPE, LARGEST)
    changes = tl.zeros([ROWS, BLOCK], tl.int32)
    for index in tl.static_range(len(values)):
        row = rows + index * ROWS
        if index + _AHEAD < len(values):
            later = row + _AHEAD * ROWS
            mask = (later < num_rows) & (column < K)
            held += (tl.load(codes + later * CODE_STRIDE + column, mask=mask, other=0),)
        mask = (row < num_rows) & (column < K)
        pointers = codes + row * CODE_STRIDE + column
        changes += _recode(pointers, values[index], held[index], tile_scale, mask, IS_INT)
    tl.store(scale + tile_row * scale_stride + tile_column, tile_scale)
    tl.store(flips + tile_row * tl.cdiv(K, BLOCK) + tile_column, tl.sum(changes))


@triton.jit
def _load(source, mask, DTYPE: tl.constexpr):
    """Weights as the trainer computes with them."""
    value = tl.load(source, mask=mask, other=0.0)
    if value.dtype != DTYPE:
        value = narrow(value.to(tl.float32), DTYPE)
    return value


@triton.jit
def _peak(values):
    """The largest magnitudes at each place of several tiles."""
    peak = magnitude(values[0])
    for index in tl.static_range(1, len(values)):
        peak = tl.maximum(peak, magnitude(values[index]))
    return peak


@triton.jit
def _scale_of(peak, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    return scale_for(from_magnitude(tl.max(peak), DTYPE), LARGEST)


@triton.jit
def _recode(pointers, value, held, scale, mask, IS_INT: tl.constexpr):
    """Store the codes of values; 1 for each that differs as a number from the code `held` before.

    If two bytes are 0 without their signs, they are zeros of FP8; no integer code is -128.
    """
    quotient = divide(value.to(tl.float32), scale)
    code = integer_bits(quotient).to(tl.uint8) if IS_INT else float8_bits(quotient)
    tl.store(pointers, code, mask=mask)
    return ((code != held) & (((code | held) & 0x7F) != 0)).to(tl.int32)
