"""Kernels of causal attention over packed sequences, see `flash`.

Tiles of queries are counted from the end of a sequence and tiles of keys from its start: the
partial tile is the one with the least work. Programs with the most work start first. Only tiles
that a query's own key or the window cuts through are masked.

On Hopper a product runs while the warps that issued it do other work. So the product of the next
tile is issued before the softmax of this one, and that of dp before p is computed. Sums of s and dp
start from -lse and -delta instead of zero, which saves registers: the gradient of keys has none to
spare. Look at what the compiler made of a change: short of registers, it runs products one by one.

Shapes: N tokens of B sequences, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from qurl.ops.rounding import as_factor, narrow, store_rounded

LOG2_E = tl.constexpr(math.log2(math.e))
HIDDEN = tl.constexpr(-1e8)
"""Score of a hidden key. A tile may hide all keys of a query. Then p is exp2 of the rounding error
of score * factor, which must stay finite until the first key that is seen shrinks it to zero."""


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
def dot(a, b, acc):
    return tl.dot(as_factor(a), as_factor(b), acc, input_precision="ieee")


@triton.jit
def softmax_step(s, largest, total, factor):
    """p of scores [queries, keys], what earlier sums shrink by, largest score and sum of p so far.

    An engine that attends to the same tiles of keys in the same order gets the same bits.
    """
    larger = tl.maximum(largest, tl.max(s, 1) * factor)
    shrink = tl.exp2(largest - larger)
    p = tl.exp2(s * factor - larger[:, None])
    return p, shrink, larger, total * shrink + tl.sum(p, 1)


@triton.jit
def is_seen(row, key, window):
    seen = key <= row
    if window is not None:
        seen = seen & (key > row - window)
    return seen


@triton.jit
def _whole_and_cut_keys(first, window, KEYS: tl.constexpr):
    """Where keys begin that all queries from `first` on see, and where those begin to mask."""
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
    start, length = _sequence(bounds)  # type: ignore[misc]
    end = length - _rank(length, longest, QUERIES) * QUERIES
    if (end > length) | (end <= 0):
        return
    first = end - QUERIES
    row, block = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    origin = start.to(tl.int64)
    q_tile = _load_rows(q + origin * q_token + head * D, row, q_token, row >= 0, D)
    k += origin * k_token + kv_head * D
    v += origin * v_token + kv_head * D
    factor = scale * LOG2_E

    acc = tl.zeros([QUERIES, D], tl.float32)
    largest = tl.full([QUERIES], HIDDEN, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    low, high = _whole_and_cut_keys(first, window, KEYS)
    # Scores of keys after `end` are replaced, whatever the copy engine reads there.
    IS_CUT_K: tl.constexpr = k_tiles is None
    place = start, kv_head * D
    k_tile = _load_tile(k, k_tiles, *place, low, k_token, end, KEYS, D, IS_CUT_K)
    next_s = dot(q_tile, k_tile.T, None)
    for IS_CUT in tl.static_range(2):
        for key in range(low, high, KEYS):
            s = next_s
            k_tile = _load_tile(k, k_tiles, *place, key + KEYS, k_token, end, KEYS, D, IS_CUT_K)
            next_s = dot(q_tile, k_tile.T, None)
            if IS_CUT:
                s = tl.where(is_seen(row[:, None], key + block[None, :], window), s, HIDDEN)
            p, shrink, largest, total = softmax_step(s, largest, total, factor)
            v_tile = _load_tile(v, v_tiles, *place, key, v_token, end, KEYS, D, IS_CUT)
            acc = dot(narrow(p, v_tile.dtype), v_tile, acc * shrink[:, None])
        low, high = high, end

    is_row = row >= 0
    log_sum = (largest + tl.log2(total)) / factor
    tl.store(lse + head * num_tokens + start + row, log_sum, mask=is_row)
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
    start, length = _sequence(bounds)  # type: ignore[misc]
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
    log_sum = tl.load(lse + at_row, mask=is_row, other=0.0)
    k += origin * k_token + kv_head * D
    v += origin * v_token + kv_head * D
    factor = scale * LOG2_E

    acc = tl.zeros([QUERIES, D], tl.float32)
    low, high = _whole_and_cut_keys(first, window, KEYS)
    for IS_CUT in tl.static_range(2):
        for key in range(low, high, KEYS):
            place = start, kv_head * D, key
            k_tile = _load_tile(k, k_tiles, *place, k_token, end, KEYS, D, IS_CUT)
            v_tile = _load_tile(v, v_tiles, *place, v_token, end, KEYS, D, IS_CUT)
            s = dot(q_tile, k_tile.T, tl.broadcast_to(-log_sum[:, None], [QUERIES, KEYS]))
            dp = dot(d_tile, v_tile.T, tl.broadcast_to(-change[:, None], [QUERIES, KEYS]))
            p = tl.exp2(s * factor)
            if IS_CUT:
                p = tl.where(is_seen(row[:, None], key + block[None, :], window), p, 0.0)
            ds = p * dp
            acc = dot(narrow(ds, k_tile.dtype), k_tile, acc)
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
    start, length = _sequence(bounds)  # type: ignore[misc]
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
    factor = scale * LOG2_E

    # Tiles of queries from the end on: up to `cut` they see every key, then they are masked.
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
        per_head = tl.maximum(high - low, 1)  # loads ahead of the loop divide by it too
        for i in range(0, group * (high - low)):
            head = kv_head * group + i // per_head
            row = end - (low + i % per_head + 1) * QUERIES
            place = start, head * D, row
            q_tile = _load_tile(q + head * D, q_tiles, *place, q_token, end, QUERIES, D, IS_CUT)
            d_tile = _load_tile(d_out + head * D, d_tiles, *place, width, end, QUERIES, D, IS_CUT)
            rows = row + block
            at_row = head * num_tokens + start + rows
            if IS_CUT:
                log_sum = tl.load(lse + at_row, mask=rows >= 0, other=0.0)
                change = tl.load(delta + at_row, mask=rows >= 0, other=0.0)
            else:
                log_sum = tl.load(lse + at_row)
                change = tl.load(delta + at_row)
            s = dot(k_tile, q_tile.T, tl.broadcast_to(-log_sum[None, :], [KEYS, QUERIES]))
            dp = dot(v_tile, d_tile.T, tl.broadcast_to(-change[None, :], [KEYS, QUERIES]))
            p = tl.exp2(s * factor)
            if IS_CUT:
                p = tl.where(is_seen(rows[None, :], key[:, None], window), p, 0.0)
            dv_tile = dot(narrow(p, d_tile.dtype), d_tile, dv_tile)
            ds = p * dp
            dk_tile = dot(narrow(ds, q_tile.dtype), q_tile, dk_tile)
        low, high = 0, cut
    at = origin * kv_width + kv_head * D + key[:, None] * kv_width + tl.arange(0, D)[None, :]
    store_rounded(dk + at, dk_tile * scale, is_key[:, None])
    store_rounded(dv + at, dv_tile, is_key[:, None])
