"""Products whose factors are rounded to the compute dtype and whose sums are FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_factor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to `dtype`; a CPU keeps them in FP32, the only way to get FP32 sums."""
    rounded = values.to(dtype)
    return rounded if rounded.is_cuda or dtype != torch.bfloat16 else rounded.float()


def multiply(a: Tensor, b: Tensor, total: Tensor | None = None) -> Tensor:
    """a @ b with sums that are not rounded, added to `total` in place if there is one."""
    options: Any = {"out_dtype": torch.float32} if a.dtype == torch.bfloat16 else {}
    if total is None:
        return torch.mm(a, b, **options)
    return torch.addmm(total, a, b, out=total, **options)
