"""Flash attention over packed sequences, as trainer and engine call it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention import varlen

_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """torch's flash attention: q [N, H, D], k and v [N, H_kv, D] to [N, H, D]."""
    left = -1 if window is None else window - 1
    flags: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA_FLAG else {}
    return varlen.varlen_attn(  # type: ignore[return-value]
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **flags
    )
