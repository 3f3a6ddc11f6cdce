"""The engine's copy of the policy: what is quantized, what is shared, what is refused.

Projections live in engine-owned buffers that are allocated once and rewritten in place, so their
addresses never change. q, k, v and gate, up are row ranges of one fused buffer each, because codes
and per-channel scales simply stack; formats with 128x128 tiles are not fused, since a tile could
span two projections.

Norms, embedding and lm_head stay in full precision. Where dtype and device agree they share the
trainer's storage, which relies on optimizers that update parameters in place: every sync points at
the parameters anew, and between syncs the engine sees them change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.errors import EngineError, ModelError
from qurl.quant import Format, Quantized, get_format, linear, quantize
from qurl.quant.linear import PROJECTIONS

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder of the Llama family."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None sees everything before."""


class Projection:
    """One matrix multiplication: projections with the same input, stacked along their rows."""

    def __init__(
        self,
        modules: Sequence[nn.Linear],
        format: Format | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows, columns = sum(m.out_features for m in modules), modules[0].in_features
        self.weight = _empty_weight(rows, columns, format, dtype, device)
        has_bias = any(m.bias is not None for m in modules)
        self.bias = torch.zeros(rows, dtype=dtype, device=device) if has_bias else None

    def load_(self, modules: Sequence[nn.Linear]) -> int:
        """Rewrite codes, scales and bias in place; returns how many codes changed."""
        flips, start = 0, 0
        for module in modules:
            rows = slice(start, start := start + module.out_features)
            flips += self._load_rows_(rows, module.weight.detach())
            if self.bias is not None and module.bias is not None:
                self.bias[rows] = module.bias.detach()
        return flips

    def holds(self, modules: Sequence[nn.Linear], probe: int) -> bool:
        """Whether one row (or strip of tiles) of each module, coded again, is what is stored."""
        start = 0
        for module in modules:
            if not self._holds_row(module.weight.detach(), start, probe % module.out_features):
                return False
            start += module.out_features
        return True

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Quantized):
            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    @property
    def num_codes(self) -> int:
        return self.weight.codes.numel() if isinstance(self.weight, Quantized) else 0

    @property
    def num_bytes(self) -> int:
        weight = self.weight
        return weight.num_bytes if isinstance(weight, Quantized) else weight.nbytes

    def _load_rows_(self, rows: slice, source: Tensor) -> int:
        if not isinstance(self.weight, Quantized):
            self.weight[rows] = source
            return 0
        fresh = quantize(source, self.weight.format)
        codes = self.weight.codes[rows]
        # Compared as numbers: a zero that changes its sign is no flip.
        flips = int((codes.float() != fresh.codes.float()).sum())
        codes.copy_(fresh.codes)
        scale = self.weight.scale
        (scale if self.weight.format.block else scale[rows]).copy_(fresh.scale)
        return flips

    def _holds_row(self, source: Tensor, start: int, row: int) -> bool:
        stored = self.weight
        if not isinstance(stored, Quantized):
            return torch.equal(stored[start + row], source[row].to(stored.dtype))
        block = stored.format.block
        first = row - row % block if block else row
        fresh = quantize(source[first : first + (block or 1)], stored.format)
        rows = slice(start + first, start + first + len(fresh.codes))
        scale = stored.scale[first // block, None] if block else stored.scale[rows]
        return torch.equal(stored.codes[rows].float(), fresh.codes.float()) and torch.equal(
            scale, fresh.scale
        )


@dataclass
class Layer:
    """Weights of one decoder layer."""

    qkv: tuple[Projection, ...]
    o: Projection
    gate_up: tuple[Projection, ...]
    down: Projection
    window: int | None
    norms: dict[str, Tensor] = field(default_factory=dict)
    """By module name: input_layernorm, post_attention_layernorm, and q_norm, k_norm where used."""

    def projections(self) -> Iterator[Projection]:
        yield from (*self.qkv, self.o, *self.gate_up, self.down)


class Weights:
    """All weights of the actor."""

    def __init__(self, model: Any, quant: str, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = read_architecture(model)
        self.dtype = dtype
        self.device = device
        self.format = None if quant == "none" else get_format(quant)
        self.is_loaded = False
        body = model.model
        self.layers = [
            self._allocate_layer(layer, window)
            for layer, window in zip(body.layers, self.arch.windows, strict=True)
        ]
        self.inv_freq = body.rotary_emb.inv_freq.float().clone()
        self.rope_scale = float(body.rotary_emb.attention_scaling)
        self._copies: dict[str, Tensor] = {}
        self.embedding: Tensor
        self.norm: Tensor
        self.lm_head: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(p.num_bytes for layer in self.layers for p in layer.projections())

    @torch.no_grad()
    def load_(self, model: Any) -> float:
        """Take over the trainer's weights; returns the share of codes that changed.

        0 the first time, when there is nothing to compare with, and without quantization.
        """
        body, flips = model.model, 0
        for index, (layer, source) in enumerate(zip(self.layers, body.layers, strict=True)):
            flips += sum(p.load_(modules) for p, modules in self._pairs(layer, source))
            for name, module in source.named_modules():
                if (kind := name.rpartition(".")[2]) in _NORMS:
                    key = f"layers.{index}.{kind}"
                    layer.norms[kind] = self._share(key, module.weight, torch.float32)
        self.embedding = self._share("embedding", body.embed_tokens.weight, self.dtype)
        self.norm = self._share("norm", body.norm.weight, torch.float32)
        is_tied = model.lm_head.weight is body.embed_tokens.weight
        self.lm_head = (
            self.embedding if is_tied else self._share("lm_head", model.lm_head.weight, self.dtype)
        )
        num_codes = sum(p.num_codes for layer in self.layers for p in layer.projections())
        was_loaded, self.is_loaded = self.is_loaded, True
        return flips / num_codes if num_codes and was_loaded else 0.0

    @torch.no_grad()
    def check(self, model: Any, version: int) -> None:
        """Spot-check the copy: one row of every projection, another one at each version.

        The canary prompt sees whether the whole computes sensibly, but quantization noise hides a
        small error there; this finds a stale, misplaced or damaged row exactly.
        """
        for index, (layer, source) in enumerate(zip(self.layers, model.model.layers, strict=True)):
            for projection, modules in self._pairs(layer, source):
                if not projection.holds(modules, probe=7919 * version):
                    raise EngineError(
                        f"sync of version {version} failed: a projection of layer {index} in the "
                        "engine is not the quantized copy of the trainer's"
                    )

    def _allocate_layer(self, source: Any, window: int | None) -> Layer:
        attention, mlp = source.self_attn, source.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        return Layer(
            qkv=tuple(self._allocate(group) for group in self._fuse(qkv)),
            o=self._allocate([attention.o_proj]),
            gate_up=tuple(self._allocate(g) for g in self._fuse((mlp.gate_proj, mlp.up_proj))),
            down=self._allocate([mlp.down_proj]),
            window=window,
        )

    def _pairs(self, layer: Layer, source: Any) -> Iterator[tuple[Projection, Sequence[nn.Linear]]]:
        """Each projection of the engine with the trainer's modules that it holds."""
        attention, mlp = source.self_attn, source.mlp
        qkv = self._fuse((attention.q_proj, attention.k_proj, attention.v_proj))
        gate_up = self._fuse((mlp.gate_proj, mlp.up_proj))
        yield from zip(layer.qkv + layer.gate_up, qkv + gate_up, strict=True)
        yield layer.o, [attention.o_proj]
        yield layer.down, [mlp.down_proj]

    def _fuse(self, modules: Sequence[nn.Linear]) -> tuple[Sequence[nn.Linear], ...]:
        """Which projections share a buffer: all, or in block formats none."""
        is_blocked = self.format is not None and self.format.block is not None
        return tuple([m] for m in modules) if is_blocked else (modules,)

    def _allocate(self, modules: Sequence[nn.Linear]) -> Projection:
        return Projection(modules, self.format, self.dtype, self.device)

    def _share(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter's own storage where dtype and device agree, else our copy, rewritten."""
        source = parameter.detach()
        if source.dtype == dtype and source.device == self.device:
            return source
        if name not in self._copies:
            self._copies[name] = torch.empty(source.shape, dtype=dtype, device=self.device)
        return self._copies[name].copy_(source)


def _empty_weight(
    rows: int, columns: int, format: Format | None, dtype: torch.dtype, device: torch.device
) -> Quantized | Tensor:
    if format is None:
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    # The CPU multiplies codes as FP32 numbers, so it keeps them as such; a GPU keeps the 8 bits.
    storage = torch.float32 if device.type == "cpu" else format.dtype
    tiles = (-(-rows // format.block), -(-columns // format.block)) if format.block else (rows, 1)
    return Quantized(
        torch.zeros(rows, columns, device=device).to(storage),
        torch.ones(tiles, dtype=torch.float32, device=device),
        format,
    )


def read_architecture(model: Any) -> Architecture:
    """The shape of the model, or a ModelError that names what the local engine cannot compute."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise ModelError(_refusal(f"model_type = {config.model_type!r}", MODEL_TYPES))
    if config.hidden_act != "silu":
        raise ModelError(_refusal(f"hidden_act = {config.hidden_act!r}", ("silu",)))
    rotary = model.model.rotary_emb
    if rotary.rope_type not in ROPE_TYPES:
        raise ModelError(_refusal(f"rope_type = {rotary.rope_type!r}", ROPE_TYPES))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.inv_freq.shape[-1] * 2 != head_dim:
        raise ModelError(_refusal("partial rotary embedding", ("rotation of the whole head",)))
    _check_layers(model)
    return Architecture(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        windows=_windows(config),
    )


def _check_layers(model: Any) -> None:
    """Every weight must be one that the decoder uses, and every projection a plain linear layer."""
    for name, module in model.model.layers.named_modules():
        kind = name.rpartition(".")[2]
        if kind in PROJECTIONS and type(module) is not nn.Linear:
            raise ModelError(
                _refusal(f"model.layers.{name} of type {type(module).__name__}", ("nn.Linear",))
            )
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and kind not in PROJECTIONS + _NORMS:
            raise ModelError(_refusal(f"weights in model.layers.{name}", PROJECTIONS + _NORMS))
    if getattr(model.lm_head, "bias", None) is not None:
        raise ModelError(_refusal("lm_head with a bias", ("lm_head without bias",)))


def _windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each layer, as transformers applies it to the four model types."""
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    if unknown := set(config.layer_types) - set(known):
        raise ModelError(_refusal(f"layer_types with {sorted(unknown)}", tuple(known)))
    return tuple(known[kind] for kind in config.layer_types)


def _refusal(what: str, supported: Sequence[str]) -> str:
    return (
        f"the local engine cannot run {what}; it supports {', '.join(supported)}. "
        'Set rollout.engine = "hf" to sample with transformers instead'
    )
