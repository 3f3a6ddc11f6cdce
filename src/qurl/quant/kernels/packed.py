# pyright: reportGeneralTypeIssues=false
# (To pyright `tl.static_range` cannot be iterated.)
"""Kernels of NVFP4 weights (`qurl.quant.nvfp4`): products, and codes from and to numbers.

    y[m, n] = sum_k x[m, k] w[n, k] + bias[n]        w = q (a g), rounded to the dtype of x

Codes are unpacked in registers, so a product moves a quarter of BF16's bytes. Its weights have the
bits of `dequantize(q).to(x.dtype)`: engine and trainer compute with the same ones. The low halves
of bytes are one factor, the high halves another, each with its own columns of x.

A code has one bit of sign, two of exponent and one of mantissa. Those become the lowest bits of the
exponent and the highest of the mantissa of an FP32 number, which is too small by 2^126.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import DTYPES, EXACT, divide_up
from qurl.ops.rounding import as_factor, float8_bits, narrow
from qurl.quant.formats import Quantized
from qurl.quant.kernels.tiles import Plan, load_tile, prefetch_weights, store_tile
from qurl.quant.nvfp4 import GROUP, LARGEST, SCALE_MAX, scale_of

_GROUP = tl.constexpr(GROUP)
_HALF = tl.constexpr(GROUP // 2)
_LARGEST = tl.constexpr(LARGEST)
_SCALE_MAX = tl.constexpr(SCALE_MAX)
_CHUNK = 2048
"""Columns that a program codes or decodes at once."""


def multiply_packed(
    x: Tensor, weight: Quantized, bias: Tensor | None, y: Tensor, plan: Plan, *, is_gated: bool
) -> None:
    """Write x W^T of x [M, K] into y [parts, M, N], or silu(gate) * up into y [M, N / 2]."""
    M, (N, K) = len(x), weight.shape
    assert x.shape[1] == K
    assert plan.depth % (2 * GROUP) == 0
    grid, steps, constants = plan.launch(M, weight.codes, K, is_gated=is_gated)
    sizes = (M, N, K, K // 2, K // GROUP, steps)
    packed_gemm_kernel[grid](x, *_bytes(weight), y, bias, *sizes, **constants)


def decode(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`, with the bits of `dequantize`."""
    rows, columns = weight.shape
    numbers = torch.empty(rows, columns, dtype=dtype, device=weight.codes.device)
    grid = (rows, divide_up(columns, _CHUNK))
    shape: dict[str, Any] = {"CHUNK": _CHUNK, **EXACT}
    decode_kernel[grid](numbers, *_bytes(weight), columns, **shape)
    return numbers


def requantize_packed_(
    source: Tensor, target: Quantized, flips: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """Rewrite codes and scales of `target` with those of source [N, K] rounded to `dtype`.

    `flips` [N, 1] (int32) receives how many codes of each row changed. Rows of the target may be
    strided.
    """
    codes, scale, outer = target.codes, target.scale, target.tensor_scale
    assert outer is not None
    assert source.is_contiguous()
    assert (codes.stride(1), scale.stride(1), flips.shape) == (1, 1, outer.shape)
    largest = torch.linalg.vector_norm(source, torch.inf).to(dtype).float()
    outer.copy_(scale_of(largest, LARGEST * SCALE_MAX).expand_as(outer))
    strides = (codes.stride(0), scale.stride(0), outer.stride(0))
    narrowed = DTYPES[source.dtype if dtype == torch.float32 else dtype]
    shape: dict[str, Any] = {"DTYPE": narrowed, "CHUNK": _CHUNK, **EXACT}
    requantize_packed_kernel[(len(source),)](
        *(source, codes, scale.view(torch.uint8), outer, flips, *strides, source.shape[1]), **shape
    )


def _bytes(weight: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales as bytes, and the scale of the tensor."""
    assert weight.tensor_scale is not None
    assert all(tensor.is_contiguous() for tensor in weight.tensors())
    return weight.codes, weight.scale.view(torch.uint8), weight.tensor_scale


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def packed_gemm_kernel(
    x,
    w,
    scale_w,
    tensor_scale,
    y,
    bias,
    M,
    N,
    K,
    num_bytes,
    num_groups,
    steps_per_split,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_FINISHED: tl.constexpr,
    IS_GATED: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile y[TOKENS, CHANNELS] of one part of K.

    Rows of w have `num_bytes`, those of scale_w `num_groups`: arguments, so that the compiler knows
    which are multiples of 16 and can be loaded several numbers at a time.
    """
    num_token_tiles = tl.cdiv(M, TOKENS)
    first_token = (tl.program_id(0) % num_token_tiles) * TOKENS
    first_channel = (tl.program_id(0) // num_token_tiles) * CHANNELS
    part = tl.program_id(1)
    first_step = part * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, tl.cdiv(K, DEPTH))
    if PDL:
        if PREFETCH_LINES > 0:
            first_byte = first_step * (DEPTH // 2)
            prefetch_weights(w, first_channel, first_byte, N, num_bytes, CHANNELS, PREFETCH_LINES)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    tokens = first_token + tl.arange(0, TOKENS)
    channels = first_channel + tl.arange(0, CHANNELS)
    places = tl.arange(0, DEPTH // 2)
    low = places // _HALF * _GROUP + places % _HALF
    groups = tl.arange(0, DEPTH // _GROUP)
    outer = tl.load(tensor_scale + channels, channels < N, 0.0)[:, None]
    acc = tl.zeros((CHANNELS, TOKENS), tl.float32)
    for step in range(first_step, last_step):
        column = step * DEPTH
        codes = load_tile(w, channels, places + step * (DEPTH // 2), N, num_bytes)
        scale = load_tile(scale_w, channels, groups + step * (DEPTH // _GROUP), N, num_groups)
        steps = _from_float8(scale) * outer  # [CHANNELS, DEPTH / 16]
        steps = tl.broadcast_to(steps[:, :, None], (CHANNELS, DEPTH // _GROUP, _HALF))
        steps = tl.reshape(steps, (CHANNELS, DEPTH // 2))
        for half in tl.static_range(2):
            x_tile = load_tile(x, tokens, column + low + half * _HALF, M, K)
            w_tile = narrow(_from_code(codes >> (4 * half)) * steps, x_tile.dtype)
            acc = tl.dot(
                as_factor(w_tile),
                as_factor(x_tile).T,
                acc,
                input_precision="ieee" if x_tile.dtype == tl.float32 else None,
            )
    store_tile(y, acc.T, bias, part, tokens, first_channel, M, N, IS_FINISHED, IS_GATED)


@triton.jit
def decode_kernel(numbers, w, scale_w, tensor_scale, K, CHUNK: tl.constexpr):
    """CHUNK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * (CHUNK // 2) + tl.arange(0, CHUNK // 2)
    mask = places < K // 2
    group = places // _HALF
    codes = tl.load(w + row * (K // 2) + places, mask, 0)
    scale = tl.load(scale_w + row * (K // _GROUP) + group, mask, 0)
    steps = _from_float8(scale) * tl.load(tensor_scale + row)
    target = numbers + row * K + group * _GROUP + places % _HALF
    for half in tl.static_range(2):
        value = narrow(_from_code(codes >> (4 * half)) * steps, numbers.dtype.element_ty)
        tl.store(target + half * _HALF, value, mask)


@triton.jit
def requantize_packed_kernel(
    source,
    codes,
    scale,
    tensor_scale,
    flips,
    code_stride,
    scale_stride,
    outer_stride,
    K,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row, CHUNK columns at a time: tiles [groups, 8] of the low and the high halves."""
    row = tl.program_id(0).to(tl.int64)
    outer = tl.load(tensor_scale + row * outer_stride)
    changes = tl.zeros([CHUNK // _GROUP, _HALF], tl.int32)
    for first in range(0, K, CHUNK):
        group = first // _GROUP + tl.arange(0, CHUNK // _GROUP)
        place = group[:, None] * _HALF + tl.arange(0, _HALF)[None, :]
        mask = place < K // 2
        at = source + row * K + place + group[:, None] * _HALF
        low = _rounded(tl.load(at, mask, 0.0), DTYPE)
        high = _rounded(tl.load(at + _HALF, mask, 0.0), DTYPE)
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
        group_scale = tl.minimum(tl.div_rn(largest, _LARGEST * outer), _SCALE_MAX)
        bits = float8_bits(group_scale)
        step = _from_float8(bits) * outer
        step = tl.where(step == 0.0, float("inf"), step)[:, None]
        code = _to_code(tl.div_rn(low, step)) | _to_code(tl.div_rn(high, step)) << 4
        held = tl.load(codes + row * code_stride + place, mask, 0)
        different = (code ^ held).to(tl.int32)
        changes += ((different & 15) != 0).to(tl.int32) + ((different >> 4) != 0).to(tl.int32)
        tl.store(codes + row * code_stride + place, code, mask)
        tl.store(scale + row * scale_stride + group, bits, group < K // _GROUP)
    tl.store(flips + row, tl.sum(changes))


@triton.jit
def _rounded(values, DTYPE: tl.constexpr):
    """Weights as the trainer computes with them, in FP32."""
    return narrow(values.to(tl.float32), DTYPE).to(tl.float32)


@triton.jit
def _from_code(codes):
    """FP32 numbers of E2M1 codes in the low four bits."""
    codes = codes.to(tl.int32)
    bits = (codes & 7) << 22 | (codes & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _from_float8(scale):
    """FP32 numbers of bytes of E4M3 without a sign: four bits of exponent, with bias 7."""
    return (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _to_code(values):
    """E2M1 codes next to the values, ties to even; zero has no sign."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    sign = ((values < 0) & (code > 0)).to(tl.int32)
    return (code | sign << 3).to(tl.uint8)
