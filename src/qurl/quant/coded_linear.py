"""A frozen linear layer in codes, with an adapter beside it (QeRL).

    y = g x (q a)^T + b + s (x A^T) B^T        W_hat = q (a g)

Trainer and engine multiply by the same W_hat, and the adapter is neither merged nor coded, so
quantization makes no mismatch between them. q a is exact in 16 bits, and g is a factor of the FP32
sum. q a is decoded for each product and not kept.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.ops.device import arithmetic_dtype
from qurl.quant.formats import Format, Quantized, dequantize, get_format, quantize
from qurl.quant.linear import projections
from qurl.quant.nvfp4 import GROUP, group_scale


class CodedLinear(nn.Linear):
    """The frozen copy of an `nn.Linear`."""

    def __init__(self, source: nn.Linear, format: Format, device: torch.device) -> None:
        nn.Module.__init__(self)  # it has no weight of its own
        self.in_features, self.out_features = source.in_features, source.out_features
        coded = quantize(source.weight.detach().to(device), format)
        self.format = format
        for name in ("codes", "scale", "tensor_scale"):
            self.register_buffer(name, getattr(coded, name), persistent=False)
        assert coded.tensor_scale is not None
        self.outer = coded.tensor_scale[0].item()
        """g as a Python number, which a product takes without waiting for the GPU."""
        self.bias, self.training = source.bias, source.training
        self.adapter: Any = None
        """A module with A [rank, K], B [N, rank], `scale` and `is_on`; None: no adapter."""

    @property
    def base(self) -> Quantized:
        return Quantized(self.codes, self.scale, self.format, self.tensor_scale)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        """W_hat + s B A [N, K] in FP32, computed whenever it is read."""
        base = decode(self.base)
        return base if self.adapter is None else self.adapter(base)

    def factor(self, dtype: torch.dtype) -> Tensor:
        """q a [N, K] = W_hat / g, exact in `dtype`."""
        return decode_factor(self.base, dtype)

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(arithmetic_dtype(input))
        y = _Product.apply(x, self)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        if self.adapter is None or not self.adapter.is_on:
            return y
        a, b = self.adapter.A.to(x.dtype), self.adapter.B.to(x.dtype)
        return y + self.adapter.scale * F.linear(F.linear(x, a), b)


class _Product(torch.autograd.Function):
    """x W_hat^T; the backward pass decodes W_hat again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: CodedLinear) -> Tensor:
        ctx.layer = layer
        return _scaled_product(x, layer.factor(x.dtype).T, layer.outer)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _scaled_product(dy, ctx.layer.factor(dy.dtype), ctx.layer.outer), None


def _scaled_product(x: Tensor, factor: Tensor, outer: float) -> Tensor:
    """g x F, rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.addmm(x.new_zeros(()), rows, factor, beta=0, alpha=outer)
    return y.view(*x.shape[:-1], -1)


def decode(weight: Quantized) -> Tensor:
    """`dequantize`; on a GPU in one kernel."""
    if not weight.codes.is_cuda:
        return dequantize(weight)
    from qurl.quant.kernels import packed  # needs Triton

    return packed.decode(weight, torch.float32)


def decode_factor(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """q a [N, K], exact in `dtype`; on a GPU in one kernel."""
    if not weight.codes.is_cuda:
        scale = group_scale(weight.scale).to(dtype)
        return weight.numbers().to(dtype) * scale.repeat_interleave(GROUP, -1)
    from qurl.quant.kernels import packed  # needs Triton

    return packed.decode_factor(weight, dtype)


@torch.no_grad()
def code_base_(model: Any, format: str, device: torch.device) -> None:
    """Replace the projections of a model by frozen ones in codes on `device`, one at a time."""
    for name, layer in list(projections(model)):
        if not isinstance(layer, CodedLinear):
            model.set_submodule(name, CodedLinear(layer, get_format(format), device))
