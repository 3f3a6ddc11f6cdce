"""From the fused q, k, v projection to attention: head norms, rotary embedding, cache write.

    a, b = halves of a head;  a' = a cos - b sin;  b' = b cos + a sin
    cache = k' and v in the compute dtype, or as fp8(clamp(value / kv_scale, -448, 448))
            with k' - kv_center for k'

A program takes a few heads of one token. It computes in FP32, rounds the results to the compute
dtype, and treats each head alone, so nothing depends on M.

Shapes: M tokens, H heads, D head_dim, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import EXACT, await_inputs, divide_up, next_power_of_2, overlapping
from qurl.ops.rounding import divide_clamped, narrow, round_to_code, store_rounded
from qurl.quant.kernels.product import (
    load_channels,
    load_product,
    product_args,
    product_shape,
)
from qurl.quant.linear import Product
from qurl.rollout.local.ops import LayerCache

_NUM_WARPS = 4
_TILE = _NUM_WARPS * 32 * 4  # pairs of dimensions of a program: 16-byte loads of 32-bit parts


def rotate_and_store(
    qkv: Product,
    positions: Tensor,
    rotations: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    cache: LayerCache | None,
    *,
    num_kv_heads: int,
    eps: float,
    dtype: torch.dtype,
    keep_kv: bool,
) -> tuple[Tensor, ...]:
    """q [M, H, D], and with `keep_kv` k and v [M, H_kv, D], of qkv [M, (H + 2 H_kv) D], rotated.

    `rotations` are cos and sin [P, D / 2], `norms` the weights [D] of RMS norms of each head of q
    and of k before the rotation. With a cache, k and v also go to its slots [M], and come back as
    it gives them back: rounded, and k without its center, if the cache holds codes.
    """
    rows, columns = product_shape(qkv)
    cos, sin = rotations
    q_norm, k_norm = norms or (None, None)
    head_dim = 2 * cos.shape[1]
    all_heads = columns // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    assert columns == all_heads * head_dim
    _check(positions, (rows,), torch.int64)
    for table in rotations:
        _check(table, cos.shape, torch.float32)
    for norm in norms or ():
        _check(norm, (head_dim,), torch.float32)
    q = torch.empty(rows, num_heads, head_dim, dtype=dtype, device=positions.device)
    k, v = q.new_empty(2, rows, num_kv_heads, head_dim) if keep_kv else (None, None)
    heads = max(_TILE // next_power_of_2(head_dim // 2), 1)
    inputs = {"positions": positions, "cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm}
    outputs = {"q_out": q, "k_out": k, "v_out": v}
    args: dict[str, Any] = {
        **product_args(qkv),
        **inputs,
        **outputs,
        **_cache_args(cache, rows, num_kv_heads, head_dim),
        "num_rows": rows,
        "eps": eps,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "num_warps": _NUM_WARPS,
        # Otherwise the compiler saves registers by waiting for some numbers before loading others.
        "maxnreg": 64 if norms is None else 80,
        **overlapping(positions.device),
        **EXACT,
    }
    rotate_kernel[(rows, divide_up(all_heads, heads))](**args)
    return (q,) if k is None or v is None else (q, k, v)


def _cache_args(
    cache: LayerCache | None, rows: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    if cache is None or cache.slots is None:
        return {**dict.fromkeys(("kv", "slots", "kv_scale", "kv_center")), "plane_stride": 0}
    kv, slots, scale, center = cache.data, cache.slots, cache.scale, cache.center
    _check(slots, (rows,), torch.int64)
    _check(kv[0], (*kv.shape[1:3], kv_heads, head_dim), kv.dtype)
    has_codes = kv.dtype == torch.float8_e4m3fn
    assert (scale is not None, center is not None) == (has_codes, has_codes)
    if scale is not None and center is not None:
        _check(scale, (2, kv_heads), torch.float32)
        _check(center, (kv_heads, head_dim), torch.float32)
    pointers = {"kv": kv, "slots": slots, "kv_scale": scale, "kv_center": center}
    return {**pointers, "plane_stride": kv.stride(0)}


def _check(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
    assert tensor.is_contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def rotate_kernel(
    acc,
    scale_x,
    scale_w,
    bias,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    kv,
    kv_scale,
    kv_center,
    q_out,
    k_out,
    v_out,
    num_rows,
    plane_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and HEADS heads, as tiles [HEADS, D / 2] of either half of a head."""
    N: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, triton.next_power_of_2(HEAD_DIM // 2))[None, :]
    is_lane = lane < HEAD_DIM // 2
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    mask = is_head & is_lane
    at_a = head * HEAD_DIM + lane
    at_b = at_a + HEAD_DIM // 2
    scale_a = load_channels(scale_w, at_a, mask)
    scale_b = load_channels(scale_w, at_b, mask)
    shift_a = load_channels(bias, at_a, mask)
    shift_b = load_channels(bias, at_b, mask)
    kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    if kv_scale is not None:
        # [2, H_kv] in the order of the heads.
        scale = tl.load(kv_scale + head - NUM_HEADS, mask=is_head & ~is_query, other=1.0)
        is_key = mask & ~is_query & ~is_value
        center_at = kv_center + (head - NUM_HEADS) * HEAD_DIM + lane
        center_a = tl.load(center_at, mask=is_key, other=0.0)
        center_b = tl.load(center_at + HEAD_DIM // 2, mask=is_key, other=0.0)
    if q_norm is not None:
        gain_a = _load_gain(q_norm, k_norm, is_query, lane, is_lane)
        gain_b = _load_gain(q_norm, k_norm, is_query, lane + HEAD_DIM // 2, is_lane)
    await_inputs(PDL)
    angle = tl.load(positions + row) * (HEAD_DIM // 2) + lane
    slot = None
    if slots is not None:
        slot = tl.load(slots + row)
    a = load_product(acc, scale_x, scale_a, shift_a, row, at_a, mask, num_rows, N, S, DTYPE)
    b = load_product(acc, scale_x, scale_b, shift_b, row, at_b, mask, num_rows, N, S, DTYPE)
    c = tl.load(cos + angle, mask=is_lane, other=0.0)
    s = tl.load(sin + angle, mask=is_lane, other=0.0)

    turned_a, turned_b = a, b
    if q_norm is not None:
        # In FP64, so that the trainer's order gives the same (`qurl.ops.rms_norm`).
        squares = (a * a).to(tl.float64) + (b * b).to(tl.float64)
        mean = (tl.sum(squares, axis=1, keep_dims=True) / HEAD_DIM).to(tl.float32)
        inverse = tl.rsqrt(mean + eps)
        turned_a = gain_a * (a * inverse)
        turned_b = gain_b * (b * inverse)
    turned_a, turned_b = turned_a * c - turned_b * s, turned_b * c + turned_a * s
    a = tl.where(is_value, a, turned_a)
    b = tl.where(is_value, b, turned_b)
    q_at = q_out + row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + lane
    _store_pair(q_at, a, b, mask & is_query, HEAD_DIM)
    kv_at = kv_head * HEAD_DIM + lane
    if kv is not None:
        a = narrow(a, q_out.dtype.element_ty).to(tl.float32)
        b = narrow(b, q_out.dtype.element_ty).to(tl.float32)
        if kv_scale is not None:
            a = divide_clamped(a - center_a, scale)
            b = divide_clamped(b - center_b, scale)
        slot_at = slot * (NUM_KV_HEADS * HEAD_DIM)
        plane_at = tl.where(is_value, plane_stride, 0).to(tl.int64)
        _store_pair(kv + plane_at + slot_at + kv_at, a, b, mask & ~is_query, HEAD_DIM)
    if k_out is not None:
        if kv_scale is not None:
            a = round_to_code(a, False) * scale
            b = round_to_code(b, False) * scale
        kept_at = row * (NUM_KV_HEADS * HEAD_DIM) + kv_at
        _store_pair(k_out + kept_at, a, b, mask & ~is_query & ~is_value, HEAD_DIM)
        _store_pair(v_out + kept_at, a, b, mask & is_value, HEAD_DIM)


@triton.jit
def _load_gain(q_norm, k_norm, is_query, lane, mask):
    q_gain = tl.load(q_norm + lane, mask=mask, other=0.0)
    k_gain = tl.load(k_norm + lane, mask=mask, other=0.0)
    return tl.where(is_query, q_gain, k_gain)


@triton.jit
def _store_pair(pointers, a, b, mask, HEAD_DIM: tl.constexpr):
    """Both halves of heads, rounded to the dtype of their destination."""
    store_rounded(pointers, a, mask)
    store_rounded(pointers + HEAD_DIM // 2, b, mask)
