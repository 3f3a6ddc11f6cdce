"""From the fused q, k, v projection to attention: head norms, rotary embedding, cache write.

    a, b = halves of a head;  a' = a cos - b sin;  b' = b cos + a sin
    cache = k' and v in the compute dtype, or as fp8(clamp(value / kv_scale, -448, 448))
            with k' - kv_center for k'

One launch. A program takes a few heads of one token, whether of q, k or v. FP32 until the results
are rounded to the compute dtype, and each head on its own, so that nothing depends on M.

Shapes: M tokens, H heads, D head_dim, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.rounding import EXACT, await_inputs, divide, narrow
from qurl.quant.linear import Product
from qurl.rollout.local.architecture import Architecture
from qurl.rollout.local.kernels.product import (
    load_channels,
    load_product,
    next_power_of_2,
    product_args,
    product_shape,
)
from qurl.rollout.local.ops import LayerCache, Places, Rotations

_FP8_MAX = tl.constexpr(448.0)
_NUM_WARPS = 4
_TILE = _NUM_WARPS * 32 * 4  # pairs of dimensions in a program: 16-byte loads of 32-bit parts


def rotate_and_store(
    qkv: Product,
    places: Places,
    rotations: Rotations,
    norms: tuple[Tensor, Tensor] | None,
    cache: LayerCache | None,
    arch: Architecture,
    dtype: torch.dtype,
    *,
    keep_kv: bool,
    pdl: bool,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """q [M, H, D], and with `keep_kv` k and v [M, H_kv, D], of qkv [M, (H + 2 H_kv) D], rotated.

    `norms` [D] are RMS norms of each head of q and of k before the rotation. Where there are slots,
    k and v go to the cache.
    """
    rows, _ = product_shape(qkv)
    num_heads, num_kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
    if places.slots is None:
        cache = None
    q_norm, k_norm = norms or (None, None)
    _check(qkv, places, rotations, (q_norm, k_norm), cache, arch)
    device = places.positions.device
    q = torch.empty(rows, num_heads, head_dim, dtype=dtype, device=device)
    k, v = q.new_empty(2, rows, num_kv_heads, head_dim) if keep_kv else (None, None)
    half = next_power_of_2(head_dim // 2)
    heads = max(_TILE // half, 1)
    args: dict[str, Any] = {
        **product_args(qkv),
        "plane_stride": 0 if cache is None else cache.data.stride(0),
        "num_rows": rows,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "HALF": half,
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": _NUM_WARPS,
        # Else the compiler saves registers by waiting for some numbers before it loads others.
        "maxnreg": 64,
        **EXACT,
    }
    rotate_kernel[(rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        positions=places.positions,
        slots=places.slots,
        cos=rotations.cos,
        sin=rotations.sin,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=arch.norm_eps,
        kv=cache and cache.data,
        kv_scale=cache and cache.scale,
        kv_center=cache and cache.center,
        q_out=q,
        k_out=k,
        v_out=v,
        **args,
    )
    return q if k is None or v is None else (q, k, v)


def _check(
    qkv: Product,
    places: Places,
    rotations: Rotations,
    norms: tuple[Tensor | None, Tensor | None],
    cache: LayerCache | None,
    arch: Architecture,
) -> None:
    rows, columns = product_shape(qkv)
    kv_heads, head_dim = arch.num_kv_heads, arch.head_dim
    assert columns == (arch.num_heads + 2 * kv_heads) * head_dim
    assert _fits(places.positions, (rows,), torch.int64)
    assert _fits(places.slots, (rows,), torch.int64)
    assert _fits(rotations.cos, (len(rotations), head_dim // 2), torch.float32)
    assert _fits(rotations.sin, rotations.cos.shape, torch.float32)
    for norm in norms:
        assert _fits(norm, (head_dim,), torch.float32)
    assert (cache is None) == (places.slots is None)
    if cache is not None:
        kv = cache.data
        assert _fits(kv[0], (*kv.shape[1:3], kv_heads, head_dim), kv.dtype)
        assert (kv.dtype == torch.float8_e4m3fn) == (cache.scale is not None)
        assert (cache.center is None) == (cache.scale is None)
        assert _fits(cache.scale, (2, kv_heads), torch.float32)
        assert _fits(cache.center, (kv_heads, head_dim), torch.float32)


def _fits(tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a tensor, if there is one, is what the kernel takes it for."""
    return tensor is None or (
        tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype and tensor.is_contiguous()
    )


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
    HALF: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and HEADS heads, as tiles [HEADS, HALF] of either half of a head."""
    N: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
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
        scale_at = kv_scale + head - NUM_HEADS
        scale = tl.load(scale_at, mask=is_head & ~is_query, other=1.0)
        is_key = mask & ~is_query & ~is_value
        center_at = kv_center + (head - NUM_HEADS) * HEAD_DIM + lane
        center_a = tl.load(center_at, mask=is_key, other=0.0)
        center_b = tl.load(center_at + HEAD_DIM // 2, mask=is_key, other=0.0)
    if q_norm is not None:
        gain_a = _load_gain(q_norm, k_norm, is_query, lane, is_lane)
        gain_b = _load_gain(q_norm, k_norm, is_query, lane + HEAD_DIM // 2, is_lane)
    await_inputs(PDL)
    angle = tl.load(positions + row) * (HEAD_DIM // 2) + lane
    if slots is not None:
        slot = tl.load(slots + row)
    a = load_product(acc, scale_x, scale_a, shift_a, row, at_a, mask, num_rows, N, S, DTYPE)
    b = load_product(acc, scale_x, scale_b, shift_b, row, at_b, mask, num_rows, N, S, DTYPE)
    c = tl.load(cos + angle, mask=is_lane, other=0.0)
    s = tl.load(sin + angle, mask=is_lane, other=0.0)

    normed_a, normed_b = a, b
    if q_norm is not None:
        squares = tl.sum(a * a + b * b, axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)
        normed_a = gain_a * (a * inverse)
        normed_b = gain_b * (b * inverse)
    turned_a = normed_a * c - normed_b * s
    turned_b = normed_b * c + normed_a * s
    a = tl.where(is_value, a, turned_a)
    b = tl.where(is_value, b, turned_b)

    q_at = q_out + row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + lane
    _store_pair(q_at, a, b, mask & is_query, HEAD_DIM)
    kv_at = kv_head * HEAD_DIM + lane
    if k_out is not None:
        kept_at = row * (NUM_KV_HEADS * HEAD_DIM) + kv_at
        _store_pair(k_out + kept_at, a, b, mask & ~is_query & ~is_value, HEAD_DIM)
        _store_pair(v_out + kept_at, a, b, mask & is_value, HEAD_DIM)
    if kv is not None:
        dtype: tl.constexpr = q_out.dtype.element_ty
        a = narrow(a, dtype).to(tl.float32)
        b = narrow(b, dtype).to(tl.float32)
        if kv_scale is not None:
            a = _divide_clamped(a - center_a, scale)
            b = _divide_clamped(b - center_b, scale)
        slot_at = slot * (NUM_KV_HEADS * HEAD_DIM)
        plane_at = tl.where(is_value, plane_stride, 0).to(tl.int64)
        _store_pair(kv + plane_at + slot_at + kv_at, a, b, mask & ~is_query, HEAD_DIM)


@triton.jit
def _load_gain(q_norm, k_norm, is_query, lane, mask):
    """The norm's weight for heads of q and of k."""
    q_gain = tl.load(q_norm + lane, mask=mask, other=0.0)
    k_gain = tl.load(k_norm + lane, mask=mask, other=0.0)
    return tl.where(is_query, q_gain, k_gain)


@triton.jit
def _divide_clamped(values, scale):
    """values / scale within the range of FP8."""
    # Clamped before the division, which must not overflow; 448 scale / scale rounds to 448.
    bound = _FP8_MAX * scale
    return divide(tl.clamp(values, -bound, bound, tl.PropagateNan.ALL), scale)


@triton.jit
def _store_pair(pointers, a, b, mask, HEAD_DIM: tl.constexpr):
    """Both halves of heads, rounded to what they are stored as."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers, narrow(a, dtype), mask=mask)
    tl.store(pointers + HEAD_DIM // 2, narrow(b, dtype), mask=mask)
