"""Projections that the trainer computes as the engine does: in the codes of `quant.format`.

    y = x_hat W_hat^T + b        with x_hat and W_hat what the codes of x and W stand for
    dx = g W_hat;   dW = g^T x_hat;   db = sum g        straight through the rounding

Forwards call the functions of the CPU engine on the same codes: masters are rounded to the compute
dtype, then quantized, once per update. The backward pass keeps codes and scales of x and W, not x.

`quant.backward` says which gradients are products of codes, too. The scale that runs along the sum
is folded into g, so the codes c of W and x serve as they are, and only g is rounded:

    dgrad   dx[m, k] = a[m] sum_n q[m, n] c_w[n, k]    q, a: codes of g scale_w, a scale per token
    wgrad   dW[n, k] = a[n] sum_m q[n, m] c_x[m, k]    q, a: codes of g scale_x, a scale per channel

Codes of g are E4M3 in FP8 formats, INT8 in integer formats. In "fp8-block" nothing can be folded.
There g is coded in groups of 128 along the sum. The 128x128 tiles of W serve as they are, but x_hat
is coded once more, in groups of 128 tokens.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qurl.config.schema import QuantConfig
from qurl.errors import ModelError
from qurl.ops.device import arithmetic_dtype
from qurl.quant.formats import (
    Format,
    Quantized,
    dequantize,
    get_format,
    quantize,
    quantize_activation,
)
from qurl.quant.kv import KVRounding
from qurl.quant.linear import (
    check_quantizable,
    matmul_codes,
    multiply,
    quantized_projections,
    sum_of_products,
)
from qurl.trainer.coded import CodedShard, CodedWeight
from qurl.trainer.lora import weight_version


def unify_(model: nn.Module, quant: QuantConfig, compute_dtype: torch.dtype) -> nn.Module:
    """Make the model's projections compute in `quant.format`; parameters and their names stay.

    With an FP8 cache, packed attention (`qurl.trainer.packing`) rounds keys and values, too.
    """
    check_quantizable(model)
    coder = Coder(get_format(quant.format))
    for name, layer in quantized_projections(model, quant.full_layers):
        model.set_submodule(name, UnifiedLinear(layer, coder, compute_dtype, quant.backward))
    if quant.kv == "fp8":
        for attention in [module for module in model.modules() if hasattr(module, "k_proj")]:
            attention.kv_rounding = KVRounding()
    return model


def code_shards_(model: nn.Module, num_shards: int) -> None:
    """Make the weights of unified layers such that their shards are gathered as codes."""
    for name, layer in model.named_modules():
        if not isinstance(layer, UnifiedLinear) or not layer.is_unified:
            continue
        format, rows = layer.coder.format, len(layer.weight)
        if rows % (num_shards * (format.block or 1)):
            tiles = f", in whole tiles of {format.block}" if format.block else ""
            raise ModelError(
                f"{name} has {rows} rows, which {num_shards} trainers cannot share evenly{tiles}; "
                "use another parallel.trainers, or quant.unified = false"
            )
        shard = CodedShard(layer.weight.detach(), (format, layer.compute_dtype))
        layer.weight = nn.Parameter(shard, requires_grad=layer.weight.requires_grad)


class Coder:
    """Codes activations; the last ones are remembered, because q, k and v read the same."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self._last: tuple[weakref.ref[Tensor], int, Quantized] | None = None

    def code(self, x: Tensor) -> Quantized:
        last = self._last
        if last is None or last[0]() is not x or last[1] != x._version:
            coded = quantize_activation(x.detach(), self.format)
            self._last = last = weakref.ref(x), x._version, coded
        return last[2]


class UnifiedLinear(nn.Linear):
    """An `nn.Linear` with another's parameters that multiplies codes while `is_unified`."""

    def __init__(
        self, source: nn.Linear, coder: Coder, compute_dtype: torch.dtype, backward: str
    ) -> None:
        super().__init__(source.in_features, source.out_features, bias=False, device="meta")
        self.weight, self.bias = source.weight, source.bias
        self.training = source.training
        self.coder, self.compute_dtype, self.backward_mode = coder, compute_dtype, backward
        self.is_unified = True
        self._coded: Quantized | None = None
        self._coded_version: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_unified:
            return super().forward(x)
        weight = self.weight  # read once, because that merges an adapter
        factors = self.coder.code(x), self.coded_weight(weight)
        options = self.backward_mode, arithmetic_dtype(x)
        return _Product.apply(x, weight, self.bias, *factors, *options)

    def coded_weight(self, weight: Tensor) -> Quantized:
        """The layer's weight in codes, made anew whenever it has changed."""
        if isinstance(weight, CodedWeight):  # gathered from the shards of several ranks
            return weight.coded
        version = weight_version(self)
        if self._coded is None or self._coded_version != version:
            rounded = weight.detach().to(self.compute_dtype)
            self._coded, self._coded_version = quantize(rounded, self.coder.format), version
        return self._coded


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coded_x: Quantized,
        coded_weight: Quantized,
        backward: str,
        dtype: torch.dtype,
    ) -> Tensor:
        factors = (coded_x, coded_weight)
        ctx.save_for_backward(*(t for factor in factors for t in (factor.codes, factor.scale)))
        ctx.format, ctx.backward_mode = coded_x.format, backward
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        with torch.autocast(x.device.type, enabled=False):
            return multiply(*factors, None if bias is None else bias.to(dtype), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale, w_codes, w_scale = ctx.saved_tensors
        weight = Quantized(w_codes, w_scale, ctx.format)
        x = Quantized(x_codes.flatten(0, -2), x_scale.flatten(0, -2), ctx.format)
        g, mode = dy.flatten(0, -2), ctx.backward_mode
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dweight = dbias = None
        with torch.autocast(dy.device.type, enabled=False):
            if needs_x:
                dx = input_gradient(g, weight, is_coded=mode in ("dgrad", "all"))
                dx = dx.view(x_codes.shape).to(ctx.dtypes[0])
            if needs_weight:
                dweight = weight_gradient(g, x, is_coded=mode == "all").to(ctx.dtypes[1])
            if needs_bias:
                dbias = g.sum(0, dtype=ctx.dtypes[2])
        return dx, dweight, dbias, None, None, None, None


def input_gradient(g: Tensor, weight: Quantized, *, is_coded: bool) -> Tensor:
    """dx [M, K] = g [M, N] W_hat, in the dtype of g; in FP32 if g is coded."""
    if not is_coded:
        return g @ dequantize(weight).to(g.dtype)
    if weight.format.block is not None:
        transposed = replace(weight, codes=weight.codes.T, scale=weight.scale.T)
        return matmul_codes(quantize_activation(g, weight.format), transposed)
    return _multiply_folded(g.float() * _foldable(weight).T, weight.codes, weight.format)


def weight_gradient(g: Tensor, x: Quantized, *, is_coded: bool) -> Tensor:
    """dW [N, K] = g^T x_hat of g [M, N] and x [M, K], in the dtype of g; in FP32 if g is coded."""
    if not is_coded:
        return g.T @ dequantize(x).to(g.dtype)
    if x.format.block is not None:
        return matmul_codes(*(quantize_activation(t.T, x.format) for t in (g, dequantize(x))))
    return _multiply_folded((g.float() * _foldable(x)).T, x.codes, x.format)


def _foldable(factor: Quantized) -> Tensor:
    """Scales [rows, 1]; 0 for rows of zeros, whose scale of 1 would make all codes of g small."""
    return factor.scale * (factor.codes.float() != 0).any(-1, keepdim=True)


def _multiply_folded(g: Tensor, codes: Tensor, format: Format) -> Tensor:
    """g @ codes, with g [A, B] coded row by row and codes [B, C] of `format` as they are."""
    coded = quantize_activation(g, get_format("int8" if format.is_integer else "fp8"))
    return sum_of_products(coded.codes, codes.T, coded.format) * coded.scale
