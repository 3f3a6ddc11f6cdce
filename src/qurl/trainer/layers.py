"""Decoder layers of the trained model with one kernel between products, forward and backward.

In a small model, the work between products moves more bytes than the products do: torch computes
RMSNorm in eight kernels, rotary positions in five and a gate in two, mostly in FP32. `fuse_layers_`
replaces modules by ones with the same weights under the same names, so optimizers, checkpoints and
engines see no difference.

Under autocast these modules return the compute dtype, rounded once, as the next product would
round. The residual stream stays FP32: only products read what a norm of these layers returns.
Shapes: B sequences, T positions, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qurl.ops import rms_norm, rotation
from qurl.ops.families import FAMILIES
from qurl.ops.gate import gate_gradients, gate_values
from qurl.trainer.packing import ATTENTION, ORDINARY_ATTENTION, arithmetic_dtype

_FUSIBLE = [family for family in FAMILIES.values() if family.fusible]
LAYERS = {f"{family.fusible}DecoderLayer" for family in _FUSIBLE}
# Windows of every layer are in the config, not in the attention module.
ATTENTIONS = {f"{f.fusible}Attention" for f in _FUSIBLE if f.windows != "every layer"}
CHECK_BOUND = 1e-4  # largest relative difference between a fused module and its original
CHECK_POSITIONS = 5
Rotations = tuple[Tensor, Tensor]  # cosines and sines, [1 or B, T, D] each


class FusedRMSNorm(nn.Module):
    """y = weight x / sqrt(mean x^2 + eps)"""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x, self.weight, self.eps, arithmetic_dtype(x))  # type: ignore[return-value]


class FusedMLP(nn.Module):
    """y = down(silu(gate(x)) up(x))"""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


class FusedAttention(nn.Module):
    """Attention of the Llama family, called as transformers calls it."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        vars(self).update(vars(own))  # weights, config and sizes, under their names

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Rotations,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        shape = hidden_states.shape[:-1]
        products = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (product.view(*shape, -1, self.head_dim) for product in products)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        dtype = arithmetic_dtype(hidden_states)
        rotated = (_Rotate.apply(x, *position_embeddings, dtype) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (*rotated, v))  # [B, H, T, D]
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        window = getattr(self, "sliding_window", None)
        options |= {"scaling": self.scaling, "sliding_window": window}
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self, q, k, v, attention_mask, **options)
        return self.o_proj(out.reshape(*shape, -1)), weights


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, inverse = rms_norm.normalize(flat, weight, eps, dtype)
        ctx.save_for_backward(flat, weight, inverse)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = rms_norm.gradients(dy.reshape(x.shape).contiguous(), x, weight, inverse)
        return dx.view(dy.shape), dweight.to(weight.dtype), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate_values(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return gate_gradients(dy.contiguous(), *ctx.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        cos, sin = (a.flatten(0, 1).contiguous() for a in (cos, sin))  # x is [B, T, H, D]
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotation.rotate(x.flatten(0, 1).contiguous(), cos, sin, dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        flat = dy.flatten(0, 1).contiguous()
        cos, sin = ctx.saved_tensors
        dx = rotation.rotate(flat, cos, sin, ctx.dtype, is_gradient=True)
        return dx.view(dy.shape), None, None, None


def fuse_layers_(model: Any) -> int:
    """Replace modules of the decoder layers by fused ones that compute the same; returns how many.

    The last norm of the model stays, because its result must not be rounded.
    """
    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    rotations = _sample_rotations(model, layers)
    # Innermost first: fused attention takes over its fused QK-norms.
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
    kind = type(module).__name__
    if kind.endswith("RMSNorm"):
        return FusedRMSNorm(module.weight, module.variance_epsilon)
    if kind.endswith("MLP"):
        return FusedMLP(module)
    if kind in ATTENTIONS and rotations is not None:
        return FusedAttention(module)
    return None


@torch.no_grad()
def _agree(module: nn.Module, fused: nn.Module, rotations: Rotations | None) -> bool:
    """Whether two modules return the same in FP32 for a few random rows."""
    weight = next(module.parameters())
    if weight.dtype != torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, CHECK_POSITIONS, weight.shape[-1], generator=generator).to(weight.device)
    if isinstance(fused, FusedAttention):
        inputs = {"hidden_states": x, "position_embeddings": rotations, "attention_mask": None}
        expected, found = (m(**inputs)[0] for m in (module, fused))
    else:
        expected, found = module(x), fused(x)
    return bool((found - expected).norm() <= CHECK_BOUND * expected.norm())


@torch.no_grad()
def _sample_rotations(model: Any, layers: Sequence[Any]) -> Rotations | None:
    """Rotations of the first positions; None if the attention cannot be replaced."""
    rotary = getattr(getattr(model, "base_model", model), "rotary_emb", None)
    if not layers or rotary is None:
        return None
    if model.config._attn_implementation not in (ORDINARY_ATTENTION, ATTENTION):
        return None
    weight = next(model.parameters())
    positions = torch.arange(CHECK_POSITIONS, device=weight.device)[None]
    cos, sin = rotary(weight.new_empty(1, CHECK_POSITIONS, 1), positions)
    return (cos, sin) if cos.shape[-1] == layers[0].self_attn.head_dim else None
