"""How kernels divide and round: to the bit what torch does with the same numbers.

    scale = max|x| / largest, or 1 if that is subnormal;  codes = round(x / scale)

No code needs clamping: x / scale exceeds the largest code by at most its last place, which rounds
off. Kernels that add products and promise torch's bits are launched with `EXACT`; these functions
have the same bits without it.

Triton's interpreter truncates to BF16, loses carries, subnormals and NaN on the way to FP8, and has
no fused multiply-add; `INTERPRETED` branches do the same by other means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_FP8_MAX = tl.constexpr(448.0)
# Beyond it the FP32 grid is the integers, and the low bits of the sum are the integer.
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def load_float(pointers, mask):
    """Numbers in FP32, zero outside the mask."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rounded(pointers, values, mask):
    """Store FP32 values, rounded once to what the pointers point to."""
    tl.store(pointers, narrow(values, pointers.dtype.element_ty), mask=mask)


@triton.jit
def magnitude(values):
    """Bits of |values|. They sort as the numbers do, with NaN above all, so no NaN is lost."""
    if values.dtype.primitive_bitwidth == 32:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = values.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@triton.jit
def from_magnitude(bits, dtype):
    """The FP32 number whose `magnitude` in `dtype` has these bits."""
    if dtype.primitive_bitwidth == 32:
        number = bits.to(dtype, bitcast=True)
    else:
        number = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return number


@triton.jit
def scale_for(amax, LARGEST: tl.constexpr):
    """The scale that takes amax to the code LARGEST."""
    scale = tl.div_rn(amax, LARGEST)
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def divide(values, scale):
    """values / scale, rounded once, for |values| <= 448 scale, in a third of a division's work.

        q = x * inverse;  excess = q * scale - x;  x / scale = q - excess * inverse

    with the rounded inverse = 1 / scale, one for all values. One such step is enough: the excess is
    exact, which leaves less than 2^-22 of a last place of error before the last rounding, and all
    quotients that close to a tie come out right. In this form a zero keeps its sign. Quotients
    below 2^-40, whose codes are 0, may be off.
    """
    if INTERPRETED:  # it rounds q * scale, which an FMA does not
        quotient = tl.div_rn(values, scale)
    else:
        # Below 2^-126 the excess would lose bits, so it is lifted where the scale is small.
        is_small = scale < 2.0**-60
        lift = tl.where(is_small, 2.0**64, 1.0)
        drop = tl.where(is_small, 2.0**-64, 1.0)
        inverse = tl.div_rn(1.0, scale)
        quotient = values * inverse
        excess = tl.fma(quotient, scale * lift, values * -lift)
        quotient = tl.fma(excess, inverse * -drop, quotient)
    return quotient


@triton.jit
def divide_clamped(values, scale):
    """values / scale within the range of FP8."""
    # Clamp first, so that the division cannot overflow; 448 scale / scale rounds to 448.
    bound = _FP8_MAX * scale
    return divide(tl.clamp(values, -bound, bound, tl.PropagateNan.ALL), scale)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """FP32 values in a narrower dtype, rounded half to even; INT8 takes values within +-127."""
    if dtype == tl.int8:
        narrowed = integer_bits(values).to(tl.int8)
    elif INTERPRETED and dtype == tl.bfloat16:
        narrowed = _bfloat16_bits(values).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED and dtype == tl.float8e4nv:
        narrowed = float8_bits(values).to(tl.float8e4nv, bitcast=True)
    else:
        narrowed = values.to(dtype)
    return narrowed


@triton.jit
def integer_bits(values):
    """INT32 whose low 22 bits are the integers next to the values, half to even.

    It avoids a conversion, which runs at a quarter of an addition's rate.
    """
    return (values + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True)


@triton.jit
def float8_bits(values):
    """Bytes of the E4M3 numbers next to |values| <= 448, half to even.

    E4M3 has 4 bits of exponent with bias 7 and 3 bits of mantissa; below 2^-6 it is a multiple of
    2^-9. Use it where a kernel does more with a code than store it: ptxas 12.8 crashes or compares
    garbage when anything but a store uses the pairs of FP8 that its own conversion gives.
    """
    bits = magnitude(values)
    absolute = bits.to(tl.float32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = integer_bits(absolute * 512.0) & 0xFF
    code = tl.where(absolute < 2.0**-6, small, normal)
    code = tl.where(values == values, code, 0x7F)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_to_code(values, IS_INT: tl.constexpr):
    """FP32 values of the codes next to the values: integers, or E4M3 numbers of at most 448."""
    if IS_INT:
        rounded = (values + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
    else:
        bits = values.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        small = (values * 512.0 + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
        is_small = tl.abs(values) < 2.0**-6
        rounded = tl.where(is_small, small * (1 / 512.0), normal.to(tl.float32, bitcast=True))
        rounded = tl.where(values == values, rounded, values)
    return rounded


@triton.jit
def as_factor(tile):
    """A tile as `tl.dot` takes it: the interpreter would multiply the bits of BF16."""
    if INTERPRETED and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _bfloat16_bits(values):
    bits = values.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (tl.where(values == values, rounded, bits) >> 16).to(tl.int16)
