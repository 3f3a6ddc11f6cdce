"""The products of a decoder layer: weights as they are multiplied, and their gradients.

    y  = x W^T + b
    dx = dy W        dW = dy^T x        db = sum over tokens of dy

A projection stacks linear layers that read the same input, such as q, k and v. It keeps a copy of
their weights in the precision of the product, made anew when the masters have changed. dW and db
are added up in FP32 by the product itself, over micro-batches, and each layer's `.grad` is a part
of the sum: no gradient passes through autograd, is cast, or is added in a pass of its own.

With a format the copy is codes, and so is what the forward keeps of x. The backward is
straight-through: W and x stand for the values of their codes.

Shapes: M tokens, N output channels of all layers together, K input channels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qurl.ops.target import Target
from qurl.quant.formats import Format, Quantized, dequantize, quantize
from qurl.quant.kernels.gemm import library_product
from qurl.quant.kernels.gemm import multiply as multiply_codes
from qurl.quant.kernels.plans import Plans, kind_of
from qurl.quant.kernels.rows import dequantize_rows
from qurl.quant.linear import Operand, finish
from qurl.trainer.products import as_factor, multiply


class Projection:
    """One product of a layer."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.format: Format | None = None
        self.sizes = [linear.out_features for linear in linears]
        self._copies: dict[Any, Any] = {}
        self._versions: list[int] = []
        self._total: Tensor | None = None  # dW [N, K]
        self._bias_total: Tensor | None = None  # db [N]

    def __deepcopy__(self, memo: dict) -> Projection:
        """The same for copies of the layers; a copy of the weights is soon made."""
        twin = Projection(copy.deepcopy(self.linears, memo))
        twin.format = self.format
        return twin

    @torch.no_grad()
    def weight(self, dtype: torch.dtype) -> Tensor:
        """W [N, K] as numbers of `dtype`; with a format, those that its codes stand for."""
        return self._copy(("weight", dtype), lambda: self._numbers(dtype))

    def multiply(self, x: Operand, dtype: torch.dtype) -> Tensor:
        """y [M, N], rounded once to `dtype`."""
        bias = self._copy(("bias", dtype), lambda: self._bias(dtype))
        if isinstance(x, Quantized):
            return self._multiply_codes(x, bias, dtype)
        w = self.weight(dtype)
        return torch.mm(x, w.T) if bias is None else torch.addmm(bias, x, w.T)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dx [M, K] of dy [M, N], in its dtype."""
        return torch.mm(dy, self.weight(dy.dtype))

    @torch.no_grad()
    def add_gradients_(self, dy: Tensor, x: Operand) -> None:
        """Add dW and db of one micro-batch to the layers' `.grad`."""
        if isinstance(x, Quantized):
            x = dequantize_rows(x, dy.dtype)
        factors = [as_factor(values, dy.dtype) for values in (dy.T, x)]
        is_first = self.linears[0].weight.grad is None
        self._total = multiply(*factors, None if is_first else self._total)
        if is_first:
            for linear, rows in zip(self.linears, self._total.split(self.sizes), strict=True):
                linear.weight.grad = rows
        if self.linears[0].bias is not None:
            self._add_bias_gradient_(dy, is_first)

    def _add_bias_gradient_(self, dy: Tensor, is_first: bool) -> None:
        total = dy.sum(0, dtype=torch.float32)
        if not is_first:
            assert self._bias_total is not None
            self._bias_total += total
            return
        self._bias_total = total
        for linear, part in zip(self.linears, total.split(self.sizes), strict=True):
            linear.bias.grad = part

    def _copy(self, key: Any, make: Any) -> Any:
        """What `make` returns, until a weight changes."""
        parameters = [p for linear in self.linears for p in linear.parameters()]
        versions = [parameter._version for parameter in parameters]
        if versions != self._versions:
            self._copies.clear()
            self._versions = versions
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        if self.format is not None:
            return dequantize(self._codes(dtype)).to(dtype)
        return torch.cat([linear.weight.detach().to(dtype) for linear in self.linears])

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        if self.linears[0].bias is None:
            return None
        return torch.cat([linear.bias.detach().to(dtype) for linear in self.linears])

    def _codes(self, dtype: torch.dtype) -> Quantized:
        """W in codes. The masters are rounded to the compute dtype first, as in the engine."""

        def make() -> Quantized:
            weight = torch.cat([linear.weight.detach().to(dtype) for linear in self.linears])
            return quantize(weight, self.format)  # type: ignore[arg-type]

        return self._copy(("codes", dtype), make)

    def _multiply_codes(self, x: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        weight, target = self._codes(dtype), Target.of(x.codes.device)
        plan = _plans(target).choose(kind_of(x.format, target), len(x.codes), *weight.codes.shape)
        if plan is None:
            product = library_product(x, weight, bias, dtype)
            assert product is not None, "the table names the library only where it has the product"
            return product
        return finish(multiply_codes(x, weight, bias, dtype, plan))


@functools.cache
def _plans(target: Target) -> Plans:
    return Plans(target)
