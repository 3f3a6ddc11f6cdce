"""UAQ, update-aware quantization: an equivalent rescaling of a model, once, before training.

A linear layer fed by an RMSNorm, y = W (g * n), becomes

    W' = W / s,   g' = s g        (s = 1.5 in the paper)

The function, the codes of every quantizer and the mismatch at step 0 stay as they are, in exact
arithmetic: a trainer that computes in BF16 rounds W / s anew unless s is a power of two
(docs/uaq.md). What grows is the update against the quantization step: under AdamW by s (a learning
rate s times larger on these layers, 1/s on their norms), under SGD by s^2.

Options: `o_proj` divides o by s against v, `down_proj` divides down by s against up. Both cancel
the default scaling of v and up, so the gain moves from the one layer to the other.

The parameters are shared with the optimizer and changed in place. Rescale before adding LoRA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """The decoder layer of a model family: which norm feeds what.

    Paths are relative to the layer; `*` stands for the number of an expert.
    """

    mlp_norm: str = "post_attention_layernorm"
    """The norm before the MLP; that before the attention is `input_layernorm` everywhere."""
    norm_offset: float = 0.0
    """y = n (offset + w)."""
    untouched: tuple[str, ...] = ()
    """Norms that feed no projection: QK-norms (which see outputs) and post-norms."""
    moe: bool = False
    """Some layers have experts, fused in one tensor or a module each."""
    shared: bool = False
    """Experts come with a shared one and its gate."""


_QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")
_SANDWICH = ("post_attention_layernorm", "post_feedforward_layernorm")

LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout(),
    "mistral": Layout(),
    "qwen2": Layout(),
    "qwen3": Layout(untouched=_QK_NORM),
    "gemma": Layout(norm_offset=1.0),
    "gemma2": Layout("pre_feedforward_layernorm", norm_offset=1.0, untouched=_SANDWICH),
    "gemma3_text": Layout(
        "pre_feedforward_layernorm", norm_offset=1.0, untouched=_SANDWICH + _QK_NORM
    ),
    "mixtral": Layout(moe=True),
    "qwen2_moe": Layout(moe=True, shared=True),
    "qwen3_moe": Layout(moe=True, untouched=_QK_NORM),
}


@dataclass(frozen=True)
class Move:
    """tensor <- s^power (offset + tensor) - offset, for one of the equal parts of a parameter."""

    name: str
    parameter: nn.Parameter
    power: int
    offset: float
    part: int
    num_parts: int

    @property
    def tensor(self) -> Tensor:
        return self._take(self.parameter.data)

    @property
    def grad(self) -> Tensor | None:
        return None if self.parameter.grad is None else self._take(self.parameter.grad)

    def _take(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.num_parts, dim=-2)[self.part] if self.num_parts > 1 else whole

    def apply_(self, scale: float, *, inverse: bool = False) -> None:
        power = -self.power if inverse else self.power
        # A tensor, because CUDA turns division by a Python number into a rounded multiplication.
        factor = self.tensor.new_tensor(scale)
        if self.offset:
            self.tensor.add_(self.offset)
        if power > 0:
            self.tensor.mul_(factor)
        elif power < 0:
            self.tensor.div_(factor)
        if self.offset:
            self.tensor.sub_(self.offset)


@torch.no_grad()
def rescale_(
    model: nn.Module, scale: float = 1.5, *, o_proj: bool = False, down_proj: bool = False
) -> nn.Module:
    """Apply UAQ in place; `model.config.qurl_uaq` records it and is saved with the model."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale = {scale} must be finite and positive; the paper uses 1.5")
    if record := _record(model):
        raise ModelError(f"UAQ was applied already ({record}); unscale_ the model first")
    moves = _moves(model, o_proj=o_proj, down_proj=down_proj)
    _check_precision(moves, scale)
    for move in moves:
        move.apply_(scale)
    record = {"scale": float(scale), "o_proj": o_proj, "down_proj": down_proj}
    _config(model).qurl_uaq = record
    return model


@torch.no_grad()
def unscale_(model: nn.Module, scale: float | None = None) -> nn.Module:
    """Undo `rescale_` in place: bit for bit where s is a power of two, else within rounding.

    The model knows its s; one that is given must be that. Gemma's norms keep offset + w, not w, bit
    for bit.
    """
    record = _record(model)
    if record is None:
        raise ModelError("the model carries no UAQ (config.qurl_uaq): nothing to undo")
    if scale not in (None, record["scale"]):
        raise ValueError(f"scale = {scale}, but UAQ was applied with {record['scale']}")
    moves = _moves(model, o_proj=record["o_proj"], down_proj=record["down_proj"])
    _check_precision(moves, record["scale"])
    for move in moves:
        move.apply_(record["scale"], inverse=True)
    del _config(model).qurl_uaq
    return model


def uaq_scale(model: nn.Module) -> float:
    """The s applied to a model; 1 where there is none."""
    record = _record(model)
    return 1.0 if record is None else record["scale"]


def learning_rate_scales(model: nn.Module, scale: float) -> dict[nn.Parameter, float]:
    """What UAQ is to AdamW: s for norm-fed weights, 1/s for the norms that feed them."""
    moves = _moves(model, o_proj=False, down_proj=False)
    return {move.parameter: scale**-move.power for move in moves}


@torch.no_grad()
def unscaled_grad_norm(model: nn.Module) -> float:
    """The norm that the gradients would have without UAQ: dL/dW = s^power dL/dW'.

    Clipping sees the scaled gradients, which are s times larger on the scaled weights.
    """
    record = _record(model)
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    if record is not None:
        for move in _moves(model, o_proj=record["o_proj"], down_proj=record["down_proj"]):
            if move.grad is not None:
                change = record["scale"] ** (2 * move.power) - 1
                squares.append(change * move.grad.double().square().sum())
    return math.sqrt(max(0.0, float(torch.stack(squares).sum()))) if squares else 0.0


def _record(model: nn.Module) -> dict[str, Any] | None:
    return getattr(_config(model), "qurl_uaq", None)


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _moves(model: nn.Module, *, o_proj: bool, down_proj: bool) -> list[Move]:
    """What happens to each parameter of the decoder layers; all of them are accounted for."""
    model_type = getattr(_config(model), "model_type", None)
    layout = LAYOUTS.get(str(model_type))
    if layout is None:
        raise ModelError(
            f"UAQ does not know the layout of model type {model_type!r}; it knows "
            f"{', '.join(LAYOUTS)}. Set quant.update_scale = 1, or add a Layout"
        )
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(model).__name__} ({model_type}) has no list of decoder `layers`")
    roles = _roles(layout, o_proj=o_proj, down_proj=down_proj)
    moves = []
    for i, layer in enumerate(layers):
        _check_layer(layer, f"layers.{i} of {model_type}", layout, roles)
        moves += _layer_moves(layer, f"layers.{i}", layout, roles)
    pointers = [move.tensor.data_ptr() for move in moves]
    if len(set(pointers)) < len(pointers):
        raise ModelError(f"{type(model).__name__} shares weights between layers: UAQ cannot scale")
    return [move for move in moves if move.power]


Roles = Mapping[str, tuple[int, ...]]
"""Parameter of a layer -> power of s, or one power for each of the equal parts of its rows."""


def _roles(layout: Layout, *, o_proj: bool, down_proj: bool) -> Roles:
    o, down = int(o_proj), int(down_proj)
    roles = {
        "input_layernorm.weight": (1,),
        f"{layout.mlp_norm}.weight": (1,),
        **_linear("self_attn.q_proj", weight=-1),
        **_linear("self_attn.k_proj", weight=-1),
        # Attention is linear in V, so s passes through it (for grouped heads too).
        **_linear("self_attn.v_proj", weight=o - 1, bias=o),
        **_linear("self_attn.o_proj", weight=-o),
        **{f"{name}.weight": (0,) for name in layout.untouched},
    }
    for mlp in ("mlp", "mlp.experts.*", "mlp.shared_expert"):
        # act(gate) * up is linear in up alone.
        roles |= _linear(f"{mlp}.gate_proj", weight=-1)
        roles |= _linear(f"{mlp}.up_proj", weight=down - 1, bias=down)
        roles |= _linear(f"{mlp}.down_proj", weight=-down)
    roles |= {"mlp.experts.gate_up_proj": (-1, down - 1), "mlp.experts.down_proj": (-down,)}
    # Routers read the same activations as the experts.
    return roles | {"mlp.gate.weight": (-1,), "mlp.shared_expert_gate.weight": (-1,)}


def _linear(name: str, *, weight: int, bias: int = 0) -> Roles:
    """The bias stays as it is unless the output of the layer is meant to grow."""
    return {f"{name}.weight": (weight,), f"{name}.bias": (bias,)}


def _role(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _layer_moves(layer: nn.Module, prefix: str, layout: Layout, roles: Roles) -> Iterator[Move]:
    norms = ("input_layernorm.weight", f"{layout.mlp_norm}.weight")
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        powers = roles[_role(name)]
        offset = layout.norm_offset if name in norms else 0.0
        for part, power in enumerate(powers):
            yield Move(f"{prefix}.{name}", parameter, power, offset, part, len(powers))


def _check_layer(layer: nn.Module, where: str, layout: Layout, roles: Roles) -> None:
    """Refuse a layer that has a parameter without a role, or lacks one that the layout names."""
    shapes = {_role(n): tuple(p.shape) for n, p in layer.named_parameters(remove_duplicate=False)}
    if unknown := sorted(shapes.keys() - roles.keys()):
        raise ModelError(
            f"{where} has {', '.join(unknown)}, which UAQ does not know; rescale before adding "
            "adapters, or set quant.update_scale = 1"
        )
    missing = min((form - shapes.keys() for form in _forms(layout)), key=len)
    if missing:
        raise ModelError(
            f"{where} lacks {', '.join(sorted(missing))}: UAQ cannot tell what feeds what"
        )
    if shapes.keys() >= _FUSED:
        gate_up, down = shapes["mlp.experts.gate_up_proj"], shapes["mlp.experts.down_proj"]
        if gate_up != (down[0], 2 * down[2], down[1]):
            raise ModelError(
                f"{where} has mlp.experts.gate_up_proj {gate_up} and down_proj {down}; UAQ expects "
                "[experts, 2 x intermediate, hidden] and [experts, hidden, intermediate]"
            )


_FUSED = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def _forms(layout: Layout) -> list[set[str]]:
    """The weights that a layer must have: one set for each form of its MLP."""
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    attention |= {"input_layernorm.weight", f"{layout.mlp_norm}.weight"}
    dense = attention | _mlp("mlp")
    if not layout.moe:
        return [dense]
    sparse = attention | {"mlp.gate.weight"}
    if layout.shared:
        sparse |= _mlp("mlp.shared_expert") | {"mlp.shared_expert_gate.weight"}
    return [sparse | _FUSED, sparse | _mlp("mlp.experts.*"), dense]


def _mlp(path: str) -> set[str]:
    return {f"{path}.{name}_proj.weight" for name in ("gate", "up", "down")}


def _check_precision(moves: Sequence[Move], scale: float) -> None:
    is_power_of_two = math.frexp(scale)[0] == 0.5
    for move in moves:
        is_exact = is_power_of_two and not move.offset
        if not is_exact and move.tensor.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"UAQ with scale = {scale} would round {move.name} in {move.tensor.dtype}: load "
                "the model in float32 (it may still compute in bfloat16)"
            )
