"""Linear layers that compute with codes: W8A8, activations quantized on the fly.

    y = (codes_x @ codes_w^T) * scale_w * scale_x + bias

Integer codes are multiplied as FP32 numbers. Every product is exact, and so is the sum while it
stays below 2^24. Longer sums are cut into blocks of K that are added in FP64, so the result is the
integer one on any hardware. FP8 codes take the same route (products exact, sums FP32). NVFP4's
activations are numbers, and its weights are multiplied as such (W4A16). This is the reference for
`qurl.quant.kernels`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.errors import ModelError
from qurl.quant.formats import (
    Format,
    Quantized,
    dequantize,
    get_format,
    quantize,
    quantize_activation,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that are quantized. Embeddings, norms, biases, lm_head and routers are not."""
ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Partial:
    """A product that its consumer finishes, which saves a pass over memory.

        y = (acc[0] + ... + acc[S - 1]) * scale_w * scale_x + bias,  rounded once to `dtype`

    The order is part of the contract: integer codes give the same bits for every S.
    """

    acc: Tensor  # [S, M, N] int32 or float32
    scale_x: Tensor | None  # [M, 1]
    scale_w: Tensor | None  # [N, 1]
    bias: Tensor | None  # [N]
    dtype: torch.dtype


@dataclass(frozen=True)
class EngineCodes:
    """The codes of one decoder layer in an engine that lends them to a trainer on its device."""

    products: Mapping[str, Quantized]
    """The stacked weights of the layers of each product: qkv, o, gate_up and down."""
    has_alternating_gate: bool
    """Rows of gate_up are gate 0, up 0, gate 1, ...; else all gates come first."""


Operand = Tensor | Quantized  # the input of a linear layer
Product = Tensor | Partial  # the output of a linear layer, finished or not


def finish(product: Product) -> Tensor:
    """The product [M, N] as a tensor."""
    if isinstance(product, Tensor):
        return product
    y = product.acc[0]
    for part in product.acc[1:]:
        y = y + part
    y = y.float()
    if product.scale_w is not None:
        y = y * product.scale_w.T
    if product.scale_x is not None:
        y = y * product.scale_x
    return (y if product.bias is None else y + product.bias.float()).to(product.dtype)


def stacked_rows(sizes: Sequence[int], is_alternating: bool) -> Iterator[slice]:
    """The rows of each of several layers of so many outputs in the weight that they share."""
    ends = accumulate(sizes)
    for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        yield slice(index, sum(sizes), len(sizes)) if is_alternating else slice(end - size, end)


def linear(x: Tensor, weight: Quantized, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with W in codes and x coded on the fly, in the dtype of x."""
    if weight.format.is_weight_only:
        numbers = dequantize(weight).to(x.dtype)
        return F.linear(x, numbers, None if bias is None else bias.to(x.dtype))
    return multiply(quantize_activation(x, weight.format), weight, bias, x.dtype)


def multiply(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b of codes [..., M, K] and [N, K], rounded once to `dtype`."""
    y = matmul_codes(x, weight)
    return (y if bias is None else y + bias.to(y.dtype)).to(dtype)


def matmul_codes(x: Quantized, weight: Quantized) -> Tensor:
    """[..., M, K] by [N, K] to [..., M, N] in FP32."""
    if weight.format.block is not None:
        return _matmul_blocks(x, weight)
    # The channel's scale first, then the token's, as cuBLAS does: the order is part of the result.
    return sum_of_products(x.codes, weight.codes, weight.format) * weight.scale.T * x.scale


def sum_of_products(x: Tensor, w: Tensor, format: Format) -> Tensor:
    """codes_x @ codes_w^T in FP32, exact for integers."""
    x, w = x.float(), w.float()
    # So many products of codes stay within 2^24, where FP32 sums are exact.
    length = int(2**24 // format.largest**2)
    if x.shape[-1] <= length or not format.is_integer:
        return x @ w.T
    parts = zip(x.split(length, -1), w.split(length, -1), strict=True)
    return sum((a @ b.T).double() for a, b in parts).float()  # type: ignore[union-attr]


def _matmul_blocks(x: Quantized, weight: Quantized) -> Tensor:
    """Sum over blocks of K of scale_x[m, k] * scale_w[n, k] * (codes_x @ codes_w^T)."""
    block, rows = weight.format.block, len(weight.codes)
    assert block is not None
    scale_w = weight.scale  # [N, K / block], or one row for each tile of a weight
    if len(scale_w) != rows:
        scale_w = scale_w.repeat_interleave(block, 0)[:rows]
    pairs = zip(*(codes.float().split(block, -1) for codes in (x.codes, weight.codes)), strict=True)
    return sum((a @ b.T) * x.scale[..., k, None] * scale_w[:, k] for k, (a, b) in enumerate(pairs))  # type: ignore[return-value]


class QuantLinear(nn.Module):
    """The quantized copy of an `nn.Linear`, rounded to `dtype` first, for transformers' models."""

    def __init__(self, source: nn.Linear, format: Format, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = quantize(source.weight.detach().to(dtype=dtype), format)
        self.bias = None if source.bias is None else source.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS and isinstance(layer, nn.Linear):
            yield name, layer


def quantized_projections(model: nn.Module, full_layers: int) -> list[tuple[str, nn.Linear]]:
    """Projections but those of the first and last `full_layers` decoder layers."""
    found = list(projections(model))
    if not full_layers:
        return found
    layers = [next((int(p) for p in name.split(".") if p.isdigit()), 0) for name, _ in found]
    num_layers = max(layers, default=-1) + 1
    kept = [is_full(layer, num_layers, full_layers) for layer in layers]
    return [projection for projection, is_kept in zip(found, kept, strict=True) if not is_kept]


def is_full(layer: int, num_layers: int, full_layers: int) -> bool:
    """Whether a decoder layer stays in full precision; raises if all of them would."""
    if 2 * full_layers >= num_layers:
        raise ModelError(
            f"quant.full_layers = {full_layers} leaves none of the {num_layers} decoder layers to "
            "quantize; lower it, or set quant.format = 'none'"
        )
    return not full_layers <= layer < num_layers - full_layers


@torch.no_grad()
def quantized_copy(
    model: nn.Module, format: str, dtype: torch.dtype | None = None, full_layers: int = 0
) -> nn.Module:
    """A copy of a transformers model whose projections are quantized: the dense reference."""
    check_quantizable(model)
    clone = copy.deepcopy(model).requires_grad_(False).eval()
    for name, layer in quantized_projections(clone, full_layers):
        if getattr(layer, "base", None) is not None:  # frozen in codes already
            continue
        clone.set_submodule(name, QuantLinear(layer, get_format(format), dtype))
    return clone


@torch.no_grad()
def frozen_scales(model: nn.Module, format: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The scales [N, 1] of each projection's weight in `dtype`, to be kept for a run."""
    layers = ((name, layer.weight.detach().to(dtype)) for name, layer in projections(model))
    return {name: quantize(weight, format).scale.cpu() for name, weight in layers}


def check_quantizable(model: nn.Module) -> None:
    """Raise unless all linear layers of a model but head and routers can be quantized."""
    if obstacle := _obstacle(model):
        raise ModelError(f"{type(model).__name__} {obstacle}; use quant.format = 'none'")


@contextmanager
def full_precision(model: nn.Module, kind: type[nn.Module] = nn.Module) -> Iterator[None]:
    """Make unified modules of a kind compute in full precision for a while."""
    modules = use_full_precision_(model, kind)
    try:
        yield
    finally:
        for module in modules:
            module.is_unified = True  # type: ignore[assignment]


def use_full_precision_(model: nn.Module, kind: type[nn.Module] = nn.Module) -> list[nn.Module]:
    """Make unified modules of a kind (`qurl.trainer.unified`) ordinary ones; returns them."""
    modules = [
        m for m in model.modules() if isinstance(m, kind) and getattr(m, "is_unified", False)
    ]
    for module in modules:
        module.is_unified = False  # type: ignore[assignment]
    return modules


def _obstacle(model: nn.Module) -> str | None:
    """Why a model cannot be quantized as a whole."""
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and parameter.dim() == 3:
            return f"keeps its experts in one tensor ({name}), which has no quantized copy"
    if not any(projections(model)):
        return f"has no layer named like {', '.join(PROJECTIONS)} to quantize"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    known = (*PROJECTIONS, *ROUTERS)
    others = [n for n, m in linears.items() if m is not head and n.rpartition(".")[2] not in known]
    if others:
        listed = f"{', '.join(others[:3])} are not among {', '.join(PROJECTIONS)}"
        return f"would be quantized only in part: {listed}"
    return None
