"""Causal attention over packed sequences and its gradients, without a matrix of scores in memory.

    s[i, j] = scale q[i] . k[j]       over the keys j that query i sees: i - window < j <= i
    p[i, j] = exp(s[i, j] - lse[i])   with lse[i] = log sum_j exp s[i, j]
    o[i]    = sum_j p[i, j] v[j]

    dv[j]    = sum_i p[i, j] do[i]          delta[i] = do[i] . o[i]
    ds[i, j] = p[i, j] (do[i] . v[j] - delta[i])
    dq[i]    = scale sum_j ds[i, j] k[j]    dk[j] = scale sum_i ds[i, j] q[i]

Sums are FP32; p and ds are rounded to the dtype of the inputs before they are multiplied. Heads
share keys (GQA): a program that owns keys adds up the gradients of all its query heads. Nothing is
added by atomics, so results are deterministic, and those of a sequence do not depend on what is
packed beside it.

Shapes: N tokens of B sequences, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qurl.ops.flash_kernels import (
    flash_forward_kernel,
    flash_key_gradients_kernel,
    flash_query_gradients_kernel,
)
from qurl.ops.launch import can_describe, divide_up
from qurl.ops.target import Target


@dataclass(frozen=True)
class Spans:
    """Which keys a query sees: none after it, none of other sequences, the last `window`."""

    bounds: Tensor
    """Sequence b has the tokens bounds[b] to bounds[b + 1]; INT32, on the device."""
    longest: int
    """No sequence is longer."""
    window: int | None = None


class Inputs(NamedTuple):
    """What all three kernels read."""

    q: Tensor
    k: Tensor
    v: Tensor
    spans: Spans
    scale: float


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
        Tiles(128, 128, warps=8, stages=2, copies=True),
        Tiles(128, 64, warps=8, stages=3, copies=True),
        Tiles(64, 128, warps=8, stages=3),
    ),
    ("hopper", 128): Plan(
        Tiles(64, 64, warps=4, stages=2, copies=True),
        Tiles(128, 64, warps=8, stages=3, copies=True),
        Tiles(64, 64, warps=4, stages=2, copies=True),
    ),
    ("ampere", 64): Plan(
        Tiles(128, 64, warps=8, stages=3),
        Tiles(64, 64, warps=4, stages=2),
        Tiles(64, 64, warps=8, stages=2),
    ),
    ("ampere", 128): Plan(
        Tiles(128, 32, warps=8, stages=2),
        Tiles(64, 64, warps=8, stages=2),
        Tiles(64, 64, warps=8, stages=2),
    ),
}
"""Plans by generation and head_dim; "ampere" stands for all GPUs with 99 KB of shared memory."""


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
    q, k, v = map(with_whole_rows, (q, k, v))
    return _Attention.apply(q, k, v, spans, scale)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
        out, lse = forward(Inputs(q, k, v, spans, scale), plan_for(q).forward)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        inputs, plan, d_out = Inputs(q, k, v, *ctx.options), plan_for(q), grads[0].contiguous()
        dq, delta = query_gradients(inputs, out, lse, d_out, plan.query_gradients)
        dk, dv = key_gradients(inputs, lse, delta, d_out, plan.key_gradients)
        return dq, dk, dv, None, None


def forward(inputs: Inputs, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """o [N, H, D] and lse / scale [H, N] in FP32."""
    q, k, v, spans, _ = inputs
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    grid = (q.shape[1], len(spans.bounds) - 1, divide_up(spans.longest, tiles.queries))
    described = _describe(k, v, tiles.keys, tiles)
    flash_forward_kernel[grid](q, k, v, *described, out, lse, **_arguments(inputs, tiles))
    return out, lse


def query_gradients(
    inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """dq [N, H, D] and delta [H, N], from what `forward` gave and the gradient of o."""
    q, k, v, spans, _ = inputs
    assert out.is_contiguous()
    assert d_out.is_contiguous()
    dq, delta = q.new_empty(q.shape), torch.empty_like(lse)
    grid = (q.shape[1], len(spans.bounds) - 1, divide_up(spans.longest, tiles.queries))
    tensors = (q, k, v, *_describe(k, v, tiles.keys, tiles), out, d_out, lse, delta, dq)
    flash_query_gradients_kernel[grid](*tensors, **_arguments(inputs, tiles))
    return dq, delta


def key_gradients(
    inputs: Inputs, lse: Tensor, delta: Tensor, d_out: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """dk and dv [N, K, D]."""
    q, k, v, spans, _ = inputs
    assert d_out.is_contiguous()
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    grid = (k.shape[1], len(spans.bounds) - 1, divide_up(spans.longest, tiles.keys))
    described = _describe(q, d_out, tiles.queries, tiles)
    arguments = _arguments(inputs, tiles)
    flash_key_gradients_kernel[grid](q, k, v, d_out, *described, lse, delta, dk, dv, **arguments)
    return dk, dv


def with_whole_rows(x: Tensor) -> Tensor:
    """The heads of a token side by side; tokens may lie apart, as in a slice of q, k and v."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _describe(a: Tensor, b: Tensor, rows: int, tiles: Tiles) -> tuple[Any, Any]:
    """What the copy engine needs to fetch `rows` tokens of a head of a and b; None without it."""
    if not (tiles.copies and can_describe(a) and can_describe(b)):
        return None, None
    block = [rows, a.shape[2]]
    return (
        TensorDescriptor.from_tensor(a.flatten(1), block),
        TensorDescriptor.from_tensor(b.flatten(1), block),
    )


def _arguments(inputs: Inputs, tiles: Tiles) -> dict[str, Any]:
    q, k, v, spans, scale = inputs
    (num_tokens, num_heads, size), num_kv_heads = q.shape, k.shape[1]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, size)
    assert num_heads % num_kv_heads == 0
    assert size in (16, 32, 64, 128), "other sizes are not implemented"
    assert spans.bounds.dtype == torch.int32
    assert scale > 0
    assert spans.longest * max(q.stride(0), k.stride(0), v.stride(0)) < 2**31
    return {
        **{"q_token": q.stride(0), "k_token": k.stride(0), "v_token": v.stride(0)},
        **{"bounds": spans.bounds, "longest": spans.longest, "window": spans.window},
        **{"num_tokens": num_tokens, "group": num_heads // num_kv_heads},
        **{"scale": scale, "D": size, "QUERIES": tiles.queries, "KEYS": tiles.keys},
        **{"num_warps": tiles.warps, "num_stages": tiles.stages},
    }
