"""Decoder layers of the trained model with one kernel between products, each way.

In a small model half of a training step is not products but what lies between them: torch computes
RMSNorm in eight kernels, rotary positions in five and the gate of an MLP in two, most of them in
FP32, and each reads and writes everything. `fuse_layers_` puts modules with the same weights under
the same names in their places, so that optimizers, checkpoints and engines see no difference.

Under autocast these modules return the compute dtype, rounded once, where the products that follow
would round for themselves. The residual stream stays FP32.

Shapes: B sequences, T positions, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qurl.packing import arithmetic_dtype

CHECK_BOUND = 1e-4
"""How far results may be from those of the module that is replaced, relative to their size."""

NUM_TRIED = 5
"""Positions on which it is tried."""

ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
"""Classes of transformers that `FusedAttention` can stand in for."""

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
        from qurl.kernels import rms_norm

        flat = x.reshape(-1, x.shape[-1])
        y, inverse = rms_norm.normalize(flat, weight, eps, dtype)
        ctx.save_for_backward(flat, weight, inverse)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from qurl.kernels import rms_norm

        x, weight, inverse = ctx.saved_tensors
        dx, dweight = rms_norm.gradients(dy.reshape(x.shape), x, weight, inverse)
        return dx.view(dy.shape), dweight.to(weight.dtype), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from qurl.kernels.gate import gate_values

        ctx.save_for_backward(gate, up)
        return gate_values(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        from qurl.kernels.gate import gate_gradients

        return gate_gradients(dy.contiguous(), *ctx.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """x is [B, T, H, D]."""
        from qurl.kernels import rotation

        tokens = x.shape[:2]
        cos, sin = (a.expand(*tokens, -1).reshape(-1, a.shape[-1]) for a in (cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotation.rotate(x.flatten(0, 1), cos, sin, dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from qurl.kernels import rotation

        flat = dy.flatten(0, 1).contiguous()
        cos, sin = ctx.saved_tensors
        dx = rotation.rotate(flat, cos, sin, ctx.dtype, is_gradient=True)
        return dx.view(dy.shape), None, None, None


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The outermost list of modules; an empty one where there is none."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(lists, nn.ModuleList())


def fuse_layers_(model: nn.Module) -> int:
    """Replace what can be replaced in the decoder layers, and say how many modules that were.

    A module is replaced only if the new one computes what it computes, which is tried. The last
    norm stays: what it returns is not rounded.
    """
    rotations = _sample_rotations(model)
    num_fused = 0
    for parent in reversed(list(decoder_layers(model).modules())):  # what is inside comes first
        for name, module in list(parent.named_children()):
            fused = _fused(module, rotations)
            if fused is not None and _agree(module, fused, rotations):
                setattr(parent, name, fused)
                num_fused += 1
    return num_fused


def _fused(module: Any, rotations: Rotations | None) -> nn.Module | None:
    """What might replace a module of transformers, by the names that its models share."""
    kind, children = type(module).__name__, dict(module.named_children())
    if kind.endswith("RMSNorm") and not children and hasattr(module, "weight"):
        eps = getattr(module, "variance_epsilon", None)
        return None if eps is None else FusedRMSNorm(module.weight, eps)
    if kind in ATTENTIONS and rotations is not None:
        return FusedAttention(module)
    projections = [children.pop(f"{name}_proj", None) for name in ("gate", "up", "down")]
    if all(type(p) is nn.Linear for p in projections) and set(children) == {"act_fn"}:
        return FusedMLP(*projections)  # type: ignore[arg-type]
    return None


@torch.no_grad()
def _agree(module: nn.Module, fused: nn.Module, rotations: Rotations | None) -> bool:
    """Whether two modules return the same in FP32, as far as a few random rows can tell."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIED, weight.shape[-1], generator=generator).to(weight.device)
    if isinstance(fused, FusedAttention):
        inputs = {"hidden_states": x, "position_embeddings": rotations, "attention_mask": None}
        expected, found = (m(**inputs)[0] for m in (module, fused))
    else:
        expected, found = module(x), fused(x)
    return bool((found - expected).norm() < CHECK_BOUND * expected.norm())


@torch.no_grad()
def _sample_rotations(model: Any) -> Rotations | None:
    """Those of the first positions; None where heads are not rotated as a whole."""
    attentions = [m for m in model.modules() if type(m).__name__ in ATTENTIONS]
    if not attentions:
        return None
    weight = next(model.parameters())
    x = weight.new_empty(1, NUM_TRIED, 1)
    cos, sin = model.base_model.rotary_emb(x, torch.arange(NUM_TRIED, device=weight.device)[None])
    return (cos, sin) if cos.shape[-1] == attentions[0].head_dim else None
