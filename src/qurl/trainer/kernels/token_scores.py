# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns cannot be iterated.)
"""Log-probs and entropies of logits for `qurl.trainer.head`, in one pass over memory each way.

    z = factor x;   peak = max x;   d = x - peak
    mass = sum exp(factor d);   moment = sum exp(factor d) d

    log Z = factor peak + log mass;   log p = z - log Z;   entropy = log mass - factor moment / mass

of logits x. No d is positive, so nothing cancels in the entropy. `score_blocks_kernel` computes
peak, mass and moment of each block of the vocabulary, `score_rows_kernel` adds them up in FP64, in
an order that depends on V alone. `logit_gradients_kernel` is the backward pass:

    dx = (grad_logp (onehot(target) - p) - grad_entropy p (log p + entropy)) factor

A token with logit -inf contributes nothing. A row with NaN, with +inf or with -inf throughout has
NaN scores; so has a target outside the vocabulary.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import await_inputs, divide_up, next_power_of_2, overlapping
from qurl.ops.rounding import store_rounded

MAX_BLOCK = 4096

_LOG2_E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def score_rows(
    logits: Tensor, targets: Tensor, factor: float, *, block: int = MAX_BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """log p of the target, log Z and entropy, [n] each, from logits [n, V] and targets [n]."""
    _check_rows(logits, targets)
    num_blocks, shape = _blocks(logits, block)
    peaks, masses, moments = logits.new_empty(3, len(logits), num_blocks)
    logp, log_z, entropy = (logits.new_empty(len(logits)) for _ in range(3))
    score_blocks_kernel[(len(logits) * num_blocks,)](
        logits, factor, peaks, masses, moments, **shape
    )
    shape |= {"num_warps": 1}
    score_rows_kernel[(len(logits),)](
        logits, targets, factor, peaks, masses, moments, logp, log_z, entropy, **shape
    )
    return logp, log_z, entropy


def logit_gradients(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    grad_logp: Tensor,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    *,
    factor: float,
    dtype: torch.dtype,
    out: Tensor | None = None,
    block: int = MAX_BLOCK,
) -> Tensor:
    """d logits [n, V] in `dtype`, from the logits [n, V] and vectors [n].

    Without `out`, FP32 gradients overwrite the logits. Without `entropy` the loss has no entropy
    term.
    """
    assert (entropy is None) == (grad_entropy is None)
    vectors = (log_z, entropy, grad_logp, grad_entropy)
    _check_rows(logits, targets, *(vector for vector in vectors if vector is not None))
    if out is None:
        out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (logits.shape, dtype)
    num_blocks, shape = _blocks(logits, block)
    shape |= {"num_warps": 8}
    logit_gradients_kernel[(len(logits) * num_blocks,)](
        logits, targets, *vectors, out, factor, **shape
    )
    return out


def _check_rows(logits: Tensor, targets: Tensor, *vectors: Tensor) -> None:
    assert targets.dtype == torch.int64
    assert all(tensor.dtype == torch.float32 for tensor in (logits, *vectors))
    assert all(tensor.is_contiguous() for tensor in (logits, targets, *vectors))
    assert all(vector.shape == logits.shape[:1] for vector in (targets, *vectors))


def _blocks(logits: Tensor, block: int) -> tuple[int, dict[str, Any]]:
    """Programs of a row with blocks of up to `block` tokens, and the constants of a launch."""
    vocabulary = logits.shape[1]
    block = min(block, next_power_of_2(vocabulary))
    shape = {"V": vocabulary, "BLOCK": block, **overlapping(logits.device)}
    return divide_up(vocabulary, block), shape


@triton.jit(do_not_specialize=["factor"])
def score_blocks_kernel(
    logits, factor, peaks, masses, moments, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per row and block of its tokens."""
    await_inputs(PDL)
    index = tl.program_id(0)
    row, token = _locate(index, V, BLOCK)
    x = _load_logits(logits, row, token, V)
    peak = tl.max(x, 0)
    # In a block of impossible tokens, infinity minus infinity would be NaN.
    distance = x - tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.exp2(distance * (factor * _LOG2_E))
    # So would zero times infinity. A NaN that is lost here is still in the mass.
    moment = mass * tl.maximum(distance, _LOWEST)
    tl.store(peaks + index, peak)
    tl.store(masses + index, tl.sum(mass, 0))
    tl.store(moments + index, tl.sum(moment, 0))


@triton.jit(do_not_specialize=["factor"])
def score_rows_kernel(
    logits,
    targets,
    factor,
    peaks,
    masses,
    moments,
    logp,
    log_z,
    entropy,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: moves its blocks to a common peak and adds them up."""
    await_inputs(PDL)
    row = tl.program_id(0)
    NUM_BLOCKS: tl.constexpr = triton.cdiv(V, BLOCK)
    block = tl.arange(0, triton.next_power_of_2(NUM_BLOCKS))
    index = row * NUM_BLOCKS + block
    is_block = block < NUM_BLOCKS
    peak = tl.load(peaks + index, mask=is_block, other=float("-inf"))
    mass = tl.load(masses + index, mask=is_block, other=0.0).to(tl.float64)
    moment = tl.load(moments + index, mask=is_block, other=0.0).to(tl.float64)
    top = tl.max(peak, 0)
    distance = (peak - top).to(tl.float64)
    shrink = tl.exp(distance * factor)
    distance = tl.where(shrink == 0, 0.0, distance)
    moment = tl.sum(shrink * (moment + distance * mass), 0)
    mass = tl.sum(shrink * mass, 0)
    log_mass = tl.log(mass)

    target = tl.load(targets + row)
    is_token = (target >= 0) & (target < V)
    at = row.to(tl.int64) * V + target
    x = tl.load(logits + at, mask=is_token, other=float("nan"))
    tl.store(logp + row, (factor * (x - top).to(tl.float64) - log_mass).to(tl.float32))
    tl.store(log_z + row, (factor * top.to(tl.float64) + log_mass).to(tl.float32))
    tl.store(entropy + row, (log_mass - factor * moment / mass).to(tl.float32))


@triton.jit(do_not_specialize=["factor"])
def logit_gradients_kernel(
    logits,
    targets,
    log_z,
    entropy,
    grad_logp,
    grad_entropy,
    out,
    factor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and block of its tokens. `out` may be the logits."""
    await_inputs(PDL)
    row, token = _locate(tl.program_id(0), V, BLOCK)
    log_p = _load_logits(logits, row, token, V) * factor - tl.load(log_z + row)
    p = tl.exp(log_p)
    upstream = tl.load(grad_logp + row)
    slope = upstream
    if grad_entropy is not None:
        surprise = tl.where(p == 0, 0.0, log_p) + tl.load(entropy + row)
        slope += tl.load(grad_entropy + row) * surprise
    gradient = tl.where(token == tl.load(targets + row), upstream, 0.0) - slope * p
    at = row.to(tl.int64) * V + token
    store_rounded(out + at, gradient * factor, token < V)


@triton.jit
def _locate(index, V: tl.constexpr, BLOCK: tl.constexpr):
    num_blocks: tl.constexpr = triton.cdiv(V, BLOCK)
    return index // num_blocks, (index % num_blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _load_logits(logits, row, token, V: tl.constexpr):
    """Logits of a row's tokens, -inf beyond the vocabulary."""
    at = row.to(tl.int64) * V + token
    return tl.load(logits + at, mask=token < V, other=float("-inf"))
