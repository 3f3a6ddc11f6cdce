# pyright: reportGeneralTypeIssues=false
# (To pyright neither `tl.static_range` nor what a jitted function returns can be iterated.)
"""Row-wise operations between two projections: residual and norm, SwiGLU, quantization.

    add_norm   x += delta;  h = weight * (x * rsqrt(mean(x^2) + eps))
    swiglu     h = gate / (1 + exp(-gate)) * up
    then       codes and scale of h (`qurl.quant.formats`), or h rounded to the compute dtype

The h of `swiglu` is rounded to the compute dtype before it is quantized (see `product.py`). All
else is FP32. Each row is computed alone: neither tiles nor the order of a sum depend on M.

Shapes: M rows, K columns of the result; tiles are [G, C], as in `product.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import DTYPES, EXACT, await_inputs, divide_up, next_power_of_2, overlapping
from qurl.ops.rounding import divide, load_float, magnitude, narrow, scale_for, store_rounded
from qurl.quant.formats import Format, Quantized
from qurl.quant.kernels.product import (
    empty_codes,
    empty_operand,
    largest,
    load_channels,
    load_product,
    product_args,
    product_shape,
    quantize_row,
)
from qurl.quant.linear import Operand, Product

_REGISTERS = 65536  # of a multiprocessor
_MAX_TILES = 8  # of a row in registers; a longer row is read twice
_MAX_TILES_IN_PARTS = 5  # if loads of several parts need registers too


def add_norm(
    x: Tensor,
    delta: Product | None,
    weight: Tensor,
    eps: float,
    format: Format | None,
    dtype: torch.dtype,
    *,
    total: Tensor | None = None,
    inverse: Tensor | None = None,
    clear: Tensor | None = None,
) -> Operand:
    """x [M, K] += delta in FP32; returns its RMS norm times weight [K].

    The sum is stored in `total`, by default in place. `inverse` [M] receives 1 / rms, which the
    gradients need. `clear` [M] is set to zero, for a later kernel that takes maxima into it.
    """
    rows, width = x.shape
    assert x.dtype == weight.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (x, weight))
    assert delta is None or product_shape(delta) == (rows, width)
    assert total is None or (total.shape == x.shape and total.is_contiguous())
    assert all(vector is None or vector.shape == (rows,) for vector in (inverse, clear))
    operand = empty_operand(rows, width, format, dtype, x.device)
    block = next_power_of_2(width)
    # One load of four columns per thread: with few rows the latency of loads dominates.
    num_warps = min(max(block // 128, 4), 32)
    args = {
        **product_args(delta),
        **_operand_args(operand, block),
        "num_rows": rows,
        "K": width,
        "num_warps": num_warps,
        # Otherwise the compiler saves registers by waiting for a part before it loads the next.
        "maxnreg": min(_REGISTERS // (32 * num_warps), 255),
        **overlapping(x.device),
        **EXACT,
    }
    outputs = {"total": x if total is None else total, "inverse": inverse, "clear": clear}
    add_norm_kernel[(rows,)](x=x, weight=weight, eps=eps, **outputs, **args)
    return operand


def swiglu(
    gate_up: Product, format: Format | None, dtype: torch.dtype, is_alternating: bool = False
) -> Operand:
    """silu(gate) * up of gate_up [M, 2 K], rounded to `dtype`, then quantized if there is a format.

    The gate is the first half of the columns, or with `is_alternating` the even columns.
    """
    rows, columns = product_shape(gate_up)
    assert columns % 2 == 0
    device = gate_up.device if isinstance(gate_up, Tensor) else gate_up.acc.device
    operand = empty_operand(rows, columns // 2, format, dtype, device)
    gate = {"GATED": True, "ALTERNATING": is_alternating, "RESULT": DTYPES[dtype]}
    _map_rows(gate_up, operand, None, gate)
    return operand


def quantize_rows(x: Tensor, format: Format, amax: Tensor | None = None) -> Quantized:
    """`qurl.quant.formats.quantize_activation` of x [M, K].

    A known `amax` = max|x| [M] of each row saves a pass; formats with blocks ignore it.
    """
    rows, width = x.shape
    assert amax is None or (amax.shape == (rows,) and amax.dtype == torch.float32)
    operand = empty_codes(rows, width, format, x.device)
    no_gate = {"GATED": False, "ALTERNATING": False, "RESULT": DTYPES[x.dtype]}
    _map_rows(x, operand, amax if format.block is None else None, no_gate)
    return operand


def as_operand(x: Tensor, format: Format | None) -> Operand:
    """x [M, K] as a projection reads it: in codes, if it has a format."""
    return x if format is None else quantize_rows(x, format)


def dequantize_rows(x: Quantized, dtype: torch.dtype) -> Tensor:
    """codes * scale of activations [M, K], rounded once to `dtype`."""
    rows, width = x.codes.shape
    out = torch.empty_like(x.codes, dtype=dtype)
    tile = min(next_power_of_2(width), 2048)
    shape: dict[str, Any] = {"K": width, "GROUP": x.format.block or width, "TILE": tile}
    dequantize_kernel[(rows, divide_up(width, tile))](x.codes, x.scale, out, **shape)
    return out


def _map_rows(
    product: Product, operand: Operand, amax: Tensor | None, gate: dict[str, Any]
) -> None:
    """Fill the operand from a product; a program takes a whole row only if its scale needs that."""
    out, format = (
        (operand.codes, operand.format) if isinstance(operand, Quantized) else (operand, None)
    )
    rows, width = out.shape
    block = next_power_of_2(width)
    has_whole_rows = format is not None and format.block is None and amax is None
    num_warps = min(max(block // 256, 4), 16) if has_whole_rows else 4
    # Eight columns of a tile per thread: two 16-byte loads of 32-bit parts, or one of BF16.
    tile = min(block, num_warps * 32 * 8)
    num_tiles = divide_up(width, tile)
    source = product_args(product)
    fits = num_tiles <= (_MAX_TILES if source["S"] <= 1 else _MAX_TILES_IN_PARTS)
    args = {
        **source,
        **_operand_args(operand, tile),
        **gate,
        "num_rows": rows,
        "K": width,
        "TILES": num_tiles if has_whole_rows else 0,
        "KEPT": num_tiles if has_whole_rows and fits else 0,
        "num_warps": num_warps,
        **overlapping(out.device),
        **EXACT,
    }
    map_kernel[(rows,) if has_whole_rows else (rows, num_tiles)](amax=amax, **args)


def _operand_args(operand: Operand, tile: int) -> dict[str, Any]:
    """The arguments of a kernel that writes an operand in tiles of so many columns."""
    if isinstance(operand, Tensor):
        return {"out": operand, "out_scale": None, "LARGEST": 0.0, "G": 1, "C": tile}
    group = operand.format.block or tile
    return {
        "out": operand.codes,
        "out_scale": operand.scale,
        "LARGEST": float(operand.format.largest),
        "G": max(tile // group, 1),
        "C": group,
    }


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    x,
    weight,
    acc,
    scale_x,
    scale_w,
    bias,
    out,
    out_scale,
    total,
    inverse,
    clear,
    num_rows,
    eps,
    K: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    LARGEST: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row, the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, G)[:, None]
    columns = groups * C + tl.arange(0, C)[None, :]
    mask = columns < K
    gain = load_channels(weight, columns, mask)
    scale = load_channels(scale_w, columns, mask)
    shift = load_channels(bias, columns, mask)
    await_inputs(PDL)
    values = tl.load(x + row * K + columns, mask=mask, other=0.0)
    if acc is not None:
        values += load_product(
            acc, scale_x, scale, shift, row, columns, mask, num_rows, K, S, DTYPE
        )
        tl.store(total + row * K + columns, values, mask=mask)
    # In FP64: the order of the sum is the compiler's, and differs between trainer and engine.
    squares = (values * values).to(tl.float64)
    mean = (tl.sum(tl.sum(squares, axis=1), axis=0) / K).to(tl.float32)
    factor = tl.rsqrt(mean + eps)
    if inverse is not None:
        tl.store(inverse + row, factor)
    values = gain * (values * factor)
    _store_tile(out, out_scale, row, groups, values, K, C, LARGEST)
    if clear is not None:
        tl.store(clear + row, 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def map_kernel(
    acc,
    scale_x,
    scale_w,
    bias,
    amax,
    out,
    out_scale,
    num_rows,
    K: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    ALTERNATING: tl.constexpr,
    RESULT: tl.constexpr,
    LARGEST: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    TILES: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A product, gated or not, as an operand.

    With TILES = 0 one program per row and tile: a tile needs at most the maximum of its row. Else
    one program per row of TILES tiles with one scale. The first KEPT tiles stay in registers until
    the scale is known; the others are computed twice, from the same bits to the same.
    """
    await_inputs(PDL)
    product = (acc, scale_x, scale_w, bias)
    SHAPE: tl.constexpr = (K, C, S, DTYPE, GATED, ALTERNATING, RESULT)
    row = tl.program_id(0).to(tl.int64)
    if TILES == 0:
        groups = tl.program_id(1) * G + tl.arange(0, G)[:, None]
        values = _load_tile(product, row, groups, num_rows, SHAPE)
        if amax is None:
            _store_tile(out, out_scale, row, groups, values, K, C, LARGEST)
        else:
            scale = scale_for(tl.load(amax + row + tl.zeros_like(groups)), LARGEST)
            tl.store(out_scale + row + groups, scale, mask=groups == 0)
            _store_codes(out, row, groups, values, scale, K, C)
    else:
        first = tl.arange(0, 1)[:, None]
        peak = tl.zeros([1, C], dtype=tl.int32)
        tiles = ()
        for tile in tl.static_range(KEPT):
            values = _load_tile(product, row, first + tile, num_rows, SHAPE)
            peak = tl.maximum(peak, magnitude(values))
            tiles = tiles + (values,)  # noqa: RUF005 (Triton has no unpacking)
        for tile in tl.range(KEPT, TILES):
            values = _load_tile(product, row, first + tile, num_rows, SHAPE)
            peak = tl.maximum(peak, magnitude(values))
        scale = scale_for(largest(peak), LARGEST)
        tl.store(out_scale + row + first, scale)
        for tile in tl.static_range(KEPT):
            _store_codes(out, row, first + tile, tiles[tile], scale, K, C)
        for tile in tl.range(KEPT, TILES):
            values = _load_tile(product, row, first + tile, num_rows, SHAPE)
            _store_codes(out, row, first + tile, values, scale, K, C)


@triton.jit
def dequantize_kernel(codes, scale, out, K: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """One program per row and tile."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < K
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    factor = tl.load(scale + row * groups + column // GROUP, mask=mask, other=0.0)
    values = load_float(codes + row * K + column, mask)
    store_rounded(out + row * K + column, values * factor, mask)


@triton.jit
def _load_tile(product, row, groups, num_rows, SHAPE: tl.constexpr):
    """Values [G, C] of a row, rounded to RESULT, as a quantizer reads them: FP32, zero beyond K.

    Group g starts at column C * groups[g].
    """
    acc, scale_x, scale_w, bias = product
    K: tl.constexpr = SHAPE[0]
    C: tl.constexpr = SHAPE[1]
    S: tl.constexpr = SHAPE[2]
    DTYPE: tl.constexpr = SHAPE[3]
    GATED: tl.constexpr = SHAPE[4]
    ALTERNATING: tl.constexpr = SHAPE[5]
    RESULT: tl.constexpr = SHAPE[6]
    N: tl.constexpr = 2 * K if GATED else K
    WIDTH: tl.constexpr = 2 * C if ALTERNATING else C
    columns = groups * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = columns < (N if ALTERNATING else K)
    scale = load_channels(scale_w, columns, mask)
    shift = load_channels(bias, columns, mask)
    if GATED and not ALTERNATING:
        up_scale = load_channels(scale_w, columns + K, mask)
        up_shift = load_channels(bias, columns + K, mask)
    values = load_product(acc, scale_x, scale, shift, row, columns, mask, num_rows, N, S, DTYPE)
    if GATED:
        if ALTERNATING:
            values, up = tl.split(tl.reshape(values, [values.shape[0], C, 2]))
        else:
            up = load_product(
                acc, scale_x, up_scale, up_shift, row, columns + K, mask, num_rows, N, S, DTYPE
            )
        values = narrow(values / (1.0 + tl.exp(-values)) * up, RESULT).to(tl.float32)
    return values


@triton.jit
def _store_tile(
    out, out_scale, row, groups, values, K: tl.constexpr, C: tl.constexpr, LARGEST: tl.constexpr
):
    """Store values [G, C] as an operand; each group has its own scale, if any."""
    columns = groups * C + tl.arange(0, C)[None, :]
    mask = columns < K
    if out_scale is None:
        stored = narrow(values, out.dtype.element_ty)
    else:
        stored, scale = quantize_row(values, mask, LARGEST, out.dtype.element_ty)
        num_groups: tl.constexpr = (K + C - 1) // C
        tl.store(out_scale + row * num_groups + groups, scale, mask=groups < num_groups)
    tl.store(out + row * K + columns, stored, mask=mask)


@triton.jit
def _store_codes(out, row, groups, values, scale, K: tl.constexpr, C: tl.constexpr):
    """Store codes of values [G, C] whose scale is known."""
    columns = groups * C + tl.arange(0, C)[None, :]
    store_rounded(out + row * K + columns, divide(values, scale), columns < K)
