# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns cannot be iterated.)
"""Attention of one query per sequence over its pages, with the bits of the trainer's attention.

Quantizing what follows attention turns a last bit into a whole code, and each layer adds more of
them: after a few layers two flows that differ in bits differ as much as two roundings do. So a
policy that trains in codes (`quant.unified`) has to sample with equal bits. This kernel attends to
the tiles of keys that `qurl.ops.flash` attends to, in the same order and with the same matrix
instructions: a query is a row of a tile of queries, and only the rows of its own heads are kept.

Scales of an FP8 cache are powers of two. Applied to sums of codes, they give the bits of sums of
scaled numbers.

No other program shares the keys of a sequence, so long sequences take longer than in `attention`.

Shapes: B sequences, H heads, D head_dim, P pages of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.flash import plan_for
from qurl.ops.flash_kernels import HIDDEN, LOG2_E, dot, is_seen, softmax_step
from qurl.ops.launch import await_inputs, overlapping
from qurl.ops.rounding import narrow, store_rounded
from qurl.rollout.local.kernels.attention import load_page, locate

_QUERIES = 64
"""Rows of a tile, the fewest that Hopper's matrix instructions of four warps take."""


def attend_pages_alike(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    positions: Tensor,
    window: int | None,
    kv_scale: Tensor | None,
) -> Tensor:
    """Attention [B, H, D] of q [B, H, D]; arguments as for `attention.attend_pages`."""
    (batch, heads, size), (page_size, kv_heads) = q.shape, kv.shape[2:4]
    assert heads % kv_heads == 0
    assert heads // kv_heads <= _QUERIES
    assert all(tensor.is_contiguous() for tensor in (q, kv))
    assert (table.dtype, table.stride(1), len(table)) == (torch.int32, 1, batch)
    out = q.new_empty(q.shape)
    shape: dict[str, Any] = {
        "H_KV": kv_heads,
        "GROUP": heads // kv_heads,
        "D": size,
        "QUERIES": _QUERIES,
        "KEYS": plan_for(q).forward.keys,
        "PAGE_SIZE": page_size,
        "num_warps": 4,
        "num_stages": 3,
        **overlapping(q.device),
    }
    tensors = (q, kv[0], kv[1], kv_scale, table, positions, out)
    sizes = (table.stride(0), table.shape[1], window, size**-0.5)
    alike_kernel[(kv_heads, batch)](*tensors, *sizes, **shape)
    return out


@triton.jit(do_not_specialize=["table_stride", "num_pages"])
def alike_kernel(
    q,
    k,
    v,
    kv_scale,
    table,
    positions,
    out,
    table_stride,
    num_pages,
    window,
    scale,
    H_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per key head and sequence."""
    kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    await_inputs(PDL)
    position = tl.load(positions + sequence).to(tl.int32)
    head, block, dims = tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, D)
    place = (sequence * H_KV + kv_head) * (GROUP * D) + head[:, None] * D + dims[None, :]
    is_head = (head < GROUP)[:, None]
    q_tile = tl.load(q + place, mask=is_head, other=0.0)
    factor = scale * LOG2_E

    acc = tl.zeros([QUERIES, D], tl.float32)
    largest = tl.full([QUERIES], HIDDEN, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    end = tl.minimum(position + 1, num_pages * PAGE_SIZE)
    low = 0
    if window is not None:
        low = tl.maximum(position + 1 - window, 0) // KEYS * KEYS
    table += sequence * table_stride
    page = load_page(table, low, block, end, PAGE_SIZE, KEYS)
    for key in tl.range(low, end, KEYS):
        base, offsets = locate(page, key, block, H_KV * D, PAGE_SIZE, KEYS)
        # A step ahead, so that no load of keys has to wait for the load of their page.
        page = load_page(table, key + KEYS, block, end, PAGE_SIZE, KEYS)
        at = base + kv_head * D + offsets[:, None] + dims[None, :]
        # Unseen values may be NaN; they are loaded as zero.
        is_key = is_seen(position, key + block[:, None], window) & (key + block < end)[:, None]
        k_tile = _load(k + at, is_key, q.dtype.element_ty)
        s = dot(q_tile, k_tile.T, None)
        if kv_scale is not None:
            s *= tl.load(kv_scale + kv_head)
        s = tl.where(is_seen(position, key + block[None, :], window), s, HIDDEN)
        p, shrink, largest, total = softmax_step(s, largest, total, factor)
        v_tile = _load(v + at, is_key, q.dtype.element_ty)
        acc = dot(narrow(p, v_tile.dtype), v_tile, acc * shrink[:, None])

    if kv_scale is not None:
        acc *= tl.load(kv_scale + H_KV + kv_head)
    # Without a page for the last keys, no number is better than a wrong one.
    total = tl.where(position < end, total, float("nan"))
    store_rounded(out + place, acc / total[:, None], is_head)


@triton.jit
def _load(pointers, mask, dtype: tl.constexpr):
    """Keys, values or their codes as numbers that multiply, zero outside the mask."""
    numbers = tl.load(pointers, mask=mask, other=0.0)
    if numbers.dtype != dtype:
        numbers = numbers.to(tl.float32)  # compute capability 8.9 has no other way from FP8 to BF16
    return numbers.to(dtype)
