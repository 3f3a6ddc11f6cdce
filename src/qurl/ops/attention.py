"""Attention as trainer and engine call it."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention: q [N, H, D], k and v [N, H_kv, D] to [N, H, D].

    Our kernels compute it, except for other head sizes and inside torch.compile: there torch's do.
    """
    if _HAS_TRITON and q.is_cuda and not torch.compiler.is_compiling():
        from qurl.ops import flash

        if flash.supports(q):
            return flash.attend(q, k, v, flash.Spans(bounds, longest, window), scale)
    return attend_torch(q, k, v, bounds, longest, window, scale)


def attend_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """`attend_flash` by torch's FlashAttention 2."""
    left = -1 if window is None else window - 1
    flags: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA_FLAG else {}
    return varlen.varlen_attn(  # type: ignore[return-value]
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **flags
    )


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[T, T]: each position sees itself and the `window - 1` before it."""
    at = torch.arange(length, device=device)
    return (at <= at[:, None]) & (at > at[:, None] - window)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """torch's attention: q [B, H, T, D], k and v [B, H_kv, S, D] to [B, H, T, D].

    A CPU computes in FP64 and rounds once. In FP32 the last bits depend on the number of queries,
    and quantizing the result turns such a bit into a whole code now and then.
    """
    if q.device.type == "cpu" and torch.finfo(q.dtype).bits < 64:
        dtype, (q, k, v) = q.dtype, (x.double() for x in (q, k, v))
        return attend_dense(q, k, v, mask, is_causal=is_causal, scale=scale).to(dtype)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    return F.scaled_dot_product_attention(
        q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **options
    )
