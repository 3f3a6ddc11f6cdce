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

from qurl.quant.formats import Quantized

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_IN_REGISTERS = 32768
"""Columns; a longer row is read twice."""

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Beyond it the FP32 grid is the integers, and the low bits of the sum are the integer.
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


def requantize_(source: Tensor, target: Quantized, flips: Tensor, *, pdl: bool = False) -> None:
    """Rewrite codes [N, K] and scale of `target` with those of source [N, K].

    `flips` (int32, shaped like the scale) receives how many codes under each scale changed as
    numbers: a zero that changes its sign does not count.
    """
    rows, columns = target.codes.shape
    assert source.shape == target.codes.shape
    assert source.dtype in SOURCE_DTYPES
    assert target.codes.dtype == target.format.dtype
    assert target.scale.dtype == torch.float32
    assert flips.dtype == torch.int32
    assert flips.shape == target.scale.shape
    tensors = (source, target.codes, target.scale, flips)
    assert all(t.is_contiguous() for t in tensors)
    arguments: dict[str, Any] = {
        "source": source,
        "codes": target.codes,
        "scale": target.scale,
        "flips": flips,
        "num_rows": rows,
        "K": columns,
        "LARGEST": float(target.format.weight_max),
        "IS_INT": target.format.is_integer,
        "PDL": pdl,
    }
    if target.format.block is not None:
        requantize_tiles_kernel[tuple(reversed(target.scale.shape))](
            **arguments, BLOCK=target.format.block, ROWS=8, num_warps=8, launch_pdl=pdl
        )
    elif columns > LONGEST_IN_REGISTERS:
        requantize_long_rows_kernel[(rows,)](**arguments, CHUNK=4096, num_warps=16, launch_pdl=pdl)
    else:
        requantize_rows_kernel[(rows,)](**arguments, **row_tiling(columns), launch_pdl=pdl)


def row_tiling(columns: int) -> dict[str, int]:
    """How a program holds a row in registers: columns per load, and warps.

    A thread loads 4 columns at once, which takes the same threads for source and codes. Short rows
    have few warps and long ones many registers: either way several programs share a multiprocessor,
    and one loads while another computes.
    """
    if columns > 8 * 32 * 76:
        warps = 16
    else:
        warps = min(8, triton.next_power_of_2(triton.cdiv(columns, 32 * 40)))
    tiling = {"CHUNK": 32 * 4 * warps, "num_warps": warps}
    return tiling | {"maxnreg": 128} if warps == 8 and columns > 8 * 32 * 40 else tiling


@triton.jit
def requantize_rows_kernel(
    source,
    codes,
    scale,
    flips,
    num_rows,
    K: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, read once, in chunks that stay in registers."""
    _start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNK)
    values, held = (), ()
    for first in tl.static_range(0, K, CHUNK):
        at = row * K + first + columns
        mask = first + columns < K
        values += (tl.load(source + at, mask=mask, other=0.0),)
        held += (tl.load(codes + at, mask=mask, other=0.0),)
    magnitude = _magnitude(values[0])
    for index in tl.static_range(1, len(values)):
        magnitude = tl.maximum(magnitude, _magnitude(values[index]))
    row_scale = _scale(tl.max(magnitude, axis=0), source.dtype.element_ty, LARGEST)
    changes = tl.zeros([CHUNK], tl.int32)
    for index in tl.static_range(len(values)):
        code = _code(values[index], row_scale, LARGEST, IS_INT)
        changes += _changes(code, held[index], IS_INT)
        column = index * CHUNK + columns
        tl.store(codes + row * K + column, code, mask=column < K)
    tl.store(scale + row, row_scale)
    tl.store(flips + row, tl.sum(changes, axis=0))


@triton.jit
def requantize_long_rows_kernel(
    source,
    codes,
    scale,
    flips,
    num_rows,
    K: tl.constexpr,
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
        at = row * K + first + columns
        value = tl.load(source + at, mask=first + columns < K, other=0.0)
        magnitude = tl.maximum(magnitude, _magnitude(value))
    row_scale = _scale(tl.max(magnitude, axis=0), source.dtype.element_ty, LARGEST)
    changes = tl.zeros([CHUNK], tl.int32)
    for first in range(0, K, CHUNK):
        at = row * K + first + columns
        mask = first + columns < K
        value = tl.load(source + at, mask=mask, other=0.0)
        held = tl.load(codes + at, mask=mask, other=0.0)
        code = _code(value, row_scale, LARGEST, IS_INT)
        changes += _changes(code, held, IS_INT)
        tl.store(codes + at, code, mask=mask)
    tl.store(scale + row, row_scale)
    tl.store(flips + row, tl.sum(changes, axis=0))


@triton.jit
def requantize_tiles_kernel(
    source,
    codes,
    scale,
    flips,
    num_rows,
    K: tl.constexpr,
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
        at = (rows + first) * K + column
        mask = (rows + first < num_rows) & (column < K)
        values += (tl.load(source + at, mask=mask, other=0.0),)
        held += (tl.load(codes + at, mask=mask, other=0.0),)
    magnitude = _magnitude(values[0])
    for index in tl.static_range(1, len(values)):
        magnitude = tl.maximum(magnitude, _magnitude(values[index]))
    tile_scale = _scale(tl.max(magnitude), source.dtype.element_ty, LARGEST)
    changes = tl.zeros([ROWS, BLOCK], tl.int32)
    for index in tl.static_range(len(values)):
        code = _code(values[index], tile_scale, LARGEST, IS_INT)
        changes += _changes(code, held[index], IS_INT)
        row = rows + index * ROWS
        tl.store(codes + row * K + column, code, mask=(row < num_rows) & (column < K))
    tile = tile_row * tl.cdiv(K, BLOCK) + tile_column
    tl.store(scale + tile, tile_scale)
    tl.store(flips + tile, tl.sum(changes))


@triton.jit
def _start(PDL: tl.constexpr):
    """Wait for the kernel before, and let the next one be set up meanwhile."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _magnitude(value):
    """Bits of |value|. They sort as the numbers do, and NaN above all: a NaN is never lost."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = value.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@triton.jit
def _scale(magnitude, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """The scale that takes the largest magnitude, given as bits of a DTYPE, to the largest code."""
    if DTYPE.primitive_bitwidth == 32:
        amax = magnitude.to(DTYPE, bitcast=True)
    else:
        amax = magnitude.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    scale = tl.div_rn(amax, LARGEST)
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def _code(value, scale, LARGEST: tl.constexpr, IS_INT: tl.constexpr):
    code = tl.clamp(_divide(value.to(tl.float32), scale), -LARGEST, LARGEST)
    if IS_INT:
        stored = (code + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    elif _INTERPRETED:
        stored = _float8_bits(code).to(tl.float8e4nv, bitcast=True)
    else:
        stored = code.to(tl.float8e4nv)
    return stored


@triton.jit
def _divide(x, scale):
    """x / scale, rounded once, for |x| <= 448 scale; a third of the instructions of a division.

    With inverse = -1 / scale, rounded:  n = x * inverse;  rest = x + n * scale;  n += rest * inverse
    and -n is the quotient: rest is known exactly, and no quotient of two FP32 numbers is as close to
    the middle between two others as n is to it. Kept negative, a zero does not lose its sign.
    """
    if _INTERPRETED:  # it rounds n * scale, which an FMA does not
        quotient = tl.div_rn(x, scale)
    else:
        # Below 2^-126 the rest would lose bits, so small rows are multiplied by a power of two.
        lift = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
        inverse = tl.div_rn(-1.0, scale)
        negative = x * inverse
        rest = tl.fma(negative, scale * lift, x * lift)
        quotient = tl.fma(rest, tl.div_rn(inverse, lift), negative) * -1.0
    return quotient


@triton.jit
def _changes(code, held, IS_INT: tl.constexpr):
    """1 where the codes differ as numbers. FP16 holds every FP8 number."""
    if IS_INT:
        changed = code != held
    else:
        changed = code.to(tl.float16) != held.to(tl.float16)
    return changed.to(tl.int32)


@triton.jit
def _float8_bits(value):
    """E4M3 of |value| <= 448, half to even; the interpreter's own conversion loses carries.

    4 bits of exponent with bias 7, 3 of mantissa; multiples of 2^-9 below 2^-6.
    """
    bits = _magnitude(value)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    steps = bits.to(tl.float32, bitcast=True) * 512.0 + _ROUND_TO_INTEGER
    small = steps.to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(bits.to(tl.float32, bitcast=True) < 2.0**-6, small, normal)
    code = tl.where(value == value, code, 0x7F)
    return (code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
