"""The gate of an MLP and its gradients, in one pass over memory each way.

    s = 1 / (1 + exp(-gate));   y = gate s up

    dgate = dy up s (1 + gate (1 - s));   dup = dy gate s

Everything is computed in FP32 and rounded once, to the dtype of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import divide_up
from qurl.ops.rounding import load_float, store_rounded

BLOCK = 4096


def gate_values(gate: Tensor, up: Tensor) -> Tensor:
    """y, from two tensors of the same shape."""
    y = torch.empty_like(gate)
    _launch(gate_kernel, gate, up, y)
    return y


def gate_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _launch(gate_gradients_kernel, dy, gate, up, dgate, dup)
    return dgate, dup


def _launch(kernel: Any, *tensors: Tensor) -> None:
    kinds = {(tensor.shape, tensor.dtype, tensor.is_contiguous()) for tensor in tensors}
    assert kinds == {(tensors[0].shape, tensors[0].dtype, True)}
    size = tensors[0].numel()
    kernel[(divide_up(size, BLOCK),)](*tensors, size, BLOCK=BLOCK, num_warps=8)


@triton.jit
def gate_kernel(gate, up, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    x = load_float(gate + at, is_inside)
    store_rounded(y + at, x * tl.sigmoid(x) * load_float(up + at, is_inside), is_inside)


@triton.jit
def gate_gradients_kernel(dy, gate, up, dgate, dup, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    upstream = load_float(dy + at, is_inside)
    x = load_float(gate + at, is_inside)
    share = tl.sigmoid(x)
    value = load_float(up + at, is_inside)
    slope = upstream * value * share * (1 + x * (1 - share))
    store_rounded(dgate + at, slope, is_inside)
    store_rounded(dup + at, upstream * x * share, is_inside)
