# pyright: reportGeneralTypeIssues=false
# (To pyright neither `tl.static_range` nor what a jitted function returns can be iterated.)
"""What row-wise kernels share: reading a `Product`, rounding, quantizing a row in registers.

    finish(p) = (acc[0] + ... + acc[S - 1]) * scale_x * scale_w + bias,  rounded once to `dtype`

Every step rounds on its own, as in torch: kernels that call these functions are launched with
`EXACT`, which keeps the compiler from fusing a product and a sum into one rounding.

A row is a tile [G, C] in registers, G groups of C columns, and each group has its own scale: G = 1
where a row has one scale. Values in masked columns are zero.

Shapes: M rows, N columns, S parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qurl.quant.linear import Partial, Product

EXACT = {"enable_fp_fusion": False}
"""Launch options of kernels whose numbers are those of torch."""

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_SMALL = tl.constexpr(2.0**-64)
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # beyond it the FP32 grid is the integers


def product_args(product: Product | None) -> dict[str, Any]:
    """The arguments of a kernel that reads a product with `load_product`; None reads nothing."""
    if not isinstance(product, Partial):
        assert product is None or product.is_contiguous()
        dtype = tl.float32 if product is None else DTYPES[product.dtype]
        nothing = dict.fromkeys(("scale_x", "scale_w", "bias"))
        return {"acc": product, **nothing, "S": 0, "DTYPE": dtype}
    parts, rows, columns = product.acc.shape
    assert parts > 0
    assert product.acc.is_contiguous()
    assert product.acc.dtype in (torch.int32, torch.float32)
    vectors = {"scale_x": product.scale_x, "scale_w": product.scale_w, "bias": product.bias}
    shapes = {"scale_x": (rows, 1), "scale_w": (columns, 1), "bias": (columns,)}
    for name, vector in vectors.items():
        assert vector is None or (vector.shape == shapes[name] and vector.is_contiguous()), name
    return {"acc": product.acc, **vectors, "S": parts, "DTYPE": DTYPES[product.dtype]}


def product_shape(product: Product) -> tuple[int, int]:
    """[M, N] of a product, finished or not."""
    rows, columns = (product if isinstance(product, Tensor) else product.acc[0]).shape
    return rows, columns


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Nothing that the kernel before writes may be read earlier; the next kernel may start now."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def load_channels(vector, columns, mask):
    """A channel scale or bias at `columns`, FP32; None where there is none.

    Only a sync writes these, so they may be loaded before `await_inputs`.
    """
    values = None
    if vector is not None:
        values = tl.load(vector + columns, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def load_product(
    acc,
    scale_x,
    scale,
    shift,
    row,
    columns,
    mask,
    num_rows,
    N: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """FP32 values of finish(product)[row, columns]; `row` is int64. S = 0: `acc` is finished.

    `scale` and `shift` are what `load_channels` gave for scale_w and bias.
    """
    source = acc + row * N + columns
    if S == 0:
        values = tl.load(source, mask=mask, other=0).to(tl.float32)
    else:
        if scale_x is not None:
            token_scale = tl.load(scale_x + row)
        stride = num_rows.to(tl.int64) * N
        total = tl.load(source, mask=mask, other=0)
        for part in tl.static_range(1, S):
            total += tl.load(source + part * stride, mask=mask, other=0)
        values = total.to(tl.float32)
        if scale_x is not None:
            values = values * token_scale
        if scale is not None:
            values = values * scale
        if shift is not None:
            values = values + shift
        values = narrow(values, DTYPE).to(tl.float32)
    return values


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """FP32 values in a narrower dtype, rounded half to even. Of INT8 they are within +-127."""
    if dtype == tl.int8:
        # The low bits of the sum are the integer, which spares a conversion at a quarter rate.
        narrowed = (values + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    elif _INTERPRETED and dtype == tl.bfloat16:
        narrowed = _bfloat16_bits(values).to(tl.bfloat16, bitcast=True)
    elif _INTERPRETED and dtype == tl.float8e4nv:
        narrowed = _float8_bits(values).to(tl.float8e4nv, bitcast=True)
    else:
        narrowed = values.to(dtype)
    return narrowed


@triton.jit
def magnitude(values):
    """Bits of |values|. They sort as the numbers do, and NaN above all: a NaN is never lost."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(magnitudes):
    """max|values| [G, 1] of each group, from the bits of the magnitudes [G, C]."""
    return tl.max(magnitudes, axis=1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def quantize_row(values, mask, LARGEST: tl.constexpr, IS_INT: tl.constexpr):
    """Codes [G, C], as FP32 numbers, and their scale [G, 1].

    The same as those of `qurl.quant.formats.quantize_activation`. For a row in several tiles, take
    `scale_for` the largest magnitude of all of them, and `narrow` what `divide` gives for each.
    """
    scale = scale_for(largest(magnitude(tl.where(mask, values, 0.0))), LARGEST)
    codes = divide(values, scale)
    if IS_INT:
        codes = (codes + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
    return codes, scale


@triton.jit
def scale_for(amax, LARGEST: tl.constexpr):
    """The scale of values up to amax. No code needs clamping: amax / scale rounds to LARGEST."""
    scale = tl.div_rn(amax, LARGEST)
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def divide(values, scale):
    """values / scale as IEEE division rounds it; below 2^-11, where codes are 0, only about.

    `tl.div_rn` branches for each value. Here one reciprocal r, rounded to nearest, serves them all:
    values * r is within 2 ulp of the quotient, a correction by the exact remainder brings it within
    1 ulp, and another one to the nearest (Markstein's theorem). The remainder of a small scale
    would underflow, so such a scale and its values are lifted.
    """
    if _INTERPRETED:  # which has no fused multiply-add
        quotient = tl.div_rn(values, scale)
    else:
        lift = tl.where(scale < _SMALL, 1.0 / _SMALL, 1.0)
        values = values * lift
        scale = scale * lift
        inverse = tl.div_rn(1.0, scale)
        quotient = values * inverse
        quotient = tl.fma(tl.fma(-quotient, scale, values), inverse, quotient)
        quotient = tl.fma(tl.fma(-quotient, scale, values), inverse, quotient)
    return quotient


# Triton's interpreter truncates to BF16, and to FP8 it loses carries, subnormals and NaN.


@triton.jit
def _bfloat16_bits(values):
    bits = values.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (tl.where(values == values, rounded, bits) >> 16).to(tl.int16)


@triton.jit
def _float8_bits(values):
    """E4M3 of values up to 448: exponent bias 7, 3 bits of mantissa, below 2^-6 steps of 2^-9."""
    bits = magnitude(values)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - ((127 - 7) << 3)
    absolute = bits.to(tl.float32, bitcast=True)
    small = (absolute * 512.0 + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
    code = tl.where(absolute < 0.015625, small.to(tl.int32), normal)
    code = tl.where(values == values, code, 0x7F)
    return (code | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
