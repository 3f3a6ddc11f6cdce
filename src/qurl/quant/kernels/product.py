# pyright: reportGeneralTypeIssues=false
# (To pyright neither `tl.static_range` nor what a jitted function returns can be iterated.)
"""Shared parts of row-wise kernels: reading a `Product`, making an `Operand`, quantizing a row.

    finish(p) = (acc[0] + ... + acc[S - 1]) * scale_w * scale_x + bias,  rounded once to `dtype`

Every step rounds separately, as in torch, so kernels that call these functions are launched with
`EXACT`. A quantizer reads values rounded once to the compute dtype, whether or not they went
through memory: attention's output, silu(gate) * up. Only the norm is quantized from FP32, as in
the reference.

A row is a tile [G, C] in registers: G groups of C columns, each with its own scale. Values in
masked columns are zero.

Shapes: M rows, N columns, S parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import DTYPES, divide_up
from qurl.ops.rounding import divide, from_magnitude, load_float, magnitude, narrow, scale_for
from qurl.quant.formats import Format, Quantized
from qurl.quant.linear import Operand, Partial, Product


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
    rows, columns = (product if isinstance(product, Tensor) else product.acc[0]).shape
    return rows, columns


def empty_operand(
    rows: int, width: int, format: Format | None, dtype: torch.dtype, device: torch.device
) -> Operand:
    """An uninitialised input [M, K] of a projection; without a format, numbers of `dtype`."""
    if format is None:
        return torch.empty(rows, width, dtype=dtype, device=device)
    return empty_codes(rows, width, format, device)


def empty_codes(rows: int, width: int, format: Format, device: torch.device) -> Quantized:
    """Uninitialised codes [M, K] of activations, and their scales."""
    codes = torch.empty(rows, width, dtype=format.dtype, device=device)
    groups = divide_up(width, format.block or width)
    return Quantized(codes, codes.new_empty(rows, groups, dtype=torch.float32), format)


@triton.jit
def load_channels(vector, columns, mask):
    """A channel scale or bias at `columns` in FP32, or None.

    Only a sync writes these, so they may be loaded before `await_inputs`.
    """
    values = None  # Triton 3.6 takes no None in a conditional expression
    if vector is not None:
        values = load_float(vector + columns, mask)
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
    """FP32 values of finish(product)[row, columns]; `row` is int64. With S = 0 `acc` is finished.

    `scale` and `shift` are scale_w and bias from `load_channels`.
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
        if scale is not None:
            values = values * scale
        if scale_x is not None:
            values = values * token_scale
        if shift is not None:
            values = values + shift
        values = narrow(values, DTYPE).to(tl.float32)
    return values


@triton.jit
def largest(magnitudes):
    """max|values| [G, 1] of each group, from the bits of their magnitudes [G, C]."""
    return from_magnitude(tl.max(magnitudes, axis=1, keep_dims=True), tl.float32)


@triton.jit
def quantize_row(values, mask, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Codes [G, C] in `dtype` and their scale [G, 1], equal to `formats.quantize_activation`."""
    scale = scale_for(largest(magnitude(tl.where(mask, values, 0.0))), LARGEST)
    return narrow(divide(values, scale), dtype), scale
