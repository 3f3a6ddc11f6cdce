# pyright: reportGeneralTypeIssues=false
# (To pyright neither `tl.static_range` nor what a jitted function returns can be iterated.)
"""Attention of one query per sequence over its pages, split along the keys.

    out = sum_j exp(s[j]) v[j] / sum_j exp(s[j]),   s[j] = q . k[j] / sqrt(D)

over the keys j with position - window < j <= position, cut into chunks of fixed length.
`split_kernel` attends within one chunk, for all query heads that share a key head, and stores each
head's largest score, sum of weights and weighted sum of values. `combine_kernel` merges the chunks
of a sequence in ascending order and quantizes the row. The cut depends neither on the batch nor on
its longest sequence, so neither do the bits of a row.

An FP8 cache is read as pairs of codes, 16 bits each, because `ldmatrix` moves and transposes 16-bit
units. In registers both codes become FP16, exactly, so products and sums are those of 16-bit
attention: even dimensions meet the first codes of the pairs, odd ones the second. FP16 and not
BF16, because E4M3 to FP16 is one instruction and to BF16 four. A power of two brings queries into
FP16's range; the scale of the scores takes it back.

Shapes: B sequences, H heads, D head_dim, P pages of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import DTYPES, EXACT, await_inputs, divide_up, next_power_of_2, overlapping
from qurl.ops.rounding import INTERPRETED, as_factor, narrow
from qurl.quant.formats import BLOCK, Format, Quantized
from qurl.quant.kernels.product import empty_operand, quantize_row
from qurl.quant.linear import Operand

CHUNK = 512
_COMBINED = 16384  # numbers that a program of `combine_kernel` loads at once: 64 KiB in flight


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; it decides the last bits of a result."""

    chunk: int = CHUNK
    """Keys of one program."""
    block: int = 64
    """Keys of one step of its loop."""
    num_warps: int = 4
    num_stages: int = 3
    """Steps whose keys and values are loading or in use at the same time."""


def choose_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Tiling for a cache of this dtype; it must depend on the model alone."""
    # Measured on an H200 (benchmarks/attention.py): 16 KiB in flight a step is fastest.
    if head_dim * dtype.itemsize > 128:
        return Tiling(block=32, num_warps=2, num_stages=4)
    return Tiling(block=64, num_warps=4, num_stages=3)


def chunks_for(num_tokens: int, chunk: int = CHUNK) -> int:
    """The number of chunks that hold `num_tokens` keys."""
    return max(divide_up(num_tokens, chunk), 1)


def attend_pages(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    positions: Tensor,
    window: int | None,
    kv_scale: Tensor | None,
    format: Format | None,
    *,
    num_chunks: int,
    tiling: Tiling | None = None,
) -> Operand:
    """Attention [B, H * D] of q [B, H, D] over the pages table [B, P] of kv.

    kv [2, pages, page_size, H_kv, D] holds numbers of q's dtype, or FP8 codes with kv_scale
    [2, H_kv]. A query sees keys up to and including its position [B]. `num_chunks` may exceed what
    the longest sequence needs; a row is NaN if `num_chunks` or its table is too short for it.
    """
    tiling = tiling or choose_tiling(q.shape[2], kv.dtype)
    batch, kv_heads = q.shape[0], kv.shape[3]
    parts = q.new_empty(batch, num_chunks, *q.shape[1:], dtype=torch.float32)
    stats = q.new_empty(*parts.shape[:3], 2, dtype=torch.float32)
    cut = {"WINDOW": window or 0, "CHUNK": tiling.chunk, **overlapping(q.device)}
    assert kv.dtype == (q.dtype if kv_scale is None else torch.float8_e4m3fn)
    assert kv_scale is None or (kv_scale.is_contiguous() and kv_scale.shape == (2, kv_heads))
    assert (table.dtype, table.stride(1), len(table)) == (torch.int32, 1, batch)
    assert positions.shape == (batch,)
    assert all(tensor.is_contiguous() for tensor in (q, kv))
    shape = _shapes(q, kv, tiling)
    k, v = kv if kv_scale is None else kv.view(torch.int16)  # codes in pairs
    sources = (q, k, v, kv_scale, table, positions)
    sizes = (table.stride(0), table.shape[1], num_chunks)
    # Sequences before chunks, so that a group reads its common prompt at the same time.
    split_kernel[(kv_heads, batch, num_chunks)](*sources, parts, stats, *sizes, **shape, **cut)
    num_keys = min(num_chunks * tiling.chunk, table.shape[1] * kv.shape[2])
    operand = empty_operand(batch, q[0].numel(), format, q.dtype, q.device)
    _combine(parts, stats, positions, num_keys, operand, q.dtype, cut)
    return operand


def _shapes(q: Tensor, kv: Tensor, tiling: Tiling) -> dict[str, Any]:
    """The constants of `split_kernel`."""
    _, heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = kv.shape
    assert kv.shape[4] == head_dim
    assert heads % kv_heads == 0
    assert tiling.chunk % tiling.block == 0
    has_codes = kv.dtype != q.dtype
    width = head_dim // 2 if has_codes else head_dim
    group = heads // kv_heads
    operand = torch.float16 if has_codes and q.dtype == torch.bfloat16 else q.dtype
    return {
        "SOFTMAX_SCALE": math.log2(math.e) / math.sqrt(head_dim),
        "H_KV": kv_heads,
        "D": head_dim,
        "GROUP": group,
        "WIDTH": width,
        "HEADS": max(next_power_of_2(group), 8),
        "DIMS": max(next_power_of_2(width), 16),
        "OPERAND": DTYPES[operand],
        "PAGE_SIZE": page_size,
        "BLOCK": tiling.block,
        "STAGES": tiling.num_stages,
        "num_warps": tiling.num_warps,
    }


def _combine(
    parts: Tensor,
    stats: Tensor,
    positions: Tensor,
    num_keys: int,
    operand: Operand,
    dtype: torch.dtype,
    cut: dict[str, Any],
) -> None:
    batch, num_chunks, heads, head_dim = parts.shape
    width = max(next_power_of_2(heads * head_dim), BLOCK)
    columns = head_dim & -head_dim  # a power of two, so that no row of the tile has two heads
    unroll = min(max(_COMBINED // width, 1), 8)
    is_quantized = isinstance(operand, Quantized)
    out, out_scale = (operand.codes, operand.scale) if is_quantized else (operand, None)
    shape = {
        **cut,
        "RESULT": DTYPES[dtype],
        "LARGEST": float(operand.format.largest) if is_quantized else 0.0,
        "GROUP": (operand.format.block if is_quantized else None) or width,
        "H": heads,
        "D": head_dim,
        "R": width // columns,
        "C": columns,
        "UNROLL": unroll,
        "num_warps": min(max(unroll * width // 2048, 4), 16),
        **EXACT,
    }
    combine_kernel[(batch,)](parts, stats, positions, out, out_scale, num_chunks, num_keys, **shape)


@triton.jit(do_not_specialize=["table_stride", "num_pages", "num_chunks"])
def split_kernel(
    q,
    k,
    v,
    kv_scale,
    table,
    positions,
    parts,
    stats,
    table_stride,
    num_pages,
    num_chunks,
    SOFTMAX_SCALE: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    OPERAND: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per key head, sequence and chunk.

    GROUP query heads, padded to HEADS, meet keys of WIDTH numbers or pairs of codes, padded to
    DIMS. Tiles are [keys, heads] and [dims, heads], which pads heads to 8 instead of 16.
    """
    kv_head, chunk = tl.program_id(0), tl.program_id(2)
    sequence = tl.program_id(1).to(tl.int64)
    await_inputs(PDL)
    position = tl.load(positions + sequence).to(tl.int32)
    low, high = _seen_keys(position, chunk, num_pages * PAGE_SIZE, WINDOW, CHUNK, BLOCK)
    if low >= high:
        return

    heads, dims, keys = tl.arange(0, HEADS), tl.arange(0, DIMS), tl.arange(0, BLOCK)
    is_query = (heads < GROUP)[None, :] & (dims < WIDTH)[:, None]
    source = q + (sequence * (H_KV * GROUP) + kv_head * GROUP) * D
    source += (heads * D)[None, :] + (dims * (D // WIDTH))[:, None]
    query = tl.load(source, mask=is_query, other=0.0)
    acc = tl.zeros(query.shape, dtype=tl.float32)
    scale = SOFTMAX_SCALE
    if kv_scale is not None:
        odd_query = tl.load(source + 1, mask=is_query, other=0.0)
        odd_acc = tl.zeros(query.shape, dtype=tl.float32)
        query, odd_query, power = _bring_into_range(query, odd_query, OPERAND)
        scale *= (power * tl.load(kv_scale + kv_head))[None, :]
    top = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK, HEADS], dtype=tl.float32)
    table += sequence * table_stride
    page = load_page(table, low, keys, high, PAGE_SIZE, BLOCK)
    for start in tl.range(low, high, BLOCK, num_stages=STAGES):
        is_seen = start + keys < high
        if WINDOW:
            is_seen &= start + keys > position - WINDOW
        base, offsets = locate(page, start, keys, H_KV * WIDTH, PAGE_SIZE, BLOCK)
        # A step ahead, so that no load of keys has to wait for the load of their page.
        page = load_page(table, start + BLOCK, keys, high, PAGE_SIZE, BLOCK)
        base += kv_head * WIDTH
        # Unseen keys and values may be NaN; they are loaded as zero.
        is_key = is_seen[:, None] & (dims < WIDTH)[None, :]
        k_tile = tl.load(k + base + (offsets[:, None] + dims[None, :]), mask=is_key, other=0)
        is_value = is_seen[None, :] & (dims < WIDTH)[:, None]
        v_tile = tl.load(v + base + (offsets[None, :] + dims[:, None]), mask=is_value, other=0)
        scores = None
        if kv_scale is not None:
            k_tile, odd_k = _decode(k_tile)
            v_tile, odd_v = _decode(v_tile)
            scores = _times(odd_query, odd_k, None)
        scores = _times(query, k_tile, scores)
        scores = tl.where(is_seen[:, None], scores * scale, float("-inf"))
        weights, fade, top = _softmax_step(scores, top)
        total = total * fade + weights
        weights = narrow(weights, OPERAND)
        acc = _times(weights, v_tile, acc * fade)
        if kv_scale is not None:
            odd_acc = _times(weights, odd_v, odd_acc * fade)

    acc = tl.trans(acc)
    if kv_scale is not None:
        acc = tl.interleave(acc, tl.trans(odd_acc))
        acc *= tl.load(kv_scale + H_KV + kv_head)
    index = (sequence * num_chunks + chunk) * (H_KV * GROUP) + kv_head * GROUP + heads
    _store_part(parts, stats, index, heads < GROUP, top, tl.sum(total, 0), acc, D)


@triton.jit(do_not_specialize=["num_chunks", "num_keys"])
def combine_kernel(
    parts,
    stats,
    positions,
    out,
    out_scale,
    num_chunks,
    num_keys,
    H: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUP: tl.constexpr,
    RESULT: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sequence: its row as a tile [R, C], UNROLL chunks at once.

    The row is rounded to RESULT, then quantized if there is a scale.
    """
    sequence = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, R)
    is_row = rows < H * D // C
    head = rows // (D // C)
    columns = tl.arange(0, C)
    await_inputs(PDL)
    position = tl.load(positions + sequence).to(tl.int32)
    last = tl.minimum(position // CHUNK, num_chunks - 1)
    first = 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // CHUNK

    # Padding starts with a sum of 1 and stays 0 / 1.
    top = tl.where(is_row, float("-inf"), 0.0)
    total = tl.where(is_row, 0.0, 1.0)
    acc = tl.zeros([R, C], dtype=tl.float32)
    for start in tl.range(first, last + 1, UNROLL):
        tops, totals, values = (), (), ()
        new_top = top
        for chunk in tl.static_range(UNROLL):
            mask = is_row & (start + chunk <= last)
            part = sequence * num_chunks + start + chunk
            stat = stats + 2 * (part * H + head)
            value = parts + part * (H * D) + (rows * C)[:, None] + columns[None, :]
            tops += (tl.load(stat, mask=mask, other=float("-inf")),)
            totals += (tl.load(stat + 1, mask=mask, other=0.0),)
            values += (tl.load(value, mask=mask[:, None], other=0.0),)
            new_top = tl.maximum(new_top, tops[chunk])
        fade = tl.exp2(top - new_top)
        top = new_top
        total *= fade
        acc *= fade[:, None]
        for chunk in tl.static_range(UNROLL):
            weight = tl.exp2(tops[chunk] - top)
            total += totals[chunk] * weight
            acc += values[chunk] * weight[:, None]
    # Without a chunk or a page for the last keys, no number is better than a wrong one.
    total = tl.where(position < num_keys, total, float("nan"))

    row = narrow(tl.reshape(acc / total[:, None], [R * C // GROUP, GROUP]), RESULT)
    groups = tl.arange(0, R * C // GROUP)[:, None]
    columns = groups * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < H * D
    if out_scale is not None:
        row, scale = quantize_row(row.to(tl.float32), mask, LARGEST, out.dtype.element_ty)
        out_scale += sequence * tl.cdiv(H * D, GROUP)
        tl.store(out_scale + groups, scale, mask=groups * GROUP < H * D)
    tl.store(out + sequence * (H * D) + columns, row, mask=mask)


@triton.jit
def _seen_keys(
    position, chunk, num_keys, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The first key of a chunk that is seen, or one of its block, and the end."""
    low = chunk * CHUNK
    if WINDOW:
        low = tl.maximum(low, (position - WINDOW + 1) // BLOCK * BLOCK)
    return low, tl.minimum(tl.minimum((chunk + 1) * CHUNK, position + 1), num_keys)


@triton.jit
def _softmax_step(scores, top):
    """Weights of the scores, the factor for earlier sums, and the new largest score."""
    new_top = tl.maximum(top, tl.max(scores, 0))
    weights = tl.exp2(scores - new_top[None, :])
    return weights, tl.exp2(top - new_top)[None, :], new_top


@triton.jit
def load_page(table, start, keys, high, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of each key from `start` on; one for all if blocks do not cross pages."""
    at = start
    if PAGE_SIZE % BLOCK != 0:
        at += keys
    return tl.load(table + at // PAGE_SIZE, mask=at < high, other=0)


@triton.jit
def locate(page, start, keys, STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A base and an offset for each key from `start` on, STRIDE numbers each."""
    if PAGE_SIZE % BLOCK == 0:
        base = (page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE) * STRIDE
        offsets = keys * STRIDE
    else:
        base = 0
        offsets = (page.to(tl.int64) * PAGE_SIZE + (start + keys) % PAGE_SIZE) * STRIDE
    return base, offsets


@triton.jit
def _store_part(parts, stats, index, is_head, top, total, acc, D: tl.constexpr):
    """Store a chunk's results for `combine_kernel`, heads at `index` in [sequence, chunk, head]."""
    tl.store(stats + 2 * index, top, mask=is_head)
    tl.store(stats + 2 * index + 1, total, mask=is_head)
    columns = tl.arange(0, acc.shape[1])
    mask = is_head[:, None] & (columns < D)[None, :]
    tl.store(parts + (index * D)[:, None] + columns[None, :], acc, mask=mask)


@triton.jit
def _times(x, y, acc):
    """y x + acc in the dtype of x."""
    return tl.dot(as_factor(y.to(x.dtype)), as_factor(x), acc, input_precision="ieee")


@triton.jit
def _bring_into_range(even, odd, OPERAND: tl.constexpr):
    """Queries divided by 2^e of their head, and 2^e <= largest magnitude < 2^(e + 1).

    2^e is at least the smallest normal number.
    """
    magnitude = tl.maximum(tl.abs(even), tl.abs(odd)).to(tl.float32)
    exponent = tl.max(magnitude, 0).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent, 0x00800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, power)[None, :]
    return (even * inverse).to(OPERAND), (odd * inverse).to(OPERAND), power


@triton.jit
def _decode(pairs):
    """The first and the second E4M3 code of each pair, in FP16."""
    if INTERPRETED:
        first = _decode_one(pairs)
        second = _decode_one(pairs >> 8)
    else:
        # Triton's own conversion, one byte at a time, takes three times as many instructions.
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second


@triton.jit
def _decode_one(code):
    """The code in the low byte: its bits, moved up, are FP16 of a number 2^8 times smaller."""
    magnitude = ((code & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    magnitude = tl.where(code & 0x7F == 0x7F, float("nan"), magnitude)
    return tl.where(code & 0x80 == 0, magnitude, -magnitude).to(tl.float16)
