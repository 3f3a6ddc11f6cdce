"""The products of a decoder layer: weights as they are multiplied, and their gradients.

    y  = x W^T + b
    dx = dy W        dW = dy^T x        db = sum over tokens of dy

A projection stacks linear layers that read the same input, such as q, k and v. It keeps a copy of
their weights in the precision of the product, made anew when the masters have changed. dW and db
are added up in FP32 by the product itself, over micro-batches, and each layer's `.grad` is a part
of the sum: no gradient passes through autograd, is cast, or is added in a pass of its own.

With a format the copy is codes, and so is what the forward keeps of x. The backward is
straight-through: W and x stand for the values of their codes. An engine on the same device lends
its buffers for the codes (`adopt_`): while it does not sample, the trainer renews them there.

Layers with adapters are frozen. What is multiplied is their merged weight, and only the factors of
the adapters get gradients (`qurl.trainer.lora`).

Shapes: M tokens, N output channels of all layers together, K input channels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qurl.ops.coding import code_columns, code_gradient, transpose_codes
from qurl.ops.target import Target
from qurl.quant.coded_linear import CodedLinear
from qurl.quant.formats import Format, Quantized, dequantize, quantize
from qurl.quant.kernels.gemm import library_product
from qurl.quant.kernels.plans import Plans, kind_of
from qurl.quant.kernels.product import empty_codes
from qurl.quant.kernels.requantize import requantize_
from qurl.quant.kernels.rows import dequantize_rows
from qurl.quant.linear import Operand, finish, stacked_rows
from qurl.trainer.lora import Adapter, find_adapter, weight_version
from qurl.trainer.products import as_factor, multiply

ALIGNMENT = 16
"""Products of codes add up a multiple of so many numbers."""


class Projection:
    """One product of a layer."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.format: Format | None = None
        self.code_dtype = torch.float32
        """Masters are rounded to it before they are quantized, as in the engine."""
        self._is_alternating = False
        self._buffer: Quantized | None = None  # where the codes live
        self.backward = "bf16"
        """Which gradients are products of codes (`quant.backward`)."""
        self.sizes = [linear.out_features for linear in linears]
        self._copies: dict[Any, Any] = {}
        self._versions: list[Any] = []

    def __deepcopy__(self, memo: dict) -> Projection:
        """The same for copies of the layers; a copy of the weights is soon made."""
        twin = Projection(copy.deepcopy(self.linears, memo))
        twin.format, twin.code_dtype, twin.backward = self.format, self.code_dtype, self.backward
        return twin

    def adopt_(self, buffer: Quantized, *, is_alternating: bool) -> None:
        """Keep the codes in an engine's buffer."""
        assert buffer.codes.shape == (sum(self.sizes), self.linears[0].in_features)
        self._buffer, self._is_alternating = buffer, is_alternating
        self._copies.clear()

    @property
    def alternates(self) -> bool:
        """Whether y has the channels of the layers in turn, as the engine has gate and up.

        Gradients of y, W and b have one layer after the other.
        """
        return self._is_alternating and self.format is not None

    @property
    def has_coded_gradient(self) -> bool:
        """Whether dx is a product of codes."""
        return self.format is not None and self.backward != "bf16"

    @property
    def has_coded_base(self) -> bool:
        return isinstance(self.linears[0], CodedLinear)

    def _adapters(self) -> list[Adapter]:
        """Adapters that are multiplied beside a frozen base in codes."""
        found = map(find_adapter, self.linears) if self.has_coded_base else ()
        return [adapter for adapter in found if adapter is not None and adapter.is_on]

    @torch.no_grad()
    def weight(self, dtype: torch.dtype) -> Tensor:
        """W [N, K] as numbers of `dtype`; with a format, those that its codes stand for."""
        if self.format is None and dtype == torch.float32:  # rare, and a copy would be large
            return self._numbers(dtype)
        if self.format is None and (masters := self._masters(dtype)) is not None:
            return masters
        return self._copy(("weight", dtype), lambda: self._numbers(dtype))

    def multiply(self, x: Operand, dtype: torch.dtype) -> Tensor:
        """y [M, N], rounded once to `dtype`."""
        bias = self._copy(("bias", dtype), lambda: self._bias(dtype))
        if isinstance(x, Quantized):
            return _product(x, self.codes(), bias, dtype)
        if self.has_coded_base:
            y = self._coded_product(x, bias)
        else:
            w = self.weight(dtype)
            y = torch.mm(x, w.T) if bias is None else torch.addmm(bias, x, w.T)
        for adapter, part in zip(self._adapters(), y.split(self.sizes, -1), strict=False):
            a, b = (factor.detach().to(dtype) for factor in (adapter.A, adapter.B))
            part.addmm_(torch.mm(x, a.T), b.T, alpha=adapter.scale)
        return y

    def _coded_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W_hat^T + b of frozen layers in codes, each of which has its own g."""
        rows, columns = len(x), sum(self.sizes)
        y = x.new_zeros(rows, columns) if bias is None else bias.repeat(rows, 1)
        for linear, part in zip(self.linears, y.split(self.sizes, -1), strict=True):
            assert isinstance(linear, CodedLinear)
            part.addmm_(x, linear.factor(x.dtype).T, alpha=linear.outer)
        return y

    def _coded_gradient(self, dy: Tensor) -> Tensor:
        """dy W_hat of frozen layers in codes."""
        dx = dy.new_zeros(len(dy), self.linears[0].in_features)
        for linear, part in zip(self.linears, dy.split(self.sizes, -1), strict=True):
            assert isinstance(linear, CodedLinear)
            dx.addmm_(part, linear.factor(dy.dtype), alpha=linear.outer)
        return dx

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dx [M, K] of dy [M, N], in its dtype.

            dx[m, k] = a[m] sum_n q[m, n] c[n, k]        q, a = codes of dy * scale_w, per token

        if gradients are coded: the codes c of W serve as they are, and only dy is rounded.
        """
        if not self.has_coded_gradient:
            is_coded = self.has_coded_base
            dx = self._coded_gradient(dy) if is_coded else torch.mm(dy, self.weight(dy.dtype))
            for adapter, part in zip(self._adapters(), dy.split(self.sizes, -1), strict=False):
                a, b = (factor.detach().to(dy.dtype) for factor in (adapter.A, adapter.B))
                dx.addmm_(torch.mm(part, b), a, alpha=adapter.scale)
            return dx
        weight, scale = self._transposed()
        coded = empty_codes(dy.shape[0], dy.shape[1], weight.format, dy.device)
        parts = len(self.sizes) if self.alternates else 1
        code_gradient(dy, scale, coded.codes, coded.scale, weight.format.largest, parts)
        return _gradient_product(coded, weight, dy.dtype)

    @torch.no_grad()
    def add_gradients_(self, dy: Tensor, x: Operand) -> None:
        """Add dW and db of one micro-batch to the layers' `.grad`, or those of their adapters."""
        if find_adapter(self.linears[0]) is not None:
            numbers = _as_numbers(x, dy.dtype)  # their products are thin, and never of codes
            for linear, part in zip(self.linears, dy.split(self.sizes, -1), strict=True):
                adapter = find_adapter(linear)
                assert adapter is not None, "all projections of a model have adapters, or none"
                adapter.add_gradients_(part, numbers)
            return
        weights = [linear.weight for linear in self.linears]
        if isinstance(x, Quantized) and self.backward == "all":
            self._add_(weights, _weight_gradient(dy, x))
        else:
            factors = as_factor(dy.T, dy.dtype), as_factor(_as_numbers(x, dy.dtype), dy.dtype)
            if (first := weights[0].grad) is None:
                self._add_(weights, multiply(*factors))
            else:
                multiply(*factors, self._span(first))
        if self.linears[0].bias is not None:
            biases = [linear.bias for linear in self.linears]
            self._add_(biases, dy.sum(0, dtype=torch.float32))

    def _add_(self, parameters: Sequence[Tensor], gradient: Tensor) -> None:
        """Add to the gradient of the whole stack, of which each `.grad` is a part."""
        if (first := parameters[0].grad) is not None:
            self._span(first).add_(gradient)
            return
        for parameter, part in zip(parameters, gradient.float().split(self.sizes), strict=True):
            parameter.grad = part

    def _masters(self, dtype: torch.dtype) -> Tensor | None:
        """W [N, K] without a copy, if the masters have the dtype and lie next to each other."""
        weights = [linear._parameters.get("weight") for linear in self.linears]
        parts = [weight for weight in weights if weight is not None and weight.dtype == dtype]
        ends = [part.data_ptr() + part.nbytes for part in parts]
        starts = [part.data_ptr() for part in parts[1:]]
        if len(parts) < len(weights) or ends[:-1] != starts:
            return None
        return self._span(parts[0].detach())

    def _span(self, first: Tensor) -> Tensor:
        """The whole stack, of which this is the first part."""
        return first.as_strided((sum(self.sizes), *first.shape[1:]), first.stride())

    def forget_copies_(self) -> None:
        """Free the memory of the copies; the next product makes them anew."""
        self._copies.clear()

    def _copy(self, key: Any, make: Any) -> Any:
        """What `make` returns, until a weight changes."""
        versions = [self.format, *(weight_version(linear) for linear in self.linears)]
        if versions != self._versions:
            self._copies.clear()
            self._versions = versions
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        if self.format is not None:
            weight = dequantize(self.codes()).to(dtype)
            if self.alternates:
                weight = torch.cat(weight.unflatten(0, (-1, len(self.sizes))).unbind(1))
            return weight
        return torch.cat([linear.weight.detach().to(dtype) for linear in self.linears])

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        if self.linears[0].bias is None:
            return None
        biases = [linear.bias.detach().to(dtype) for linear in self.linears]
        return torch.stack(biases, 1).flatten() if self.alternates else torch.cat(biases)

    def codes(self) -> Quantized:
        """W in codes."""
        return self._copy("codes", self._quantize)

    def _transposed(self) -> tuple[Quantized, Tensor]:
        """The codes of W as [K, N], which matrix units want for dx, and the scales [N, 1] of W.

        Scales are 0 for channels of zeros: theirs is 1, which would dwarf the others.
        """
        weight = self.codes()

        def make() -> tuple[Quantized, Tensor]:
            codes = weight.codes.new_empty(*reversed(weight.codes.shape))
            is_used = transpose_codes(weight.codes, codes)
            ones = weight.scale.new_ones(len(codes), 1)
            return Quantized(codes, ones, weight.format), weight.scale * is_used[:, None]

        return self._copy("transposed", make)

    def _quantize(self) -> Quantized:
        assert self.format is not None
        masters = [linear.weight.detach() for linear in self.linears]
        if self._buffer is None and (self.format.block is not None or not masters[0].is_cuda):
            return quantize(torch.cat(masters).to(self.code_dtype), self.format)
        rows, columns = sum(self.sizes), self.linears[0].in_features
        coded = self._buffer or empty_codes(rows, columns, self.format, masters[0].device)
        flips = torch.empty_like(coded.scale, dtype=torch.int32)
        for master, own in zip(masters, stacked_rows(self.sizes, self.alternates), strict=True):
            target = Quantized(coded.codes[own], coded.scale[own], self.format)
            requantize_(master, target, flips[: len(master)], self.code_dtype)
        return coded


def _as_numbers(x: Operand, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(x, dtype) if isinstance(x, Quantized) else x


def _weight_gradient(dy: Tensor, x: Quantized) -> Tensor:
    """dW [N, K] of dy [M, N] and x [M, K] in the dtype of dy.

        dW[n, k] = a[n] sum_m q[n, m] c[m, k]        q, a = codes of dy * scale_x, per channel

    The codes c of x serve as they are, and only dy is rounded.
    """
    (tokens, channels), format, device = dy.shape, x.format, dy.device
    length = -(-tokens // ALIGNMENT) * ALIGNMENT
    q, c = (empty_codes(n, length, format, device) for n in (channels, x.codes.shape[1]))
    token_scale = x.scale * transpose_codes(x.codes, c.codes)[:, None]
    c.scale.fill_(1.0)
    code_columns(dy, token_scale, q.codes, q.scale, format.largest)
    return _gradient_product(q, c, dy.dtype)


def _gradient_product(x: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """x W^T. No engine has to have its bits, so cuBLAS may multiply on every GPU."""
    product = library_product(x, weight, None, dtype, is_fast=True)
    return _product(x, weight, None, dtype) if product is None else product


def _product(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b, added up as in the engine."""
    target = Target.of(x.codes.device)
    return finish(_plans(target).multiply(kind_of(x.format, target), x, weight, bias, dtype))


@functools.cache
def _plans(target: Target) -> Plans:
    return Plans(target, unified=True)
