"""Matrix products of codes, at decode sizes bound by reading the weights.

    y[m, n] = (sum_k x[m, k] w[n, k]) * scale_w[n] * scale_x[m] + bias[n]

Weights are on the side of the matrix unit that takes 64 rows at a time, tokens on the side that
takes as few as 8 (swap-AB), so a batch of 16 sequences wastes nothing. Few output tiles leave
multiprocessors idle, so K can be cut into S parts (split-K). The consumer of the product adds the
parts in a fixed order; they need neither atomics nor a separate reduction.

The gate and up projections of an MLP are one product whose channels alternate (gate 0, up 0, gate
1, ...): a tile holds both and computes silu(gate) * up itself. It also leaves the largest magnitude
of each token, which the next quantizer needs.

"fp8-block" has one scale for every 128 columns, NVFP4 a kernel of its own (`packed`). The same
kernel multiplies BF16 numbers where results must not depend on the batch; elsewhere cuBLAS does.
FP32 numbers are not rounded to TF32.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.rounding import as_factor
from qurl.quant.formats import BLOCK, Quantized
from qurl.quant.kernels.packed import decode, multiply_packed
from qurl.quant.kernels.tiles import Plan, as_tiles, load_tile, prefetch_weights, store_tile
from qurl.quant.linear import Operand, Partial, Product

EXACT_DEPTH = 128
"""Input channels that a matrix unit adds up by itself, unless a plan is fast."""


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def gemm_kernel(
    x,
    w,
    w_pointer,
    y,
    scale_x,
    scale_w,
    bias,
    amax,
    M,
    N,
    K,
    steps_per_split,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_FINISHED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    LONGEST_SUM: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile y[TOKENS, CHANNELS] of one part of K."""
    num_token_tiles = tl.cdiv(M, TOKENS)
    # Tiles that share weights are neighbours, so that the second finds them in L2.
    first_token = (tl.program_id(0) % num_token_tiles) * TOKENS
    first_channel = (tl.program_id(0) // num_token_tiles) * CHANNELS
    part = tl.program_id(1)
    first_step = part * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, tl.cdiv(K, DEPTH))

    if PDL:
        if PREFETCH_LINES > 0:
            prefetch_weights(
                w_pointer, first_channel, first_step * DEPTH, N, K, CHANNELS, PREFETCH_LINES
            )
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    tokens = first_token + tl.arange(0, TOKENS)
    channels = first_channel + tl.arange(0, CHANNELS)
    depth = tl.arange(0, DEPTH)
    IS_INTEGER: tl.constexpr = w_pointer.dtype.element_ty == tl.int8
    acc = tl.zeros((CHANNELS, TOKENS), tl.int32 if IS_INTEGER else tl.float32)
    for step in range(first_step, last_step):
        column = step * DEPTH
        if HAS_DESCRIPTORS:
            w_tile = w.load([first_channel, column])
            x_tile = x.load([first_token, column])
        else:
            w_tile = load_tile(w, channels, column + depth, N, K)
            x_tile = load_tile(x, tokens, column + depth, M, K)
        w_tile, x_tile = as_factor(w_tile), as_factor(x_tile)
        if IS_BLOCKED:
            num_groups = tl.cdiv(K, DEPTH)
            sx = tl.load(scale_x + tokens.to(tl.int64) * num_groups + step, tokens < M, 0.0)
            sw = tl.load(scale_w + (channels // DEPTH) * num_groups + step, channels < N, 0.0)
            acc += tl.dot(w_tile, x_tile.T) * sx[None, :] * sw[:, None]
        elif IS_INTEGER:
            acc = tl.dot(w_tile, x_tile.T, acc, out_dtype=tl.int32)
        else:
            # FP8 sums lose bits in the matrix unit, so every EXACT_DEPTH they are added up in FP32
            # outside, unless the plan is fast. Either way tiles of all sizes have the same bits.
            acc = tl.dot(
                w_tile,
                x_tile.T,
                acc,
                input_precision="ieee" if w_tile.dtype == tl.float32 else None,
                max_num_imprecise_acc=LONGEST_SUM,
            )

    store_tile(
        y,
        acc.T,
        bias,
        part,
        tokens,
        first_channel,
        M,
        N,
        IS_FINISHED,
        IS_GATED,
        scale_x,
        scale_w,
        amax,
        IS_BLOCKED,
    )


def multiply(
    x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype, plan: Plan
) -> Product:
    """x W^T + b for x [M, K] and W [N, K], both codes or both numbers; NVFP4 takes numbers."""
    (numbers, scale_x), (w, scale_w) = _parts(x), _parts(weight)
    acc_dtype = torch.float32 if numbers.is_floating_point() else torch.int32
    y_dtype = acc_dtype if plan.splits else dtype
    y = numbers.new_empty(plan.num_parts, len(numbers), len(w), dtype=y_dtype)
    _launch(x, weight, bias, y, plan)
    if not plan.splits:
        return y[0]
    # Scales of blocks and groups were applied inside the sum.
    has_scales_inside = _is_blocked(weight) or is_packed(weight)
    scales = (None, None) if has_scales_inside else (scale_x, scale_w)
    return Partial(y, *scales, bias, dtype)


def multiply_gated(
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    plan: Plan,
    amax: Tensor | None = None,
) -> Tensor:
    """silu(gate) * up [M, N / 2] of a W whose channels alternate between gate and up.

    `amax` [M] must be zero; it receives the largest magnitude of each row.
    """
    assert plan.splits == 0, "a gated product is finished here"
    (numbers, _), (w, _) = _parts(x), _parts(weight)
    assert len(w) % 2 == 0
    y = numbers.new_empty(len(numbers), len(w) // 2, dtype=dtype)
    _launch(x, weight, bias, y, plan, is_gated=True, amax=amax)
    return y


def _parts(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """The matrix of an operand, codes or numbers, and the scale of codes."""
    parts = (operand.codes, operand.scale) if isinstance(operand, Quantized) else (operand, None)
    assert all(part is None or part.is_contiguous() for part in parts)
    return parts


def is_packed(operand: Operand) -> TypeGuard[Quantized]:
    """Whether it holds NVFP4 codes, two in a byte."""
    return isinstance(operand, Quantized) and operand.format.is_weight_only


def _is_blocked(operand: Operand) -> bool:
    return isinstance(operand, Quantized) and operand.format.block is not None


def _launch(
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    y: Tensor,
    plan: Plan,
    *,
    is_gated: bool = False,
    amax: Tensor | None = None,
) -> None:
    if is_packed(weight):
        assert isinstance(x, Tensor)
        assert amax is None
        multiply_packed(x, weight, bias, y, plan, is_gated=is_gated)
        return
    assert isinstance(x, Quantized) == isinstance(weight, Quantized), "codes times numbers"
    assert not _is_blocked(weight) or plan.depth == BLOCK, "block scales are per step of K"
    (numbers, scale_x), (w, scale_w) = _parts(x), _parts(weight)
    M, (N, K) = len(numbers), w.shape
    x_tiles, w_tiles, has_descriptors = as_tiles(numbers, w, plan)
    grid, steps, constants = plan.launch(M, w, K, is_gated=is_gated)
    constants |= {"IS_BLOCKED": _is_blocked(weight), "HAS_DESCRIPTORS": has_descriptors}
    constants["LONGEST_SUM"] = None if plan.is_fast else min(plan.depth, EXACT_DEPTH)
    arguments = (w, y, scale_x, scale_w, bias, amax, M, N, K, steps)
    gemm_kernel[grid](x_tiles, w_tiles, *arguments, **constants)


def library_product(
    x: Operand, weight: Operand, bias: Tensor | None, dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor | None:
    """cuBLAS's product with its bias, rounded once; None if cuBLAS does not take our scales.

    On Hopper FP8 products have the bits of `multiply` with a plan that does not cut K and is as
    fast: `is_fast` leaves whole sums to the matrix unit. NVFP4 weights are decoded first and
    rounded to `dtype`.
    """
    if is_packed(weight):
        weight = decode(weight, dtype)
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    assert isinstance(x, Quantized)
    assert isinstance(weight, Quantized)
    is_fp8 = x.codes.dtype == torch.float8_e4m3fn and weight.format.block is None
    is_aligned = all(n % 16 == 0 for n in weight.codes.shape)
    is_bfloat16 = dtype == torch.bfloat16 and (bias is None or bias.dtype == dtype)
    if not (is_fp8 and is_aligned and x.codes.is_cuda and is_bfloat16):
        return None
    return torch._scaled_mm(
        x.codes,
        weight.codes.T,
        scale_a=x.scale,
        scale_b=weight.scale.T,
        bias=bias,  # added in FP32, before the one rounding
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )
