"""Decoder layers of the trained model, forward and backward in as few passes as we can.

    a = norm(x)                 q, k, v = rotate(a Wqkv^T + b)      x' = x + attend(q, k, v) Wo^T
    m = norm(x')                g, u = m Wgu^T                      x'' = x' + (silu(g) u) Wd^T

In a small model the work between products moves more bytes than the products do, and torch and
transformers do it in forty kernels. Here a kernel adds a branch to the residual stream, norms it
and rounds or codes the result; another does the same backward. `fuse_layers_` replaces layers by
ones with the same weights under the same names, so optimizers, checkpoints and engines see no
difference.

The residual stream and its gradient stay FP32. All else between products has the compute dtype,
rounded once.
Shapes: B sequences, T positions, M = B T tokens, H heads (H_kv of keys), D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from transformers.modeling_layers import GradientCheckpointingLayer

from qurl.config.schema import QuantConfig
from qurl.errors import ConfigError
from qurl.ops import rms_norm, rotation
from qurl.ops.device import arithmetic_dtype
from qurl.ops.families import FAMILIES
from qurl.ops.flash import with_whole_rows
from qurl.ops.gate import gate_gradients
from qurl.quant.formats import Format, Quantized, get_format
from qurl.quant.kernels.rows import add_norm, as_operand, swiglu
from qurl.quant.kv import KVRounding
from qurl.quant.linear import EngineCodes, Operand, is_full
from qurl.trainer.packing import ATTENTION, ORDINARY_ATTENTION
from qurl.trainer.projection import Projection

LAYERS = {f"{family.fusible}DecoderLayer": family for family in FAMILIES.values() if family.fusible}
CHECK_BOUND = 1e-4  # largest relative difference between a fused layer and its original
CHECK_POSITIONS = 5
Rotations = tuple[Tensor, Tensor]  # cosines and sines, [1 or B, T, D] each
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, T, H, D] each


class FusedLayer(GradientCheckpointingLayer):
    """A decoder layer of the Llama family, called as transformers calls it."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        vars(self).update(copy.copy(vars(own)))  # modules and settings, under their names
        attention, mlp = own.self_attn, own.mlp
        config, family = attention.config, LAYERS[type(own).__name__]
        # Mistral's window is in the config alone.
        owner = config if family.windows == "every layer" else attention
        self.window = getattr(owner, "sliding_window", None)
        self.eps: float = own.input_layernorm.variance_epsilon
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = Projection([attention.o_proj])
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj])
        self.down = Projection([mlp.down_proj])

        self.projections = (self.qkv, self.o, self.gate_up, self.down)
        self.format: Format | None = None
        self.kv_rounding: KVRounding | None = None

    def unify_(self, quant: QuantConfig, compute_dtype: torch.dtype) -> None:
        """Multiply codes of `quant.format`, as the engine does."""
        self.format = get_format(quant.format)
        for projection in self.projections:
            projection.code_dtype, projection.backward = compute_dtype, quant.backward
        self.is_unified = True

    @property
    def is_unified(self) -> bool:
        """Whether the layer multiplies codes at present."""
        return self.qkv.format is not None

    @is_unified.setter
    def is_unified(self, is_wanted: bool) -> None:
        for projection in self.projections:
            projection.format = self.format if is_wanted else None

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Rotations | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention = self.self_attn
        function = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        options |= {"scaling": attention.scaling, "sliding_window": self.window}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, attention.layer_idx)
            return function(attention, q, k, v, attention_mask, **options)[0]

        norms = [self.input_layernorm.weight, self.post_attention_layernorm.weight]
        if hasattr(attention, "q_norm"):
            norms += [attention.q_norm.weight, attention.k_norm.weight]
        needs_grad = torch.is_grad_enabled()
        return _Layer.apply(hidden_states, self, attend, position_embeddings, needs_grad, *norms)


class _Layer(torch.autograd.Function):
    """Gradients of projections go straight to their weights, see `Projection`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: FusedLayer,
        attend: Attend,
        rotations: Rotations,
        needs_grad: bool,
        *norms: Tensor,
    ) -> Tensor:
        dtype = arithmetic_dtype(x)
        shape, eps = x.shape, layer.eps
        with torch.autocast(x.device.type, enabled=False):
            x = x.reshape(-1, shape[-1]).float().contiguous()
            inverse, inverse_mlp = x.new_empty(2, len(x))
            a = add_norm(x, None, norms[0], eps, layer.qkv.format, dtype, inverse=inverse)
            qkv = layer.qkv.multiply(a, dtype)
            heads = _Heads(layer, qkv, norms[2:], rotations, eps)
            qkv = [h.view(*shape[:-1], *h.shape[1:]).requires_grad_(needs_grad) for h in heads.qkv]
            with torch.set_grad_enabled(needs_grad):
                attended = attend(*qkv)
            out = as_operand(attended.detach().reshape(len(x), -1), layer.o.format)
            branch = layer.o.multiply(out, dtype)
            middle = torch.empty_like(x)
            m = add_norm(
                *(x, branch, norms[1], eps, layer.gate_up.format, dtype),
                total=middle,
                inverse=inverse_mlp,
            )
            gate_up = layer.gate_up.multiply(m, dtype)
            h = swiglu(gate_up, layer.down.format, dtype, layer.gate_up.alternates)
            y = middle + layer.down.multiply(h, dtype)
        if needs_grad:
            ctx.layer, ctx.shape, ctx.heads = layer, shape, heads
            # Edges and not tensors: what attention keeps is its own affair.
            ctx.attention = (get_gradient_edge(attended), [get_gradient_edge(h) for h in qkv])
            operands = _Saved.of(a, out, m)
            ctx.operands = operands
            h_scale = h.scale if isinstance(h, Quantized) else None  # h is computed again
            numbers = (x, inverse, middle, inverse_mlp, gate_up, h_scale, *norms[:2])
            ctx.save_for_backward(*numbers, *operands.tensors)
        return y.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            return _backward(ctx, dy)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    layer = ctx.layer
    x, inverse, middle, inverse_mlp, gate_up, h_scale, norm, norm_mlp, *coded = ctx.saved_tensors
    a, out, m = ctx.operands.restore(coded)
    is_coded = h_scale is not None and layer.down.backward == "all"
    dy = dy.reshape(x.shape).contiguous()
    rounded = dy.to(gate_up.dtype)
    d_gate_up, h = gate_gradients(
        *(layer.down.input_gradient(rounded), gate_up),
        y_scale=h_scale,
        is_integer=layer.format is not None and layer.format.is_integer,
        is_alternating=layer.gate_up.alternates,
    )
    layer.down.add_gradients_(rounded, as_operand(h, layer.down.format) if is_coded else h)
    dm = layer.gate_up.input_gradient(d_gate_up)
    layer.gate_up.add_gradients_(d_gate_up, m)
    rounded = torch.empty_like(rounded)
    dx, d_norm_mlp = rms_norm.gradients(dm, middle, norm_mlp, inverse_mlp, onto=dy, rounded=rounded)
    del dm, h, d_gate_up
    edge, inputs = ctx.attention
    d_attended = layer.o.input_gradient(rounded)
    layer.o.add_gradients_(rounded, out)
    d_heads = torch.autograd.grad(
        edge, inputs, d_attended.view(*ctx.shape[:-1], -1, ctx.heads.size)
    )
    d_qkv, d_head_norms = ctx.heads.gradients(d_heads)
    da = layer.qkv.input_gradient(d_qkv)
    layer.qkv.add_gradients_(d_qkv, a)
    dx, d_norm = rms_norm.gradients(da, x, norm, inverse, onto=dx)
    return dx.view(ctx.shape), None, None, None, None, d_norm, d_norm_mlp, *d_head_norms


class _Saved(NamedTuple):
    """Operands as plain tensors, which autograd can keep."""

    tensors: Sequence[Tensor]
    formats: Sequence[Format | None]

    @classmethod
    def of(cls, *operands: Operand) -> _Saved:
        tensors: list[Tensor] = []
        for operand in operands:
            is_coded = isinstance(operand, Quantized)
            tensors += [operand.codes, operand.scale] if is_coded else [operand]
        return cls(tensors, [getattr(operand, "format", None) for operand in operands])

    def restore(self, tensors: Sequence[Tensor]) -> list[Operand]:
        source = iter(tensors)
        return [
            next(source) if format is None else Quantized(next(source), next(source), format)
            for format in self.formats
        ]


class _Heads:
    """q, k and v out of their product: normed if the family does that, and rotated.

    If the layer rounds keys and values, gradients pass straight through.
    """

    def __init__(
        self, layer: Any, qkv: Tensor, norms: Sequence[Tensor], rotations: Rotations, eps: float
    ) -> None:
        attention = layer.self_attn
        cos, sin = (x.flatten(0, 1).contiguous() for x in rotations)  # [B T or T, D]
        self.rotations = cos, sin
        self.norms = norms
        self.size = attention.head_dim
        self.sizes = [size // self.size for size in layer.qkv.sizes]
        heads = qkv.unflatten(-1, (-1, self.size))  # [M, H + 2 H_kv, D]
        *turned, v = heads.split(self.sizes, 1)
        self.unnormed: list[tuple[Tensor, Tensor]] = []
        if norms:
            # The engine rounds once, after the rotation.
            dtype = torch.float32 if layer.is_unified else qkv.dtype
            turned = [self._norm(x, w, eps, dtype) for x, w in zip(turned, norms, strict=True)]
        q, k = (qkv.new_empty(x.shape) for x in turned)
        rotation.rotate(turned[0], cos, sin, q)
        if layer.kv_rounding is None or layer.kv_rounding.scales is None:
            rotation.rotate(turned[1], cos, sin, k)
            v = v.contiguous()  # a view would keep the whole product
        else:
            (k_scale, v_scale), center = layer.kv_rounding.scales
            rotation.rotate(turned[1], cos, sin, k, scale=k_scale, center=center)
            v = rotation.round_values(v, v.new_empty(v.shape), v_scale)
        self.qkv = (q, k, v)

    def _norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y, inverse = rms_norm.normalize(rows, weight, eps, dtype)
        self.unnormed.append((rows, inverse))
        return y.view(x.shape)

    def gradients(self, d_heads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """d of the product [M, N], and of the norms of q and k."""
        dq, dk, dv = (x.flatten(0, 1) for x in d_heads)  # [M, H, D]
        product = dv.new_empty(len(dv), sum(self.sizes), dv.shape[-1])
        *d_turned, target = product.split(self.sizes, 1)
        target.copy_(dv)
        d_norms = []
        for index, (dx, into) in enumerate(zip((dq, dk), d_turned, strict=True)):
            turned = into if not self.norms else dx.new_empty(dx.shape)
            cos, sin = self.rotations
            rotation.rotate(with_whole_rows(dx), cos, sin, turned, is_gradient=True)
            if self.norms:
                x, inverse = self.unnormed[index]
                d_rows, d_norm = rms_norm.gradients(
                    turned.view(x.shape), x, self.norms[index], inverse
                )
                into.copy_(d_rows.view(dx.shape))
                d_norms.append(d_norm)
        return product.flatten(1), d_norms


def fuse_layers_(model: Any) -> int:
    """Replace decoder layers by fused ones that compute the same; returns how many."""
    layers = [m for m in model.modules() if type(m).__name__ in LAYERS]
    rotations = _sample_rotations(model, layers)
    if rotations is None:
        return 0
    num_fused = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__ in LAYERS and _agree(module, rotations):
                setattr(parent, name, FusedLayer(module).train(module.training))
                num_fused += 1
    return num_fused


def unify_layers_(model: Any, quant: QuantConfig, compute_dtype: torch.dtype) -> bool:
    """Make fused layers compute as the engine does; False if there are others."""
    layers = [m for m in model.modules() if type(m).__name__ in LAYERS or isinstance(m, FusedLayer)]
    if not layers or not all(isinstance(layer, FusedLayer) for layer in layers):
        return False
    if quant.backward != "bf16" and get_format(quant.format).block is not None:
        raise ConfigError(
            f"quant.backward = {quant.backward!r} is not built for {quant.format} on a GPU; set it "
            "to 'bf16'"
        )
    for index, layer in enumerate(layers):
        layer.kv_rounding = KVRounding() if quant.kv == "fp8" else None
        if not is_full(index, len(layers), quant.full_layers):
            layer.unify_(quant, compute_dtype)
    return True


def adopt_codes_(model: nn.Module, buffers: Sequence[EngineCodes]) -> None:
    """Keep the codes of unified layers in an engine's buffers, one record for each layer."""
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
    if len(layers) != len(buffers):  # other layers keep their own
        return
    for layer, codes in zip(layers, buffers, strict=True):
        for name, buffer in codes.products.items():
            is_alternating = codes.has_alternating_gate and name == "gate_up"
            getattr(layer, name).adopt_(buffer, is_alternating=is_alternating)


def forget_copies_(model: nn.Module) -> None:
    """Free the copies of the weights that products read, until the next forward."""
    for layer in model.modules():
        if isinstance(layer, FusedLayer):
            for projection in layer.projections:
                projection.forget_copies_()


@torch.no_grad()
def _agree(layer: Any, rotations: Rotations) -> bool:
    """Whether a fused layer returns the same in FP32 for a few random rows."""
    weight, width = next(layer.parameters()), layer.self_attn.q_proj.in_features
    if any(p.dtype != torch.float32 for p in layer.parameters()):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, CHECK_POSITIONS, width, generator=generator).to(weight.device)
    fused = FusedLayer(layer)
    expected, found = (m(x, position_embeddings=rotations) for m in (layer, fused))
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
