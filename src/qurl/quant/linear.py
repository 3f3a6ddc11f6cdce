"""Linear layers that compute with codes: W8A8, activations quantized on the fly.

    y = scale_x * scale_w * (codes_x @ codes_w^T) + bias

Integer codes are multiplied as FP32 numbers. Every product is exact, and so is the sum while it
stays below 2^24; longer sums are cut into blocks of K that are added in FP64, so that the result
is the integer one on any hardware. FP8 codes take the same route (products exact, sums FP32).

This is the reference. On a GPU the engine multiplies with `qurl.quant.kernels.gemm`, which returns
the same numbers: of integers to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qurl.errors import ModelError
from qurl.quant.formats import Format, Quantized, get_format, quantize, quantize_activation

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that are quantized; embeddings, norms, biases, lm_head and routers never are."""
ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Partial:
    """A product that whoever consumes it finishes, which saves a pass over memory.

        y = (acc[0] + ... + acc[S - 1]) * scale_x * scale_w + bias,  rounded once to `dtype`

    in this order, so that integer codes give the same bits for every S.
    """

    acc: Tensor  # [S, M, N] int32 or float32
    scale_x: Tensor | None  # [M, 1]
    scale_w: Tensor | None  # [N, 1]
    bias: Tensor | None  # [N]
    dtype: torch.dtype


Operand = Tensor | Quantized
"""The input of a linear layer: numbers, or codes with one scale per token."""
Product = Tensor | Partial
"""The output of a linear layer, finished or not."""


def finish(product: Product) -> Tensor:
    """The product [M, N] as a tensor."""
    if isinstance(product, Tensor):
        return product
    y = product.acc[0]
    for part in product.acc[1:]:
        y = y + part
    y = y.float()
    for scale in (product.scale_x, None if product.scale_w is None else product.scale_w.T):
        y = y if scale is None else y * scale
    return (y if product.bias is None else y + product.bias.float()).to(product.dtype)


def linear(x: Tensor, weight: Quantized, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b with W in codes and x coded per token; the result has the dtype of x."""
    return multiply(quantize_activation(x, weight.format), weight, bias, x.dtype)


def multiply(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b of codes [..., M, K] and [N, K], rounded once to `dtype`."""
    y = matmul_codes(x, weight)
    return (y if bias is None else y + bias.to(y.dtype)).to(dtype)


def matmul_codes(x: Quantized, weight: Quantized) -> Tensor:
    """[..., M, K] by [N, K] to [..., M, N] in FP32."""
    if weight.format.block is not None:
        return _matmul_blocks(x, weight)
    # The scale of the token first, then that of the channel: the order is part of the result.
    return _sum_of_products(x.codes, weight.codes, weight.format) * x.scale * weight.scale.T


def _sum_of_products(x: Tensor, w: Tensor, format: Format) -> Tensor:
    x, w = x.float(), w.float()
    length = exact_length(format)
    if x.shape[-1] <= length or not format.is_integer:
        return x @ w.T
    parts = zip(x.split(length, -1), w.split(length, -1), strict=True)
    return sum((a @ b.T).double() for a, b in parts).float()  # type: ignore[union-attr]


def exact_length(format: Format) -> int:
    """How many products of codes FP32 sums exactly: their sum stays within 2^24."""
    return int(2**24 // (format.weight_max * format.act_max))


def _matmul_blocks(x: Quantized, weight: Quantized) -> Tensor:
    """Sum over blocks of K of scale_x[m, k] * scale_w[n, k] * (codes_x @ codes_w^T)."""
    block = weight.format.block
    assert block is not None
    rows = weight.codes.shape[0]
    total = 0.0
    for k, (a, b) in enumerate(
        zip(x.codes.float().split(block, -1), weight.codes.float().split(block, -1), strict=True)
    ):
        scale_w = weight.scale[:, k].repeat_interleave(block)[:rows]
        total = total + (a @ b.T) * x.scale[..., k, None] * scale_w
    assert isinstance(total, Tensor)
    return total


class QuantLinear(nn.Module):
    """An `nn.Linear` replaced by its quantized copy (for models run by transformers)."""

    def __init__(self, source: nn.Linear, format: Format, dtype: torch.dtype | None = None) -> None:
        """`dtype`: to which the weight is rounded first."""
        super().__init__()
        self.weight = quantize(source.weight.detach().to(dtype=dtype), format)
        self.bias = None if source.bias is None else source.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that are quantized, by their names in the model."""
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS and isinstance(layer, nn.Linear):
            yield name, layer


def _other_linears(model: nn.Module) -> list[str]:
    """Linear layers that are neither projections, nor the head, nor a router."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and name.rpartition(".")[2] not in (*PROJECTIONS, *ROUTERS)
    ]


@torch.no_grad()
def quantized_copy(model: nn.Module, format: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a transformers model whose projections are quantized: the dense reference.

    `dtype`: to which weights are rounded first, like those that a trainer computes with.
    """
    fused = [
        name
        for name, parameter in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and parameter.dim() == 3
    ]
    if fused:
        raise ModelError(
            f"{type(model).__name__} keeps its experts in one tensor ({fused[0]}), which has no "
            "quantized copy; use quant.format = 'none'"
        )
    if not any(projections(model)):
        raise ModelError(
            f"{type(model).__name__} has no layer named like {', '.join(PROJECTIONS)} to quantize; "
            "use quant.format = 'none'"
        )
    if others := _other_linears(model):
        raise ModelError(
            f"{type(model).__name__} would be quantized only in part: {', '.join(others[:3])} are "
            f"not among {', '.join(PROJECTIONS)}; use quant.format = 'none'"
        )
    clone = copy.deepcopy(model).requires_grad_(False).eval()
    for name, layer in list(projections(clone)):
        clone.set_submodule(name, QuantLinear(layer, get_format(format), dtype))
    return clone
