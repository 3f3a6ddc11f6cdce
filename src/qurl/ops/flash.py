"""Causal attention over packed sequences and its gradients, without a matrix of scores in memory.

    s[i, j] = scale q[i] . k[j]       over the keys j that query i sees: i - window < j <= i
    p[i, j] = exp(s[i, j] - lse[i])   with lse[i] = log sum_j exp s[i, j]
    o[i]    = sum_j p[i, j] v[j]

    dv[j]    = sum_i p[i, j] do[i]          delta[i] = do[i] . o[i]
    ds[i, j] = p[i, j] (do[i] . v[j] - delta[i])
    dq[i]    = scale sum_j ds[i, j] k[j]    dk[j] = scale sum_i ds[i, j] q[i]

Sums are FP32; p and ds are rounded to the dtype of the inputs before they are multiplied. Logarithms
have base 2. Heads share keys (GQA): a program that owns keys adds up the gradients of all its query
heads. Nothing is added by atomics, so results are deterministic, and those of a sequence do not
depend on what is packed beside it.

Tiles of queries are counted from the end of a sequence and tiles of keys from its start: the partial
tile is the one with the least work. Programs with the most work start first. Only tiles that a
query's own key or the window cuts through are masked.

Shapes: N tokens of B sequences, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qurl.ops.launch import divide_up
from qurl.ops.rounding import as_factor, narrow, store_rounded
from qurl.ops.target import Target

_LOG2_E = tl.constexpr(math.log2(math.e))
_HIDDEN = tl.constexpr(-1e30)
"""Score of a hidden key. It is finite: a row of hidden keys alone must not become NaN."""


@dataclass(frozen=True)
class Spans:
    """Which keys a query sees: none after it, none of other sequences, the last `window`."""

    bounds: Tensor
    """Sequence b has the tokens bounds[b] to bounds[b + 1]; INT32, on the device."""
    longest: int
    """No sequence is longer."""
    window: int | None = None


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts up queries and keys."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Loads in flight."""
    copies: bool = False
    """Whether the copy engine fetches tiles, where there is one."""


@dataclass(frozen=True)
class Plan:
    """The tiles of the three kernels."""

    forward: Tiles
    query_gradients: Tiles
    key_gradients: Tiles


PLANS = {
    ("hopper", 64): Plan(
        Tiles(128, 128, warps=8, stages=3, copies=True),
        Tiles(128, 64, warps=8, stages=3, copies=True),
        Tiles(64, 128, warps=8, stages=2, copies=True),
    ),
    ("hopper", 128): Plan(
        Tiles(128, 64, warps=8, stages=3, copies=True),
        Tiles(128, 64, warps=8, stages=2, copies=True),
        Tiles(64, 128, warps=8, stages=2, copies=True),
    ),
    ("ampere", 64): Plan(
        Tiles(128, 64, warps=4, stages=3),
        Tiles(64, 64, warps=4, stages=2),
        Tiles(64, 64, warps=4, stages=2),
    ),
    ("ampere", 128): Plan(
        Tiles(128, 64, warps=8, stages=2),
        Tiles(64, 64, warps=4, stages=2),
        Tiles(64, 64, warps=8, stages=2),
    ),
}
"""By generation and head_dim; "ampere" is every GPU with 99 KB of shared memory for a program."""


def supports(q: Tensor) -> bool:
    """Whether the kernels take such queries: 16 bits, and a head_dim that `PLANS` lists."""
    sizes = {size for _, size in PLANS}
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in sizes


def plan_for(q: Tensor) -> Plan:
    capability = Target.of(q.device).capability or (8, 0)
    generation = "hopper" if capability[0] in (9, 10) else "ampere"
    return PLANS[generation, 64 if q.shape[-1] <= 64 else 128]


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float | None = None) -> Tensor:
    """Attention [N, H, D] of q [N, H, D] to k and v [N, K, D], with gradients."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(*map(_with_whole_rows, (q, k, v)), spans, scale)  # type: ignore


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
        out, lse = forward(q, k, v, spans, scale, plan_for(q))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = grads[0].contiguous()
        found = gradients(q, k, v, out, lse, d_out, *ctx.options, plan_for(q))
        return *found, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, plan: Plan
) -> tuple[Tensor, Tensor]:
    """o [N, H, D] and the base-2 logarithms lse [H, N], FP32."""
    tiles = plan.forward
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    described = _describe([k, v], tiles.keys, tiles)
    arguments = _arguments(q, k, v, spans, scale, tiles)
    grid = (q.shape[1], len(spans.bounds) - 1, divide_up(spans.longest, tiles.queries))
    flash_forward_kernel[grid](q, k, v, *described, out, lse, **arguments)
    return out, lse


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    spans: Spans,
    scale: float,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, from what `forward` gave and the gradient of o."""
    assert out.is_contiguous()
    assert d_out.is_contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    batch = len(spans.bounds) - 1

    tiles = plan.query_gradients
    described = _describe([k, v], tiles.keys, tiles)
    arguments = _arguments(q, k, v, spans, scale, tiles)
    grid = (q.shape[1], batch, divide_up(spans.longest, tiles.queries))
    tensors = (q, k, v, *described, out, d_out, lse, delta, dq)
    flash_query_gradients_kernel[grid](*tensors, **arguments)

    tiles = plan.key_gradients
    described = _describe([q, d_out], tiles.queries, tiles)
    arguments = _arguments(q, k, v, spans, scale, tiles)
    grid = (k.shape[1], batch, divide_up(spans.longest, tiles.keys))
    tensors = (q, k, v, d_out, *described, lse, delta, dk, dv)
    flash_key_gradients_kernel[grid](*tensors, **arguments)
    return dq, dk, dv


def _with_whole_rows(x: Tensor) -> Tensor:
    """The heads of a token side by side; tokens may lie apart, as in a slice of q, k and v."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _describe(matrices: Sequence[Tensor], rows: int, tiles: Tiles) -> Sequence[Any]:
    """What the copy engine needs to fetch tiles of `rows` tokens and one head; None without it."""
    is_aligned = all(
        x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 for x in matrices
    )
    if not (tiles.copies and is_aligned and Target.of(matrices[0].device).has_descriptors):
        return [None] * len(matrices)
    return [TensorDescriptor.from_tensor(x.flatten(1), [rows, x.shape[2]]) for x in matrices]


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, tiles: Tiles
) -> dict[str, Any]:
    """What every launch is told."""
    (num_tokens, num_heads, size), num_kv_heads = q.shape, k.shape[1]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, size)
    assert num_heads % num_kv_heads == 0
    assert size in (16, 32, 64, 128), "other sizes are not implemented"
    assert spans.bounds.dtype == torch.int32
    assert spans.longest * max(q.stride(0), k.stride(0), v.stride(0)) < 2**31
    return {
        **{"q_token": q.stride(0), "k_token": k.stride(0), "v_token": v.stride(0)},
        **{"bounds": spans.bounds, "longest": spans.longest, "window": spans.window},
        **{"num_tokens": num_tokens, "group": num_heads // num_kv_heads},
        **{"scale": scale, "D": size, "QUERIES": tiles.queries, "KEYS": tiles.keys},
        **{"num_warps": tiles.warps, "num_stages": tiles.stages},
    }


@triton.jit
def _sequence(bounds):
    """Where this program's sequence starts, and how long it is."""
    start = tl.load(bounds + tl.program_id(1))
    return start, tl.load(bounds + tl.program_id(1) + 1) - start


@triton.jit
def _rank(length, longest, ROWS: tl.constexpr):
    """Tiles of the sequence with more work than this program's; negative: it has no tile.

    Counted so that work falls with program_id(2) over sequences of all lengths.
    """
    return tl.program_id(2) - (longest - length) // ROWS


@triton.jit
def _load_rows(x, row, stride, is_inside, D: tl.constexpr):
    """Rows of a head, zero outside the mask."""
    at = x + row[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=is_inside[:, None], other=0.0)


@triton.jit
def _load_tile(
    x,
    tiles,
    start,
    column,
    row,
    stride,
    end,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    IS_CUT: tl.constexpr,
):
    """ROWS rows of a head from `row` on; if IS_CUT, those outside 0 to `end` are zero.

    x points at the first row of the sequence and head; `tiles` counts rows from `start`.
    """
    rows = row + tl.arange(0, ROWS)
    if IS_CUT:
        tile = _load_rows(x, rows, stride, (rows >= 0) & (rows < end), D)
    elif tiles is not None:
        tile = tiles.load([start + row, column])
    else:
        tile = tl.load(x + rows[:, None] * stride + tl.arange(0, D)[None, :])
    return tile


@triton.jit
def _load_keys(x, tiles, start, column, row, stride, end, ROWS: tl.constexpr, D: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    if tiles is not None:
        tile = tiles.load([start + row, column])
    else:
        tile = _load_rows(x, rows, stride, rows < end, D)
    return tile


@triton.jit
def _dot(a, b, acc):
    return tl.dot(as_factor(a), as_factor(b), acc, input_precision="ieee")


@triton.jit
def _is_seen(row, key, window):
    is_seen = key <= row
    if window is not None:
        is_seen = is_seen & (key > row - window)
    return is_seen


@triton.jit
def _whole_and_cut_keys(first, window, KEYS: tl.constexpr):
    """Every query from `first` on sees the keys from a to b; from b on they are masked."""
    if window is None:
        low = 0
        high = tl.maximum(first + 1, 0) // KEYS * KEYS
    else:
        low = tl.maximum(first + 1 - window, 0) // KEYS * KEYS
        high = low
    return low, high


@triton.jit(do_not_specialize=["longest", "num_tokens", "group"])
def flash_forward_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    out,
    lse,
    bounds,
    q_token,
    k_token,
    v_token,
    longest,
    window,
    num_tokens,
    group,
    scale,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program per head, sequence and tile of queries."""
    head, kv_head = tl.program_id(0), tl.program_id(0) // group
    start, length = _sequence(bounds)
    end = length - _rank(length, longest, QUERIES) * QUERIES
    if (end > length) | (end <= 0):
        return
    first = end - QUERIES
    row, block = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    origin = start.to(tl.int64)
    q_tile = _load_rows(q + origin * q_token + head * D, row, q_token, row >= 0, D)
    k += origin * k_token + kv_head * D
    v += origin * v_token + kv_head * D
    factor = scale * _LOG2_E

    acc = tl.zeros([QUERIES, D], tl.float32)
    largest = tl.full([QUERIES], _HIDDEN, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    low, high = _whole_and_cut_keys(first, window, KEYS)
    place = start, kv_head * D
    k_tile = _load_keys(k, k_tiles, *place, low, k_token, end, KEYS, D)
    s_next = _dot(q_tile, k_tile.T, None)
    for IS_CUT in tl.static_range(2):
        for key in range(low, high, KEYS):
            s = s_next
            k_tile = _load_keys(k, k_tiles, *place, key + KEYS, k_token, end, KEYS, D)
            s_next = _dot(q_tile, k_tile.T, None)
            if IS_CUT:
                s = tl.where(_is_seen(row[:, None], key + block[None, :], window), s, _HIDDEN)
            larger = tl.maximum(largest, tl.max(s, 1) * factor)
            shrink = tl.exp2(largest - larger)
            largest = larger
            p = tl.exp2(s * factor - larger[:, None])
            total = total * shrink + tl.sum(p, 1)
            v_tile = _load_tile(v, v_tiles, *place, key, v_token, end, KEYS, D, IS_CUT)
            acc = _dot(narrow(p, v_tile.dtype), v_tile, acc * shrink[:, None])
        low, high = high, end

    is_row = row >= 0
    tl.store(lse + head * num_tokens + start + row, (largest + tl.log2(total)) / factor, mask=is_row)
    width = tl.num_programs(0) * D
    at = origin * width + head * D + row[:, None] * width + tl.arange(0, D)[None, :]
    store_rounded(out + at, acc / total[:, None], is_row[:, None])


@triton.jit(do_not_specialize=["longest", "num_tokens", "group"])
def flash_query_gradients_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    out,
    d_out,
    lse,
    delta,
    dq,
    bounds,
    q_token,
    k_token,
    v_token,
    longest,
    window,
    num_tokens,
    group,
    scale,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dq and delta; one program per head, sequence and tile of queries."""
    head, kv_head = tl.program_id(0), tl.program_id(0) // group
    start, length = _sequence(bounds)
    end = length - _rank(length, longest, QUERIES) * QUERIES
    if (end > length) | (end <= 0):
        return
    first = end - QUERIES
    row, block = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    is_row = row >= 0
    origin = start.to(tl.int64)
    width = tl.num_programs(0) * D
    at = origin * width + head * D
    q_tile = _load_rows(q + origin * q_token + head * D, row, q_token, is_row, D)
    d_tile = _load_rows(d_out + at, row, width, is_row, D)
    o_tile = _load_rows(out + at, row, width, is_row, D)
    change = tl.sum(o_tile.to(tl.float32) * d_tile.to(tl.float32), 1)
    at_row = head * num_tokens + start + row
    tl.store(delta + at_row, change, mask=is_row)
    log_total = tl.load(lse + at_row, mask=is_row, other=0.0)
    k += origin * k_token + kv_head * D
    v += origin * v_token + kv_head * D
    factor = scale * _LOG2_E

    acc = tl.zeros([QUERIES, D], tl.float32)
    low, high = _whole_and_cut_keys(first, window, KEYS)
    for IS_CUT in tl.static_range(2):
        for key in range(low, high, KEYS):
            place = start, kv_head * D, key
            k_tile = _load_tile(k, k_tiles, *place, k_token, end, KEYS, D, IS_CUT)
            v_tile = _load_tile(v, v_tiles, *place, v_token, end, KEYS, D, IS_CUT)
            s = _dot(q_tile, k_tile.T, tl.broadcast_to(-log_total[:, None], [QUERIES, KEYS]))
            dp = _dot(d_tile, v_tile.T, tl.broadcast_to(-change[:, None], [QUERIES, KEYS]))
            p = tl.exp2(s * factor)
            if IS_CUT:
                p = tl.where(_is_seen(row[:, None], key + block[None, :], window), p, 0.0)
            ds = p * dp
            acc = _dot(narrow(ds, k_tile.dtype), k_tile, acc)
        low, high = high, end
    to = dq + at + row[:, None] * width + tl.arange(0, D)[None, :]
    store_rounded(to, acc * scale, is_row[:, None])


@triton.jit(do_not_specialize=["longest", "num_tokens", "group"])
def flash_key_gradients_kernel(
    q,
    k,
    v,
    d_out,
    q_tiles,
    d_tiles,
    lse,
    delta,
    dk,
    dv,
    bounds,
    q_token,
    k_token,
    v_token,
    longest,
    window,
    num_tokens,
    group,
    scale,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dk and dv; one program per key head, sequence and tile of keys.

    Scores are transposed, [KEYS, QUERIES], so that they are left factors as they are. The loop goes
    over heads and tiles at once: its loads never run dry between heads.
    """
    kv_head = tl.program_id(0)
    start, length = _sequence(bounds)
    first = _rank(length, longest, KEYS) * KEYS
    if (first < 0) | (first >= length):
        return
    key, block = first + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    is_key = key < length
    origin = start.to(tl.int64)
    width, kv_width = tl.num_programs(0) * group * D, tl.num_programs(0) * D
    k_tile = _load_rows(k + origin * k_token + kv_head * D, key, k_token, is_key, D)
    v_tile = _load_rows(v + origin * v_token + kv_head * D, key, v_token, is_key, D)
    q += origin * q_token
    d_out += origin * width
    factor = scale * _LOG2_E

    # Tiles of queries from the end on: first those that see every key, then those to mask.
    if window is None:
        end = length
        cut = tl.maximum(end + 1 - first - KEYS, 0) // QUERIES
    else:
        end = tl.minimum(length, first + KEYS - 1 + window)
        cut = 0
    dk_tile = tl.zeros([KEYS, D], tl.float32)
    dv_tile = tl.zeros([KEYS, D], tl.float32)
    low, high = cut, tl.cdiv(end - first, QUERIES)
    for IS_CUT in tl.static_range(1, -1, -1):
        for i in range(0, group * (high - low)):
            head = kv_head * group + i // (high - low)
            row = end - (low + i % (high - low) + 1) * QUERIES
            place = start, head * D, row
            q_tile = _load_tile(q + head * D, q_tiles, *place, q_token, end, QUERIES, D, IS_CUT)
            d_tile = _load_tile(d_out + head * D, d_tiles, *place, width, end, QUERIES, D, IS_CUT)
            rows = row + block
            at_row = head * num_tokens + start + rows
            if IS_CUT:
                log_total = tl.load(lse + at_row, mask=rows >= 0, other=0.0)
                change = tl.load(delta + at_row, mask=rows >= 0, other=0.0)
            else:
                log_total = tl.load(lse + at_row)
                change = tl.load(delta + at_row)
            s = _dot(k_tile, q_tile.T, tl.broadcast_to(-log_total[None, :], [KEYS, QUERIES]))
            dp = _dot(v_tile, d_tile.T, tl.broadcast_to(-change[None, :], [KEYS, QUERIES]))
            p = tl.exp2(s * factor)
            if IS_CUT:
                p = tl.where(_is_seen(rows[None, :], key[:, None], window), p, 0.0)
            dv_tile = _dot(narrow(p, d_tile.dtype), d_tile, dv_tile)
            ds = p * dp
            dk_tile = _dot(narrow(ds, q_tile.dtype), q_tile, dk_tile)
        low, high = 0, cut
    at = origin * kv_width + kv_head * D + key[:, None] * kv_width + tl.arange(0, D)[None, :]
    store_rounded(dk + at, dk_tile * scale, is_key[:, None])
    store_rounded(dv + at, dv_tile, is_key[:, None])
