"""Decoder layers of the trained model with one kernel between products, each way.

In a small model what lies between the products moves more bytes than they do: torch computes
RMSNorm in eight kernels, rotary positions in five and the gate of an MLP in two, most of them in
FP32, and each reads and writes everything. `fuse_layers_` puts modules with the same weights under
the same names in their places, so that optimizers, checkpoints and engines see no difference.

Under autocast these modules return the compute dtype, rounded once, where the products that follow
would round for themselves. The residual stream stays FP32: nothing but products reads what a norm
of these layers returns.

Shapes: B sequences, T positions, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qurl.trainer.packing import ATTENTION, ORDINARY_ATTENTION, arithmetic_dtype

LAYERS = tuple(f"{family}DecoderLayer" for family in ("Llama", "Qwen2", "Qwen3", "Mistral"))
"""Classes of transformers whose parts may be replaced."""
ATTENTIONS = tuple(f"{family}Attention" for family in ("Llama", "Qwen2", "Qwen3"))
"""Those that `FusedAttention` can stand in for. Mistral's has a window that it keeps to itself."""
CHECK_BOUND = 1e-4
"""How far results may be from those of the module that is replaced, relative to their size."""

NUM_TRIED = 5
"""Positions on which it is tried."""

Rotations = tuple[Tensor, Tensor]
"""Cosines and sines, [1 or B, T, D] each."""


class FusedRMSNorm(nn.Module):
    """y = weight x / sqrt(mean x^2 + eps)"""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x, self.weight, self.eps, arithmetic_dtype(x))  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class FusedMLP(nn.Module):
    """y = down(silu(gate(x)) up(x))"""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj = gate
        self.up_proj = up
        self.down_proj = down

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


class FusedAttention(nn.Module):
    """Attention of the Llama family, called as transformers calls it."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.q_proj: nn.Module = own.q_proj
        self.k_proj: nn.Module = own.k_proj
        self.v_proj: nn.Module = own.v_proj
        self.o_proj: nn.Module = own.o_proj
        self.q_norm: nn.Module | None = getattr(own, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(own, "k_norm", None)
        self.config = own.config
        self.layer_idx: int = own.layer_idx
        self.head_dim: int = own.head_dim
        self.scaling: float = own.scaling
        self.sliding_window: int | None = getattr(own, "sliding_window", None)
        # What the attention functions of transformers look for:
        self.num_key_value_groups: int = own.num_key_value_groups
        self.is_causal: bool = own.is_causal

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotations,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        shape = hidden_states.shape[:-1]
        q, k, v = (
            project(hidden_states).view(*shape, -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        dtype = arithmetic_dtype(hidden_states)
        rotated = (_Rotate.apply(x, *position_embeddings, dtype) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (*rotated, v))  # [B, H, T, D]
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **options,
        )
        return self.o_proj(out.reshape(*shape, -1)), weights


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        from qurl.ops import rms_norm

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, inverse = rms_norm.normalize(flat, weight, eps, dtype)
        ctx.save_for_backward(flat, weight, inverse)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from qurl.ops import rms_norm

        x, weight, inverse = ctx.saved_tensors
        dx, dweight = rms_norm.gradients(dy.reshape(x.shape).contiguous(), x, weight, inverse)
        return dx.view(dy.shape), dweight.to(weight.dtype), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from qurl.ops.gate import gate_values

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate_values(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        from qurl.ops.gate import gate_gradients

        return gate_gradients(dy.contiguous(), *ctx.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """x is [B, T, H, D]."""
        from qurl.ops import rotation

        cos, sin = (a.flatten(0, 1).contiguous() for a in (cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotation.rotate(x.flatten(0, 1).contiguous(), cos, sin, dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from qurl.ops import rotation

        flat = dy.flatten(0, 1).contiguous()
        cos, sin = ctx.saved_tensors
        dx = rotation.rotate(flat, cos, sin, ctx.dtype, is_gradient=True)
        return dx.view(dy.shape), None, None, None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of a causal LM or of its backbone; an empty list where there are none."""
    layers = getattr(getattr(model, "base_model", model), "layers", None)
    if isinstance(layers, nn.ModuleList):
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def fuse_layers_(model: Any) -> int:
    """Replace what can be replaced in the decoder layers, and say how many modules that were.

    A module is replaced only if the new one computes what it computes, which is tried. The last
    norm stays: what it returns is not rounded.
    """
    layers = [layer for layer in decoder_layers(model) if type(layer).__name__ in LAYERS]
    rotations = _sample_rotations(model, layers)
    # What is inside comes first.
    parents = [parent for layer in layers for parent in reversed(list(layer.modules()))]
    num_fused = 0
    for parent in parents:
        for name, module in list(parent.named_children()):
            fused = _fused(module, rotations)
            if fused is not None and _agree(module, fused, rotations):
                setattr(parent, name, fused.train(module.training))
                num_fused += 1
    return num_fused


def _fused(module: Any, rotations: Rotations | None) -> nn.Module | None:
    """What might replace a module of transformers."""
    kind = type(module).__name__
    if kind.endswith("RMSNorm"):
        return FusedRMSNorm(module.weight, module.variance_epsilon)
    if kind.endswith("MLP"):
        return FusedMLP(module.gate_proj, module.up_proj, module.down_proj)
    if kind in ATTENTIONS and rotations is not None:
        return FusedAttention(module)
    return None


@torch.no_grad()
def _agree(module: nn.Module, fused: nn.Module, rotations: Rotations | None) -> bool:
    """Whether two modules return the same in FP32, as far as a few random rows can tell."""
    weight = next(module.parameters())
    if weight.dtype != torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIED, weight.shape[-1], generator=generator).to(weight.device)
    if isinstance(fused, FusedAttention):
        inputs = {"hidden_states": x, "position_embeddings": rotations, "attention_mask": None}
        expected, found = (m(**inputs)[0] for m in (module, fused))
    else:
        expected, found = module(x), fused(x)
    return bool((found - expected).norm() <= CHECK_BOUND * expected.norm())


@torch.no_grad()
def _sample_rotations(model: Any, layers: Sequence[Any]) -> Rotations | None:
    """Those of the first positions; None where attention cannot be replaced."""
    rotary = getattr(getattr(model, "base_model", model), "rotary_emb", None)
    if not layers or rotary is None:
        return None
    if model.config._attn_implementation not in (ORDINARY_ATTENTION, ATTENTION):
        return None
    weight = next(model.parameters())
    positions = torch.arange(NUM_TRIED, device=weight.device)[None]
    cos, sin = rotary(weight.new_empty(1, NUM_TRIED, 1), positions)
    return (cos, sin) if cos.shape[-1] == layers[0].self_attn.head_dim else None
