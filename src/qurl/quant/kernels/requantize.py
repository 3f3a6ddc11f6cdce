"""Quantizes a weight into the buffers that the engine computes with, in one pass over memory.

    scale = max|w| / largest;  codes = round(clamp(w / scale, -largest, largest))

to the bit what `qurl.quant.formats.quantize` gives, per row or per 128x128 tile. On the way the
codes that the buffer held are read, and those that change are counted. A weight costs the bytes of
its source (4 or 2), one for the code that was there and one for the new code; a row stays in
registers between finding its largest value and coding it, up to `LONGEST_IN_REGISTERS` columns.

Shapes: N output channels, K input channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qurl.quant.formats import Quantized

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_IN_REGISTERS = 32768
"""Columns; a longer row is read twice."""

# Loads of old codes that are under way while values are coded; each takes a register meanwhile.
_AHEAD = tl.constexpr(8)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
# Beyond it the FP32 grid is the integers, and the low bits of the sum are the integer.
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


def requantize_(source: Tensor, target: Quantized, flips: Tensor, *, pdl: bool = False) -> None:
    """Rewrite codes [N, K] and scale of `target` with those of source [N, K].

    `flips` (int32, shaped like the scale) receives how many codes under each scale changed as
    numbers: a zero that changes its sign does not count. Rows of the target may lie apart.
    """
    codes, scale, format = target.codes, target.scale, target.format
    rows, columns = codes.shape
    assert source.shape == codes.shape
    assert source.dtype in SOURCE_DTYPES
    assert codes.dtype == format.dtype
    assert scale.dtype == torch.float32
    assert flips.dtype == torch.int32
    assert flips.shape == scale.shape
    assert source.is_contiguous()
    assert flips.is_contiguous()
    assert codes.stride(1) == 1 or columns == 1
    assert scale.stride(1) == 1 or scale.shape[1] == 1
    arguments: dict[str, Any] = {
        "source": source,
        "codes": codes.view(torch.uint8),
        "scale": scale,
        "flips": flips,
        "scale_stride": scale.stride(0),
        "K": columns,
        "CODE_STRIDE": codes.stride(0),
        "LARGEST": float(format.weight_max),
        "IS_INT": format.is_integer,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    if format.block is not None:
        arguments |= {"num_rows": rows, "BLOCK": format.block, "ROWS": 8}
        arguments |= {"num_warps": 8, "maxnreg": 128}
        requantize_tiles_kernel[(scale.shape[1], scale.shape[0])](**arguments)
    elif columns > LONGEST_IN_REGISTERS:
        arguments |= {"CHUNK": 4096, "num_warps": 16}
        requantize_long_rows_kernel[(rows,)](**arguments)
    else:
        arguments |= row_tiling(columns, source.itemsize)
        requantize_rows_kernel[(rows,)](**arguments)


def row_tiling(columns: int, itemsize: int) -> dict[str, int]:
    """How a program holds a row in registers: columns per load, and warps.

    A thread loads 16 bytes at once. Short rows have few warps and long ones many registers: either
    way several programs share a multiprocessor, and one loads while another computes.
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
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, read once, in chunks that stay in registers."""
    _start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNK)
    codes += row * CODE_STRIDE
    values, held = (), ()
    for first in tl.static_range(0, K, CHUNK):
        column = first + columns
        values += (tl.load(source + row * K + column, mask=column < K, other=0.0),)
        if first < _AHEAD * CHUNK:
            held += (tl.load(codes + column, mask=column < K, other=0),)
    magnitude = _magnitude(values[0])
    for index in tl.static_range(1, len(values)):
        magnitude = tl.maximum(magnitude, _magnitude(values[index]))
    row_scale = _scale(tl.max(magnitude, axis=0), source.dtype.element_ty, LARGEST)
    changes = tl.zeros([CHUNK], tl.int32)
    for index in tl.static_range(len(values)):
        column = index * CHUNK + columns
        later = column + _AHEAD * CHUNK
        if index + _AHEAD < len(values):
            held += (tl.load(codes + later, mask=later < K, other=0),)
        code = _code(values[index], row_scale, IS_INT)
        changes = _count_changes(changes, code, held[index])
        tl.store(codes + column, code, mask=column < K)
    tl.store(scale + row * scale_stride, row_scale)
    tl.store(flips + row, tl.sum(changes, axis=0))


@triton.jit
def requantize_long_rows_kernel(
    source,
    codes,
    scale,
    flips,
    scale_stride,
    K: tl.constexpr,
    CODE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, read twice; the second time it comes from the cache."""
    _start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNK)
    magnitude = _magnitude(tl.zeros([CHUNK], source.dtype.element_ty))
    for first in range(0, K, CHUNK):
        column = first + columns
        value = tl.load(source + row * K + column, mask=column < K, other=0.0)
        magnitude = tl.maximum(magnitude, _magnitude(value))
    row_scale = _scale(tl.max(magnitude, axis=0), source.dtype.element_ty, LARGEST)
    changes = tl.zeros([CHUNK], tl.int32)
    for first in range(0, K, CHUNK):
        column = first + columns
        mask = column < K
        value = tl.load(source + row * K + column, mask=mask, other=0.0)
        held = tl.load(codes + row * CODE_STRIDE + column, mask=mask, other=0)
        code = _code(value, row_scale, IS_INT)
        changes = _count_changes(changes, code, held)
        tl.store(codes + row * CODE_STRIDE + column, code, mask=mask)
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of BLOCK x BLOCK, cut off at the edges of the weight; ROWS rows per load."""
    _start(PDL)
    tile_column, tile_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tile_row * BLOCK + tl.arange(0, ROWS)[:, None]
    column = tile_column * BLOCK + tl.arange(0, BLOCK)[None, :]
    values, held = (), ()
    for first in tl.static_range(0, BLOCK, ROWS):
        row = rows + first
        mask = (row < num_rows) & (column < K)
        values += (tl.load(source + row * K + column, mask=mask, other=0.0),)
        if first < _AHEAD * ROWS:
            held += (tl.load(codes + row * CODE_STRIDE + column, mask=mask, other=0),)
    magnitude = _magnitude(values[0])
    for index in tl.static_range(1, len(values)):
        magnitude = tl.maximum(magnitude, _magnitude(values[index]))
    tile_scale = _scale(tl.max(magnitude), source.dtype.element_ty, LARGEST)
    changes = tl.zeros([ROWS, BLOCK], tl.int32)
    for index in tl.static_range(len(values)):
        row = rows + index * ROWS
        if index + _AHEAD < len(values):
            later = row + _AHEAD * ROWS
            mask = (later < num_rows) & (column < K)
            held += (tl.load(codes + later * CODE_STRIDE + column, mask=mask, other=0),)
        code = _code(values[index], tile_scale, IS_INT)
        changes = _count_changes(changes, code, held[index])
        mask = (row < num_rows) & (column < K)
        tl.store(codes + row * CODE_STRIDE + column, code, mask=mask)
    tl.store(scale + tile_row * scale_stride + tile_column, tile_scale)
    tl.store(flips + tile_row * tl.cdiv(K, BLOCK) + tile_column, tl.sum(changes))


@triton.jit
def _start(PDL: tl.constexpr):
    """Wait for the kernel before, and let the next one be set up meanwhile."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _magnitude(value):
    """Bits of |value|. They sort as the numbers do, and NaN above all: a NaN is never lost."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = value.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@triton.jit
def _scale(magnitude, dtype, LARGEST: tl.constexpr):
    """The scale that takes the largest magnitude, given as bits of a `dtype`, to LARGEST."""
    if dtype.primitive_bitwidth == 32:
        amax = magnitude.to(dtype, bitcast=True)
    else:
        amax = magnitude.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    scale = tl.div_rn(amax, LARGEST)
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def _code(value, scale, IS_INT: tl.constexpr):
    """The byte that stores a value's code."""
    # No need to clamp: the quotient exceeds LARGEST by its last place at most, which rounds off.
    quotient = _divide(value.to(tl.float32), scale)
    if IS_INT:
        byte = (quotient + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True).to(tl.uint8)
    else:
        byte = _float8(quotient)
    return byte


@triton.jit
def _divide(x, scale):
    """x / scale, rounded once, for |x| <= 448 scale, in a third of a division's instructions.

        q = x * inverse;  excess = q * scale - x;  x / scale = q - excess * inverse

    with the rounded inverse = 1 / scale. One such step is enough: the excess is exact, which leaves
    less than 2^-22 of a last place of error before the last rounding, and all quotients that close
    to where it turns come out right. In this form a zero keeps its sign.
    """
    if _INTERPRETED:  # it rounds q * scale, which an FMA does not
        quotient = tl.div_rn(x, scale)
    else:
        # Below 2^-126 the excess would lose bits, so it is lifted where the scale is small.
        is_small = scale < 2.0**-60
        lift = tl.where(is_small, 2.0**64, 1.0)
        drop = tl.where(is_small, 2.0**-64, 1.0)
        inverse = tl.div_rn(1.0, scale)
        quotient = x * inverse
        excess = tl.fma(quotient, scale * lift, x * -lift)
        quotient = tl.fma(excess, inverse * -drop, quotient)
    return quotient


@triton.jit
def _float8(value):
    """The byte of the E4M3 number next to |value| <= 448, half to even.

    Its 4 bits of exponent have the bias 7, 3 are mantissa; below 2^-6 it is a multiple of 2^-9. By
    hand, because ptxas 12.8 forgets that something else than a store may want the pairs of FP8 that
    its own conversion gives: it crashes, or compares garbage. (The interpreter's loses carries.)
    """
    bits = _magnitude(value)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    steps = bits.to(tl.float32, bitcast=True) * 512.0 + _ROUND_TO_INTEGER
    small = steps.to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(bits.to(tl.float32, bitcast=True) < 2.0**-6, small, normal)
    code = tl.where(value == value, code, 0x7F)
    return (code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _count_changes(changes, code, held):
    """`changes`, plus 1 where the bytes of two codes differ as numbers.

    Bytes without their sign that are both 0 are the zeros of FP8; no integer code is -128.
    """
    return changes + ((code != held) & (((code | held) & 0x7F) != 0)).to(tl.int32)
