"""One AdamW step with moments in 8 bits, in one pass over memory (`qurl.trainer.moments`).

Codes equal those of the torch version to the bit. Shapes: a program has ROWS blocks of 256 numbers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import EXACT, divide_up
from qurl.ops.rounding import magnitude
from qurl.trainer import moments

ROWS = 16
_BLOCK = tl.constexpr(moments.BLOCK)
_SHIFT = tl.constexpr(moments.SHIFT)
_NOISE = tl.constexpr(2**moments.SHIFT - 1)
_SPARE = tl.constexpr(32 - moments.SHIFT)
_M_LARGEST = tl.constexpr(moments.M_LARGEST)
_V_LARGEST = tl.constexpr(moments.V_LARGEST)


def update_(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    m_top: Tensor | None = None,
    v_top: Tensor | None = None,
    *,
    update: moments.Update,
) -> None:
    """One step in place; without tops the moments are FP32."""
    tops = [top for top in (m_top, v_top) if top is not None]
    assert all(tensor.is_contiguous() for tensor in (weight, gradient, m, v, *tops))
    assert all(top.numel() == divide_up(weight.numel(), moments.BLOCK) for top in tops)
    grid = (divide_up(weight.numel(), ROWS * moments.BLOCK),)
    tensors = (weight, gradient, m, v, m_top, v_top)
    options: dict[str, Any] = {"ROWS": ROWS, "num_warps": 8, **EXACT}
    adamw_kernel[grid](*tensors, weight.numel(), *update, **options)


@triton.jit(do_not_specialize=["seed", "first"])
def adamw_kernel(
    weights,
    gradients,
    m,
    v,
    m_top,
    v_top,
    size,
    clip,
    beta1,
    rest1,
    beta2,
    rest2,
    keep,
    rate,
    correction,
    eps,
    seed,
    first,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = block.to(tl.int64) * _BLOCK
    at = start[:, None] + tl.arange(0, _BLOCK)[None, :]
    is_inside, is_block = at < size, start < size
    g = tl.load(gradients + at, mask=is_inside, other=0.0) * clip
    old_m = tl.load(m + at, mask=is_inside, other=0)
    old_v = tl.load(v + at, mask=is_inside, other=0)
    if m_top is not None:
        codes = old_m.to(tl.int32)
        top = tl.load(m_top + block, mask=is_block, other=0)
        size_m = _decode(tl.abs(codes), top, _M_LARGEST)
        old_m = tl.where(codes == 0, 0.0, tl.where(codes < 0, -size_m, size_m))
        top = tl.load(v_top + block, mask=is_block, other=0)
        old_v = _decode(old_v.to(tl.int32), top, _V_LARGEST)
    new_m = old_m * beta1 + g * rest1
    new_v = old_v * beta2 + g * g * rest2
    weight = tl.load(weights + at, mask=is_inside, other=0.0)
    step = new_m * rate / (tl.sqrt(new_v * correction) + eps)
    tl.store(weights + at, weight * keep - step, mask=is_inside)
    if m_top is not None:
        noise = _scramble((at + first).to(tl.uint32) ^ seed.to(tl.uint32))
        codes, top = _encode(new_m, noise & _NOISE, _M_LARGEST)
        tl.store(m + at, tl.where(new_m < 0, -codes, codes).to(tl.int8), mask=is_inside)
        tl.store(m_top + block, top.to(tl.int16), mask=is_block)
        codes, top = _encode(new_v, noise >> _SPARE, _V_LARGEST)
        tl.store(v + at, codes.to(tl.uint8), mask=is_inside)
        tl.store(v_top + block, top.to(tl.int16), mask=is_block)
    else:
        tl.store(m + at, new_m, mask=is_inside)
        tl.store(v + at, new_v, mask=is_inside)


@triton.jit
def _encode(values, noise, LARGEST: tl.constexpr):
    """Codes without sign, and the block's top."""
    ranks = (magnitude(values) + noise.to(tl.int32)) >> _SHIFT
    top = tl.max(ranks, 1)
    return tl.maximum(ranks - top[:, None] + LARGEST, 0), top


@triton.jit
def _decode(codes, top, LARGEST: tl.constexpr):
    ranks = tl.maximum(codes + top.to(tl.int32)[:, None] - LARGEST, 0)
    return (ranks << _SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _scramble(word):
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)
