# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns cannot be iterated.)
"""Sampling and log-probs in one pass over the vocabulary: `qurl.rollout.sampler.sample` in Triton.

    x = logits / T;   p = softmax(x);   token = the first one with p[0] + ... + p[token] > u
    log p[token] = x[token] - max x - log sum exp(x - max x)

`summarise_kernel` computes the largest x and the sum of exponentials of each block of the
vocabulary. `sample_kernel` finds the block that u falls into, reads it again and finds the token.
Sums over blocks and over the chosen block's tokens are FP64, in an order that depends on V alone.

A greedy row (T = 0) takes the first of its largest logits, with its log-prob under T = 1. If the
logits have NaN, +inf or no finite number, the log-prob is NaN and the token some valid one.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import await_inputs, divide_up, next_power_of_2, overlapping

MAX_BLOCK = 4096


def sample_rows(
    logits: Tensor, temperature: Tensor, keys: Tensor, counters: Tensor, *, block: int = MAX_BLOCK
) -> tuple[Tensor, Tensor]:
    """A token [B] int64 and its log-prob [B] for each row of logits [B, V].

    All rows share the temperature [1], a tensor because a graph holds its address. The random
    number of a row is `uniform(keys, counters)`.
    """
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    assert temperature.shape == (1,)
    assert temperature.dtype == torch.float32
    for vector in (keys, counters):
        assert vector.shape == (rows,)
        assert vector.dtype == torch.int64
        assert vector.is_contiguous()

    block = min(block, next_power_of_2(vocabulary))
    num_blocks = divide_up(vocabulary, block)
    peaks, sums = logits.new_empty(2, rows, num_blocks, dtype=torch.float32)
    tokens, logprobs = keys.new_empty(rows), temperature.new_empty(rows)
    inputs = (logits, temperature, peaks, sums)
    shape: dict[str, Any] = {"V": vocabulary, "BLOCK": block, **overlapping(logits.device)}
    summarise_kernel[(num_blocks, rows)](*inputs, **shape)
    shape |= {"num_warps": 8}
    sample_kernel[(rows,)](*inputs, keys, counters, tokens, logprobs, **shape)
    return tokens, logprobs


@triton.jit
def summarise_kernel(
    logits, temperature, peaks, sums, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per block and row: max x and sum exp(x - max x)."""
    await_inputs(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    _, divisor = _load_temperature(temperature)
    x = _load_scaled(logits, row, block, divisor, V, BLOCK)
    peak = tl.max(x, 0)
    mass = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))
    index = row * triton.cdiv(V, BLOCK) + block
    tl.store(peaks + index, peak)
    tl.store(sums + index, tl.sum(mass, 0))


@triton.jit
def sample_kernel(
    logits,
    temperature,
    peaks,
    sums,
    keys,
    counters,
    tokens,
    logprobs,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    await_inputs(PDL)
    row = tl.program_id(0)
    is_greedy, divisor = _load_temperature(temperature)
    NUM_BLOCKS: tl.constexpr = triton.cdiv(V, BLOCK)
    PADDED_BLOCKS: tl.constexpr = triton.next_power_of_2(NUM_BLOCKS)
    blocks = tl.arange(0, PADDED_BLOCKS)
    index = row * NUM_BLOCKS + blocks
    is_block = blocks < NUM_BLOCKS
    peak = tl.load(peaks + index, mask=is_block, other=float("-inf"))
    total = tl.load(sums + index, mask=is_block, other=0.0)
    top = tl.max(peak, 0)
    mass = (total * tl.exp(peak - top)).to(tl.float64)
    random = load_uniform(keys, counters, row)
    block, share, whole = _choose(mass, random, peak == top, is_greedy, PADDED_BLOCKS)

    x = _load_scaled(logits, row, block, divisor, V, BLOCK)
    token_mass = tl.exp(x - tl.max(x, 0)).to(tl.float64)
    lane, _, _ = _choose(token_mass, share, x == top, is_greedy, BLOCK)
    token = tl.minimum(block * BLOCK + lane, V - 1)
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == lane, x, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, ((chosen - top).to(tl.float64) - tl.log(whole)).to(tl.float32))


@triton.jit
def _choose(mass, share, is_largest, is_greedy, N: tl.constexpr):
    """The first index whose cumulative mass exceeds share * whole, or the first of the largest.

    Also returns where the share lies within the mass of that index, from 0 to 1, and the whole.
    """
    at = tl.arange(0, N)
    cumulative = tl.cumsum(mass, 0)
    whole = tl.sum(tl.where(at == N - 1, cumulative, 0.0), 0)
    # Stay below the whole even if the product rounds up to it, so that something exceeds it.
    target = tl.minimum(share * whole, whole * (1 - 2.0**-52))
    is_possible = mass > 0
    is_hit = tl.where(is_greedy, is_largest, (cumulative > target) & is_possible)
    first = tl.min(tl.where(is_hit, at, N), 0)
    # A parallel scan need not be monotone in its last bit; and with NaN nothing exceeds anything.
    last = tl.max(tl.where(is_possible, at, 0), 0)
    index = tl.where(first < N, first, last)
    before = tl.sum(tl.where(at == index - 1, cumulative, 0.0), 0)
    own = tl.sum(tl.where(at == index, mass, 0.0), 0)
    return index, tl.maximum(target - before, 0.0) / own, whole


@triton.jit
def _load_temperature(temperature):
    """Whether rows are greedy, and the divisor of their logits."""
    value = tl.load(temperature)
    return value == 0, tl.where(value == 0, 1.0, value)


@triton.jit
def _load_scaled(logits, row, block, divisor, V: tl.constexpr, BLOCK: tl.constexpr):
    """x of a block's tokens, -inf beyond the vocabulary."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))
    x = x.to(tl.float32)
    if divisor != 1.0:
        x = tl.div_rn(x, divisor)
    return x


@triton.jit
def load_uniform(keys, counters, row):
    """`qurl.rollout.sampler.uniform` of a row: splitmix64."""
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    counter = tl.load(counters + row).to(tl.uint64, bitcast=True)
    z = key + (counter + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 2.0**-53
