"""What the actor holds: quantized projections, and the rest in full precision.

Projections live in buffers that are allocated once and rewritten in place. q, k and v are rows of
one buffer. The rows of gate and up alternate in theirs, so that one tile of a product holds both.
Formats with 128x128 tiles stack gate and up instead, and keep projections apart where a tile would
span two of them. Norms, embedding and lm_head may be the trainer's own storage (`sync`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qurl.quant import Format, Quantized, get_format, quantize
from qurl.quant.coded_linear import CodedLinear
from qurl.quant.linear import EngineCodes, is_full, stacked_rows
from qurl.rollout.engine import context_length
from qurl.rollout.local.architecture import read_architecture


@dataclass(frozen=True, eq=False)
class LowRank:
    """The adapters of stacked projections: y += scale (x a^T) b^T.

    Each has its own rows of a; in its rows of b the columns of the others are 0.
    """

    a: Tensor  # [R, K]
    b: Tensor  # [N, R]
    scale: float

    def add_(self, y: Tensor, x: Tensor) -> Tensor:
        return y.addmm_(x @ self.a.T, self.b.T, alpha=self.scale)


@dataclass(frozen=True, eq=False)
class Projection:
    """One matrix multiplication: projections with the same input, stacked along their rows."""

    weight: Quantized | Tensor
    bias: Tensor | None
    adapter: LowRank | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors() if tensor is not self.bias)

    def tensors(self) -> list[Tensor]:
        """All that a multiplication reads."""
        weight = self.weight
        stored = weight.tensors() if isinstance(weight, Quantized) else (weight,)
        low = () if self.adapter is None else (self.adapter.a, self.adapter.b)
        return [t for t in (*stored, self.bias, *low) if t is not None]

    def view(self, rows: slice, ranks: slice) -> Projection:
        """One of the projections: its rows, and the ranks of its adapter."""
        low = self.adapter
        if low is not None:
            low = LowRank(low.a[ranks], low.b[rows, ranks], low.scale)
        stored, bias = self.weight, None if self.bias is None else self.bias[rows]
        weight = stored.rows(rows) if isinstance(stored, Quantized) else stored[rows]
        return Projection(weight, bias, low)


@dataclass
class Layer:
    """Weights of one decoder layer."""

    qkv: tuple[Projection, ...]
    o: Projection
    gate_up: tuple[Projection, ...]
    down: Projection
    window: int | None
    format: Format | None
    """Of activations; None: full precision."""
    has_alternating_gate: bool
    """Rows of gate_up are gate 0, up 0, gate 1, ...; else all gates come first."""
    views: dict[str, Projection]
    """The rows of each of the trainer's projections, by module name, such as q_proj."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """By module name: input_layernorm, post_attention_layernorm, and q_norm, k_norm where used."""

    def projections(self) -> Iterator[Projection]:
        yield from (*self.qkv, self.o, *self.gate_up, self.down)

    def codes(self) -> EngineCodes:
        """Its quantized products, as far as each is one matrix."""
        stacks = {"qkv": self.qkv, "o": (self.o,), "gate_up": self.gate_up, "down": (self.down,)}
        weights = {name: stack[0].weight for name, stack in stacks.items() if len(stack) == 1}
        products = {name: w for name, w in weights.items() if isinstance(w, Quantized)}
        return EngineCodes(products, self.has_alternating_gate)


class Weights:
    """All weights of the actor."""

    embedding: Tensor
    norm: Tensor
    lm_head: Tensor

    def __init__(
        self,
        model: Any,
        quant: str,
        dtype: torch.dtype,
        device: torch.device,
        native_codes: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        full_layers: int = 0,
    ) -> None:
        """Allocate the buffers; a sync fills them.

        `native_codes` keeps codes in the format's 8 bits, as the kernels read them. A CPU
        multiplies FP32 numbers, so it keeps codes as such. None: native on a GPU.
        `compute_dtype` is the trainer's; None: `dtype`, the decoder's.
        `full_layers` at either end are not quantized.
        """
        self.arch = read_architecture(model)
        self.dtype = dtype
        self.compute_dtype = compute_dtype or dtype
        self.device = device
        self.format = None if quant == "none" else get_format(quant)
        self._native_codes = device.type == "cuda" if native_codes is None else native_codes
        self.has_shared_base = False
        """Whether the trainer's weights are frozen in these codes."""
        body, num_layers = model.model, self.arch.num_layers
        whole = [is_full(index, num_layers, full_layers) for index in range(num_layers)]
        self.layers = [
            self._allocate_layer(layer, window, None if is_whole else self.format)
            for layer, window, is_whole in zip(body.layers, self.arch.windows, whole, strict=True)
        ]
        self.inv_freq = body.rotary_emb.inv_freq.to(device, torch.float32, copy=True)
        self.rope_scale = float(body.rotary_emb.attention_scaling)
        self.max_positions = context_length(body.config) or 32768
        self.cos = self.sin = torch.empty(0, self.arch.head_dim // 2, device=device)
        """[positions, D / 2], looked up, so that they cannot depend on the batch."""
        self.extend_rotations_(1)

    def extend_rotations_(self, length: int) -> None:
        """Rotations of so many positions at least."""
        if length > len(self.cos):
            positions = torch.arange(-(-length // 1024) * 1024, device=self.device)
            angles = positions.float()[:, None] * self.inv_freq
            self.cos, self.sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale

    def projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from layer.projections()

    def addresses(self) -> tuple[int, ...]:
        """Of all tensors that the decoder reads; a CUDA graph is valid while they stay equal."""
        tensors = [t for p in self.projections() for t in p.tensors()]
        tensors += [t for layer in self.layers for t in layer.norms.values()]
        tensors += [self.embedding, self.norm, self.lm_head, self.cos, self.sin]
        return tuple(t.data_ptr() for t in tensors)

    def _allocate_layer(self, source: Any, window: int | None, format: Format | None) -> Layer:
        views: dict[str, Projection] = {}
        alternates = format is None or format.block is None

        def allocate(owner: Any, *names: str, alternates: bool = False) -> tuple[Projection, ...]:
            modules = [getattr(owner, name) for name in names]
            block = (format and format.block) or 1
            if any(m.out_features % block for m in modules) and len(names) > 1:
                return tuple(p for name in names for p in allocate(owner, name))
            projection = self._allocate(modules, format)
            low, sizes = projection.adapter, [module.out_features for module in modules]
            rank = 0 if low is None else len(low.a) // len(names)
            all_rows = stacked_rows(sizes, alternates)
            for index, (name, rows) in enumerate(zip(names, all_rows, strict=True)):
                views[name] = projection.view(rows, slice(index * rank, (index + 1) * rank))
            return (projection,)

        attention, mlp = source.self_attn, source.mlp
        return Layer(
            qkv=allocate(attention, "q_proj", "k_proj", "v_proj"),
            o=allocate(attention, "o_proj")[0],
            gate_up=allocate(mlp, "gate_proj", "up_proj", alternates=alternates),
            down=allocate(mlp, "down_proj")[0],
            window=window,
            format=None if format is None or format.is_weight_only else format,
            has_alternating_gate=alternates,
            views=views,
        )

    def _allocate(self, modules: Sequence[nn.Linear], format: Format | None) -> Projection:
        rows, columns = sum(m.out_features for m in modules), modules[0].in_features
        has_bias = any(m.bias is not None for m in modules)
        bias = torch.zeros(rows, dtype=self.dtype, device=self.device) if has_bias else None
        if format is None:
            weight = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
            return Projection(weight, bias)
        weight = quantize(torch.zeros(rows, columns, device=self.device), format)
        if not self._native_codes:
            weight = replace(weight, codes=weight.numbers())
        return Projection(weight, bias, self._allocate_adapter(modules, format))

    def _allocate_adapter(self, modules: Sequence[nn.Linear], format: Format) -> LowRank | None:
        """Room for what a frozen base in codes has beside it; other adapters are merged."""
        found = [m.adapter for m in modules if isinstance(m, CodedLinear) and m.format == format]
        self.has_shared_base |= len(found) > 0
        if not found or found[0] is None:
            return None
        rows, columns = sum(m.out_features for m in modules), modules[0].in_features
        ranks = sum(len(adapter.A) for adapter in found)
        shapes = ((ranks, columns), (rows, ranks))
        a, b = (torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return LowRank(a, b, found[0].scale)
