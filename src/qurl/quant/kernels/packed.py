# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (To pyright `tl.static_range` cannot be iterated, and a constant of a kernel is no string.)
"""Kernels of NVFP4 weights (`qurl.quant.nvfp4`): products, and codes from and to numbers.

    y[m, n] = g[n] sum_k x[m, k] (q a)[n, k] + bias[n]

Codes are unpacked in registers, so a product moves a third of BF16's bytes. A code q has two
significant bits and a scale a has four, so q a is exact in BF16 and in FP16, and g is a factor of
the FP32 sum: weights are not rounded. The trainer does the same (`qurl.quant.coded_linear`).

A code has one bit of sign, two of exponent and one of mantissa. Those become the sign, the lowest
bits of the exponent and the highest of the mantissa of a BF16 number, which is too small by 2^126.
Multiplying it by 2^118 a is exact, subnormal numbers and zeros included.

A word of 32 bits has the codes of both lanes of four BF16 pairs. A pair takes a mask (first place),
a rotation and a mask (second, third), or a mask, an integer product and a mask (fourth), and then a
product with the scale. One thread of a matrix unit multiplies just these pairs. What it needs of a
block of groups lies together and is fetched at once.

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
from qurl.ops.target import Target
from qurl.quant.formats import Quantized
from qurl.quant.kernels.tiles import Plan, as_tiles, load_tile, prefetch_weights, store_tile
from qurl.quant.nvfp4 import (
    GROUP,
    LARGEST,
    LIFT,
    SCALE_MAX,
    TOGETHER,
    groups_of_block,
    scale_of,
)

_TOGETHER = tl.constexpr(TOGETHER)
_RUN = tl.constexpr(8)
"""Channels i whose codes have the same place in their words."""
_LARGEST = tl.constexpr(LARGEST)
_SCALE_MAX = tl.constexpr(SCALE_MAX)
_LIFT = tl.constexpr(LIFT)
_UNLIFT = tl.constexpr(1 / LIFT)
_REST = tl.constexpr(2.0**126 / LIFT)
"""Weights in a product are too small by this."""
_PAIR = tl.constexpr(0x81C081C0)
"""Bits of a pair: s 0 0 0 0 0 0 e e m 0 0 0 0 0 0, twice."""
_LAST = tl.constexpr((0x001B001B, 1 << 2 | 1 << 7 | 1 << 12))
"""Bits of the last place, and the factor that puts them in order."""
UNPACK = tl.constexpr("""{
    .reg .b32 pair, first, second, zero;
    .reg .b16 a, b;
    mov.b32 zero, 0x80008000;               // -0, which leaves the sign of a product
    mov.b32 {a, b}, $5;
    mov.b32 first, {a, a};
    mov.b32 second, {b, b};
    and.b32 pair, $4, 0x81C081C0;
    fma.rn.bf16x2 $0, pair, first, zero;
    shf.r.wrap.b32 pair, $4, $4, 3;
    and.b32 pair, pair, 0x81C081C0;
    fma.rn.bf16x2 $1, pair, first, zero;
    shf.r.wrap.b32 pair, $4, $4, 6;
    and.b32 pair, pair, 0x81C081C0;
    fma.rn.bf16x2 $2, pair, second, zero;
    and.b32 pair, $4, 0x001B001B;
    mul.lo.u32 pair, pair, 0x1084;
    and.b32 pair, pair, 0x81C081C0;
    fma.rn.bf16x2 $3, pair, second, zero;
}""")
"""A word and the scales of its two groups to pairs of q a / 256 in BF16, place by place.

Masks, rotations and 0x1084 are those of `_PAIR`, `_LAST` and `PLACES`."""
_CHUNK = 2048
"""Columns that a program codes or decodes at once."""


def multiply_packed(
    x: Tensor, weight: Quantized, bias: Tensor | None, y: Tensor, plan: Plan, *, is_gated: bool
) -> None:
    """Write x W^T of x [M, K] into y [parts, M, N], or silu(gate) * up into y [M, N / 2]."""
    M, (N, K) = len(x), weight.shape
    assert x.shape[1] == K
    block = groups_of_block(K)
    assert plan.depth % (block * GROUP) == 0
    codes, scale, outer = _parts(weight)
    words, scales = codes.view(torch.int32), scale.view(torch.int32)
    x_tiles, w_tiles, has_descriptors = as_tiles(x, words, plan)
    grid, steps, constants = plan.launch(M, words, K, is_gated=is_gated)
    is_grouped = Target.of(x.device).has_warp_groups and plan.warps >= 4 and plan.channels >= 64
    constants |= {"HAS_DESCRIPTORS": has_descriptors, "PAIRS": block // 2}
    constants |= {"IN_WARPS": not is_grouped}
    sizes = (M, N, K, words.shape[1], scales.shape[1], steps)
    packed_gemm_kernel[grid](x_tiles, w_tiles, words, scales, outer, y, bias, *sizes, **constants)


def decode(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`, with the bits of `dequantize`."""
    return _decode(*_parts(weight), dtype)


def decode_factor(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """q a [N, K], exact in `dtype`."""
    codes, scale, _ = _parts(weight)
    return _decode(codes, scale, None, dtype)


def _decode(codes: Tensor, scale: Tensor, outer: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, columns = len(codes), 2 * codes.shape[1]
    numbers = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    pairs = groups_of_block(columns) // 2
    shape: dict[str, Any] = {"PAIRS": pairs, "CHUNK": _CHUNK, **EXACT}
    grid = (rows, divide_up(columns, _CHUNK))
    words, scales = codes.view(torch.int32), scale.view(torch.int32)
    decode_kernel[grid](numbers, words, scales, outer, columns, **shape)
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
    words, columns = codes.view(torch.int32), source.shape[1]
    strides = (words.stride(0), scale.stride(0), outer.stride(0))
    shape: dict[str, Any] = {
        "PAIRS": groups_of_block(columns) // 2,
        "DTYPE": DTYPES[source.dtype if dtype == torch.float32 else dtype],
        "CHUNK": _CHUNK,
        **EXACT,
    }
    requantize_packed_kernel[(len(source),)](
        source, words, scale, outer, flips, *strides, columns, **shape
    )


def _parts(weight: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of groups, and the scale of the tensor."""
    assert weight.tensor_scale is not None
    assert all(tensor.is_contiguous() for tensor in weight.tensors())
    return weight.codes, weight.scale, weight.tensor_scale


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
    num_words,
    num_scales,
    steps_per_split,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_FINISHED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    PAIRS: tl.constexpr,
    IN_WARPS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile y[TOKENS, CHANNELS] of one part of K.

    Rows of w have `num_words`, those of scale_w `num_scales` words of two: arguments, so that the
    compiler knows which are multiples of 16 and can be loaded several numbers at a time. A block
    has so many PAIRS of groups. IN_WARPS: each warp multiplies by itself, not four together.
    """
    num_token_tiles = tl.cdiv(M, TOKENS)
    first_token = (tl.program_id(0) % num_token_tiles) * TOKENS
    first_channel = (tl.program_id(0) // num_token_tiles) * CHANNELS
    part = tl.program_id(1)
    first_step = part * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, tl.cdiv(K, DEPTH))
    if PDL:
        if PREFETCH_LINES > 0:
            first_word = first_step * (DEPTH // 8)
            prefetch_weights(
                w_pointer, first_channel, first_word, N, num_words, CHANNELS, PREFETCH_LINES
            )
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    tokens = first_token + tl.arange(0, TOKENS)
    channels = first_channel + tl.arange(0, CHANNELS)
    depth = tl.arange(0, DEPTH)
    word_at = tl.arange(0, DEPTH // 8)
    scale_at = tl.arange(0, DEPTH // _TOGETHER)
    acc = tl.zeros((CHANNELS, TOKENS), tl.float32)
    for step in range(first_step, last_step):
        if HAS_DESCRIPTORS:
            words = w.load([first_channel, step * (DEPTH // 8)])
            x_tile = x.load([first_token, step * DEPTH])
        else:
            words = load_tile(w, channels, word_at + step * (DEPTH // 8), N, num_words)
            x_tile = load_tile(x, tokens, depth + step * DEPTH, M, K)
        first_scale = step * (DEPTH // _TOGETHER)
        scales = load_tile(scale_w, channels, scale_at + first_scale, N, num_scales)
        weights = _weights(words, scales, x_tile.dtype, PAIRS)
        if IN_WARPS:
            weights, x_tile = _by_threads(weights), _by_threads(x_tile)
        acc = tl.dot(
            as_factor(weights),
            as_factor(x_tile).T,
            acc,
            input_precision="ieee" if x_tile.dtype == tl.float32 else None,
        )
        if not (INTERPRETED or IN_WARPS):
            # No instruction, but a use of the sum, for which Triton waits. Triton 3.6 would let the
            # next step overwrite the registers with these weights while they are multiplied.
            acc = tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)
    outer = tl.load(tensor_scale + channels, channels < N, 0.0)
    acc *= (outer * _REST)[:, None]
    store_tile(y, acc.T, bias, part, tokens, first_channel, M, N, IS_FINISHED, IS_GATED)


@triton.jit
def _weights(words, scales, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """q a / 256 [CHANNELS, DEPTH] of words and scales, two in a word, exact in DTYPE."""
    if INTERPRETED or tl.bfloat16 != DTYPE:
        tile = _numbers(words, scales, 1 / _REST, DTYPE, PAIRS)
    else:
        # Triton by itself multiplies BF16 numbers one by one, and in FP32. A result is written
        # before the last operand is read.
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r",
            [words, _per_word(scales, words, PAIRS)],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        first, second = tl.join(_lanes(a), _lanes(b)), tl.join(_lanes(c), _lanes(d))
        tile = _in_order(first, second, PAIRS)
    return tile


@triton.jit
def _by_threads(tile):
    """Input channels of each group in another order: 0, 1, 8, 9, then 2, 3, 10, 11, and so on.

    Where each warp multiplies by itself, Triton gives a thread four adjacent channels of a factor.
    A thread has unpacked these four; in the plain order weights would pass through shared memory.
    """
    pairs = tile.reshape(tile.shape[0], tile.shape[1] // 16, 2, 4, 2)
    return pairs.permute(0, 1, 3, 2, 4).reshape(tile.shape)


@triton.jit
def _numbers(words, scales, factor, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """q (a factor) [rows, columns] of words and scales, two in a word, rounded once."""
    scales = _per_word(scales, words, PAIRS)
    even = (scales << 16).to(tl.float32, bitcast=True) * _UNLIFT * factor
    odd = (scales >> 16 << 16).to(tl.float32, bitcast=True) * _UNLIFT * factor
    first = tl.join(_products(words, even, 0, DTYPE), _products(words, even, 1, DTYPE))
    second = tl.join(_products(words, odd, 2, DTYPE), _products(words, odd, 3, DTYPE))
    return _in_order(first, second, PAIRS)


@triton.jit
def _per_word(scales, words, PAIRS: tl.constexpr):
    """The two scales of each word."""
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1] // PAIRS
    scales = scales.reshape(ROWS, BLOCKS, 1, PAIRS)
    return tl.broadcast_to(scales, (ROWS, BLOCKS, 4, PAIRS)).reshape(words.shape)


@triton.jit
def _in_order(first, second, PAIRS: tl.constexpr):
    """Input channels in their order, of the first and second groups [rows, words, lane, half]."""
    ROWS: tl.constexpr = first.shape[0]
    BLOCKS: tl.constexpr = first.shape[1] // (4 * PAIRS)
    # [rows, block, i / 2, pair of groups, i % 2, half of a group, group]
    tile = tl.join(first, second).reshape(ROWS, BLOCKS, 4, PAIRS, 2, 2, 2)
    return tile.permute(0, 1, 3, 6, 5, 2, 4).reshape(ROWS, 8 * first.shape[1])


@triton.jit
def _lanes(bits):
    """The two BF16 numbers in 32 bits, along a new dimension."""
    first = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    second = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, second)


@triton.jit
def _products(words, scale, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """q times a scale for the two codes of words at a place, along a new dimension."""
    pair = _pair(words.to(tl.uint32, bitcast=True), PLACE)
    first = (pair << 16).to(tl.float32, bitcast=True) * 2.0**126
    second = (pair >> 16 << 16).to(tl.float32, bitcast=True) * 2.0**126
    return narrow(tl.join(first * scale, second * scale), DTYPE)


@triton.jit
def _pair(words, PLACE: tl.constexpr):
    """The codes at a place as BF16 numbers that are too small by 2^126, two in a word."""
    if PLACE == 3:
        words = (words & _LAST[0]) * _LAST[1]
    elif PLACE > 0:
        words = words >> 3 * PLACE | words << 32 - 3 * PLACE
    return words & _PAIR


@triton.jit
def decode_kernel(numbers, w, scale_w, tensor_scale, K, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """CHUNK columns of one row; q a without the scale of the tensor."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = chunk * (CHUNK // 8) + tl.arange(0, CHUNK // 8)[None, :]
    pair = chunk * (CHUNK // _TOGETHER) + tl.arange(0, CHUNK // _TOGETHER)[None, :]
    column = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    words = tl.load(w + row * (K // 8) + word, word < K // 8, 0)
    scales = tl.load(scale_w + row * (K // _TOGETHER) + pair, pair < K // _TOGETHER, 0)
    factor = 1.0 if tensor_scale is None else tl.load(tensor_scale + row)
    values = _numbers(words, scales, factor, numbers.dtype.element_ty, PAIRS)
    tl.store(numbers + row * K + column, values, column < K)


@triton.jit
def requantize_packed_kernel(
    source,
    words,
    scale,
    tensor_scale,
    flips,
    word_stride,
    scale_stride,
    outer_stride,
    K,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row, CHUNK columns at a time: a tile [pairs of groups, _RUN] for each place of codes."""
    row = tl.program_id(0).to(tl.int64)
    outer = tl.load(tensor_scale + row * outer_stride)
    changes = tl.zeros([CHUNK // 8], tl.int32)
    for start in range(0, K, CHUNK):
        pair = start // _TOGETHER + tl.arange(0, CHUNK // _TOGETHER)
        mask = (pair < K // _TOGETHER)[:, None]
        at = source + row * K + pair[:, None] * _TOGETHER + tl.arange(0, _RUN)[None, :]
        bits = tl.zeros([CHUNK // _TOGETHER, _RUN], tl.uint32)
        for group in tl.static_range(2):
            low = _rounded(tl.load(at + (2 * group) * _RUN, mask, 0.0), DTYPE)
            high = _rounded(tl.load(at + (2 * group + 1) * _RUN, mask, 0.0), DTYPE)
            largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
            group_scale = tl.minimum(tl.div_rn(largest, _LARGEST * outer), _SCALE_MAX)
            group_scale = _from_float8(float8_bits(group_scale))
            step = group_scale * outer
            step = tl.where(step == 0.0, float("inf"), step)[:, None]
            bits |= _placed(tl.div_rn(low, step), 2 * group)
            bits |= _placed(tl.div_rn(high, step), 2 * group + 1)
            where = scale + row * scale_stride + 2 * pair + group
            tl.store(where, (group_scale * _LIFT).to(tl.bfloat16), pair < K // _TOGETHER)
        # [block, pair of groups, i / 2, i % 2] to the order of words.
        bits = bits.reshape(CHUNK // (_TOGETHER * PAIRS), PAIRS, _RUN // 2, 2)
        even, odd = tl.split(bits.permute(0, 2, 1, 3).reshape(CHUNK // 8, 2))
        fresh = even | odd << 16 | odd >> 16
        word = start // 8 + tl.arange(0, CHUNK // 8)
        target = words + row * word_stride + word
        held = tl.load(target, word < K // 8, 0).to(tl.uint32, bitcast=True)
        changed = fresh ^ held
        for place in tl.static_range(4):
            both = _pair(changed, place)
            changes += (both << 16 != 0).to(tl.int32) + (both >> 16 != 0).to(tl.int32)
        tl.store(target, fresh.to(tl.int32, bitcast=True), word < K // 8)
    tl.store(flips + row, tl.sum(changes))


@triton.jit
def _rounded(values, DTYPE: tl.constexpr):
    """Weights as the trainer computes with them, in FP32."""
    return narrow(values.to(tl.float32), DTYPE).to(tl.float32)


@triton.jit
def _from_float8(scale):
    """FP32 numbers of bytes of E4M3 without a sign: four bits of exponent, with bias 7."""
    return (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _placed(values, PLACE: tl.constexpr):
    """E2M1 codes next to the values, ties to even, as bits of a word; zero has no sign."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.uint32) + (size >= 0.75).to(tl.uint32) + (size > 1.25).to(tl.uint32)
    code += (size >= 1.75).to(tl.uint32) + (size > 2.5).to(tl.uint32)
    code += (size >= 3.5).to(tl.uint32) + (size > 5.0).to(tl.uint32)
    sign = ((values < 0) & (code > 0)).to(tl.uint32)
    if PLACE == 3:
        bits = (code & 1) << 4 | code >> 1 | sign << 3
    else:
        bits = (code << 6 | sign << 15) << 3 * PLACE
    return bits
