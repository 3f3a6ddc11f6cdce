"""Sharded weights that ranks exchange as codes: a quarter of the bytes of FP32.

    masters of a rank  ──round, quantize──▶  codes, scales  ──all-gather──▶  the codes of all rows

Rows have scales of their own, so the codes of a shard are rows of the codes of the whole. FSDP asks
a shard what to gather, and what to make of it (`fsdp_pre_all_gather`, `fsdp_post_all_gather`).
Optimizers, trackers and checkpoints see the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from qurl.quant.formats import Format, Quantized, quantize

_aten = torch.ops.aten
_CUTTING = {
    *(_aten.split.Tensor, _aten.slice.Tensor, _aten.as_strided.default, _aten.view.default),
    *(_aten.new_zeros.default, _aten.empty_like.default, _aten.clone.default),
    *(_aten.detach.default, _aten.alias.default, _aten.copy_.default, _aten._to_copy.default),
}
"""What FSDP cuts shards with: the results are shards, too. All else computes with plain masters."""


class CodedShard(Tensor):
    """Rows of an FP32 weight that is multiplied in codes."""

    masters: Tensor
    precision: tuple[Format, torch.dtype]

    @staticmethod
    def __new__(cls, masters: Tensor, precision: tuple[Format, torch.dtype]) -> CodedShard:
        return _wrap(cls, masters, masters.shape)

    def __init__(self, masters: Tensor, precision: tuple[Format, torch.dtype]) -> None:
        """`precision` is the format, and the dtype that masters are rounded to before."""
        self.masters, self.precision = masters, precision

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found: list[CodedShard] = []

        def unwrap(value: Any) -> Any:
            if not isinstance(value, CodedShard):
                return value
            found.append(value)
            return value.masters

        inputs = tree_map(unwrap, arguments)
        result = function(*inputs, **tree_map(unwrap, options or {}))
        if function not in _CUTTING:
            return result
        if function is _aten.copy_.default:
            return arguments[0]
        precision = found[0].precision
        return tree_map(lambda x: cls(x, precision) if isinstance(x, Tensor) else x, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], None]:
        format, dtype = self.precision
        coded = quantize(self.masters.to(dtype), format)
        return (coded.codes.view(torch.uint8), coded.scale), None

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[Tensor],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[CodedWeight, tuple[Tensor, ...]] | None:
        if out is not None:  # its codes are views of the outputs
            return None
        format, _ = self.precision
        codes, scale = outputs
        coded = Quantized(codes.view(format.dtype), scale, format)
        return CodedWeight(coded, self.masters), (codes, scale)


class CodedWeight(Tensor):
    """A whole weight of which only the codes are known; its gradient is that of the masters."""

    coded: Quantized

    @staticmethod
    def __new__(cls, coded: Quantized, like: Tensor) -> CodedWeight:
        return _wrap(cls, like, coded.codes.shape)

    def __init__(self, coded: Quantized, like: Tensor) -> None:
        self.coded = coded

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function not in (_aten.detach.default, _aten.alias.default, _aten.as_strided.default):
            raise NotImplementedError(f"{function} of a weight that is known in codes only")
        weight = arguments[0]
        return cls(weight.coded, torch.empty(0, dtype=weight.dtype, device=weight.device))


def own_rows(tensor: Tensor) -> Tensor:
    """The plain rows that this rank holds of a tensor, sharded or not, coded or not."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.masters if isinstance(own, CodedShard) else own


def _wrap(kind: Any, like: Tensor, shape: Sequence[int]) -> Any:
    make: Callable[..., Any] = Tensor._make_wrapper_subclass
    return make(kind, shape, dtype=like.dtype, device=like.device)
