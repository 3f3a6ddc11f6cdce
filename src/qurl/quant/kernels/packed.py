# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (To pyright `tl.static_range` cannot be iterated, and a constant of a kernel is no string.)
"""Kernels of NVFP4 weights (`qurl.quant.nvfp4`): products, and codes from and to numbers.

    y[m, n] = g[n] sum_k x[m, k] (q a)[n, k] + bias[n]

Codes are unpacked in registers, so a product moves a quarter of BF16's bytes. A code q has two
significant bits and a scale a has four, so q a is exact in BF16 and in FP16, and g is a factor of
the FP32 sum: weights are not rounded. The trainer does the same (`qurl.quant.coded_linear`).

A code has one bit of sign, two of exponent and one of mantissa. Those become the lowest bits of the
exponent and the highest of the mantissa of a wider number, which is too small by 2^126. A scale has
four bits of exponent and three of mantissa and becomes too small by 2^120. Multiplying such numbers
is exact, subnormal ones included, so neither zeros nor subnormal scales need a case of their own.

Two bytes hold the channels i, i + 1, i + 8 and i + 9 of a group of 16, just those that one thread
of a matrix unit multiplies. They are fetched together.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import DTYPES, EXACT, divide_up
from qurl.ops.rounding import INTERPRETED, as_factor, float8_bits, narrow
from qurl.quant.formats import Quantized
from qurl.quant.kernels.tiles import Plan, as_tiles, load_tile, prefetch_weights, store_tile
from qurl.quant.nvfp4 import GROUP, LARGEST, SCALE_MAX, scale_of

_GROUP = tl.constexpr(GROUP)
_HALF = tl.constexpr(GROUP // 2)
_LARGEST = tl.constexpr(LARGEST)
_SCALE_MAX = tl.constexpr(SCALE_MAX)
_LIFT = tl.constexpr(256.0)
"""Weights in a product are q a / 256: 2^-126 of a code times 2^118, most that BF16 has for a."""
_SCALES = tl.constexpr("""{
    .reg .b32 first, second, to_one, lift, zero;
    mov.b32 to_one, 0x7B807B80;             // 2^120
    mov.b32 lift, 0x7A807A80;               // 2^118
    mov.b32 zero, 0x80008000;               // -0, which leaves the sign of a product
    prmt.b32 first, $2, 0, 0x4140;          // bytes to lanes of 16 bits
    prmt.b32 second, $2, 0, 0x4342;
    shl.b32 first, first, 4;
    shl.b32 second, second, 4;
    fma.rn.bf16x2 first, first, to_one, zero;
    fma.rn.bf16x2 second, second, to_one, zero;
    fma.rn.bf16x2 $0, first, lift, zero;
    fma.rn.bf16x2 $1, second, lift, zero;
}""")
"""Four bytes of E4M3 to BF16 numbers a 2^118."""
_WEIGHTS = """
    shl.b32 codes, $4, {shift};             // to the high half of each byte: s e e m
    shf.r.wrap.b32 turned, codes, codes, 6; // e m to the top of the next lower byte
    and.b32 low, turned, 0xC0C0C0C0;        // low bytes of BF16 numbers: e m 0 0 0 0 0 0
    and.b32 high, codes, 0x80808080;        // and high ones: s 0 0 0 0 0 0 e
    lop3.b32 high, turned, 0x01010101, high, 0xEA;
    prmt.b32 codes, low, high, 0x5043;
    prmt.b32 low, low, high, 0x7261;
    fma.rn.bf16x2 {first}, codes, scale, zero;
    fma.rn.bf16x2 {second}, low, other_scale, zero;
"""
_PRODUCTS = tl.constexpr(
    """{
    .reg .b32 codes, turned, low, high, zero, scale, other_scale;
    .reg .b16 a, b;
    mov.b32 zero, 0x80008000;               // -0, which leaves the sign of a product
    mov.b32 {a, b}, $5;
    mov.b32 scale, {a, a};
    mov.b32 other_scale, {b, b};
    """
    + _WEIGHTS.format(shift=4, first="$0", second="$1")
    + _WEIGHTS.format(shift=0, first="$2", second="$3")
    + "}"
)
"""Two pairs of bytes and their scales a 2^118 to q a / 256: pairs of low, then of high halves."""
_CHUNK = 2048
"""Columns that a program codes or decodes at once."""


def multiply_packed(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    y: Tensor,
    plan: Plan,
    *,
    is_gated: bool,
    block: int = 1,
) -> None:
    """Write x W^T of x [M, K] into y [parts, M, N], or silu(gate) * up into y [M, N / 2].

    In codes of `block` groups together, the pairs of bytes of one thread lie side by side: the
    first pair of all groups, then the second one, and so on (`benchmarks/nvfp4_order.py`).
    """
    M, (N, K) = len(x), weight.shape
    assert x.shape[1] == K
    assert plan.depth % (2 * GROUP) == 0
    codes, scale, outer = _bytes(weight)
    pairs = codes.view(torch.int16)
    x_tiles, w_tiles, has_descriptors = as_tiles(x, pairs, plan)
    grid, steps, constants = plan.launch(M, pairs, K, is_gated=is_gated)
    constants |= {"HAS_DESCRIPTORS": has_descriptors, "BLOCK": block}
    arguments = (pairs, scale, outer, y, bias, M, N, K, K // 4, K // GROUP, steps)
    packed_gemm_kernel[grid](x_tiles, w_tiles, *arguments, **constants)


def decode(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`, with the bits of `dequantize`."""
    return _decode(*_bytes(weight), dtype)


def decode_factor(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """q a [N, K], exact in `dtype`."""
    codes, scale, _ = _bytes(weight)
    return _decode(codes, scale, None, dtype)


def _decode(codes: Tensor, scale: Tensor, outer: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, columns = len(codes), 2 * codes.shape[1]
    numbers = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    shape: dict[str, Any] = {"CHUNK": _CHUNK, **EXACT}
    grid = (rows, divide_up(columns, _CHUNK))
    decode_kernel[grid](numbers, codes, scale, outer, columns, **shape)
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
    w_pointer,
    scale_w,
    tensor_scale,
    y,
    bias,
    M,
    N,
    K,
    num_pairs,
    num_groups,
    steps_per_split,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_FINISHED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile y[TOKENS, CHANNELS] of one part of K.

    Rows of w have `num_pairs` of bytes, those of scale_w `num_groups`: arguments, so that the
    compiler knows which are multiples of 16 and can be loaded several numbers at a time.
    """
    num_token_tiles = tl.cdiv(M, TOKENS)
    first_token = (tl.program_id(0) % num_token_tiles) * TOKENS
    first_channel = (tl.program_id(0) // num_token_tiles) * CHANNELS
    part = tl.program_id(1)
    first_step = part * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, tl.cdiv(K, DEPTH))
    if PDL:
        if PREFETCH_LINES > 0:
            first_pair = first_step * (DEPTH // 4)
            prefetch_weights(
                w_pointer, first_channel, first_pair, N, num_pairs, CHANNELS, PREFETCH_LINES
            )
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    tokens = first_token + tl.arange(0, TOKENS)
    channels = first_channel + tl.arange(0, CHANNELS)
    depth = tl.arange(0, DEPTH)
    pairs = tl.arange(0, DEPTH // 4)
    groups = tl.arange(0, DEPTH // _GROUP)
    acc = tl.zeros((CHANNELS, TOKENS), tl.float32)
    for step in range(first_step, last_step):
        if HAS_DESCRIPTORS:
            codes = w.load([first_channel, step * (DEPTH // 4)])
            x_tile = x.load([first_token, step * DEPTH])
        else:
            codes = load_tile(w, channels, pairs + step * (DEPTH // 4), N, num_pairs)
            x_tile = load_tile(x, tokens, depth + step * DEPTH, M, K)
        scale = load_tile(scale_w, channels, groups + step * (DEPTH // _GROUP), N, num_groups)
        product = tl.dot(
            as_factor(_weights(codes, scale, x_tile.dtype, BLOCK)),
            as_factor(x_tile).T,
            input_precision="ieee" if x_tile.dtype == tl.float32 else None,
        )
        # Lifted here and not at the end, so that the product is waited for: Triton 3.6 would let
        # the next step overwrite the registers with these weights while they are multiplied.
        acc += product * _LIFT
    outer = tl.load(tensor_scale + channels, channels < N, 0.0)
    acc *= outer[:, None]
    store_tile(y, acc.T, bias, part, tokens, first_channel, M, N, IS_FINISHED, IS_GATED)


@triton.jit
def _weights(codes, scale, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """q a / 256 [CHANNELS, DEPTH] of pairs of bytes and scales, exact in DTYPE."""
    if not INTERPRETED and tl.bfloat16 == DTYPE:
        # Triton by itself multiplies BF16 numbers one by one, and in FP32.
        steps = tl.inline_asm_elementwise(
            _SCALES, "=r,=r,r", [scale], tl.bfloat16, is_pure=True, pack=4
        )
        # A result is written before the last operand is read.
        low, high = tl.inline_asm_elementwise(
            _PRODUCTS,
            "=&r,=&r,=&r,=&r,r,r",
            [codes, _repeat(steps, codes.shape[1], BLOCK)],
            (tl.int32, tl.int32),
            is_pure=True,
            pack=2,
        )
        low, high = _numbers_of_pair(low), _numbers_of_pair(high)
    else:
        steps = _repeat(_from_float8(scale) * (1 / _LIFT), codes.shape[1], BLOCK)
        low = tl.join(_from_code(codes) * steps, _from_code(codes >> 8) * steps)
        high = tl.join(_from_code(codes >> 4) * steps, _from_code(codes >> 12) * steps)
        low, high = narrow(low, DTYPE), narrow(high, DTYPE)
    # [CHANNELS, block, pair, group, byte, half] to the order of input channels.
    BLOCKS: tl.constexpr = scale.shape[1] // BLOCK
    tile = tl.join(low, high).reshape(codes.shape[0], BLOCKS, _HALF // 2, BLOCK, 2, 2)
    return tile.permute(0, 1, 3, 5, 2, 4).reshape(codes.shape[0], 4 * codes.shape[1])


@triton.jit
def _numbers_of_pair(bits):
    """The two BF16 numbers in 32 bits, along a new dimension."""
    first = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    second = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, second)


@triton.jit
def _repeat(steps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each of the scales [CHANNELS, groups] so often that there are WIDTH, in the codes' order."""
    BLOCKS: tl.constexpr = steps.shape[1] // BLOCK
    PAIRS: tl.constexpr = WIDTH // steps.shape[1]
    steps = steps.reshape(steps.shape[0], BLOCKS, 1, BLOCK)
    steps = tl.broadcast_to(steps, (steps.shape[0], BLOCKS, PAIRS, BLOCK))
    return steps.reshape(steps.shape[0], WIDTH)


@triton.jit
def decode_kernel(numbers, w, scale_w, tensor_scale, K, CHUNK: tl.constexpr):
    """CHUNK columns of one row; q a without the scale of the tensor."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * (CHUNK // 2) + tl.arange(0, CHUNK // 2)
    mask = places < K // 2
    group = places // _HALF
    codes = tl.load(w + row * (K // 2) + places, mask, 0)
    scale = tl.load(scale_w + row * (K // _GROUP) + group, mask, 0)
    steps = _from_float8(scale)
    if tensor_scale is not None:
        steps = steps * tl.load(tensor_scale + row)
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
