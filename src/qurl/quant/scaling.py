"""UAQ, update-aware quantization: an equivalent rescaling of a model, once, before training.

A linear layer fed by an RMSNorm, y = W (g * n), becomes

    W' = W / s,   g' = s g        (s = 1.5 in the paper)

In exact arithmetic, the function, the codes of every quantizer and the mismatch at step 0 stay the
same. A trainer that computes in BF16 rounds W / s anew unless s is a power of two (docs/uaq.md).
Updates grow relative to the quantization step: by s under AdamW, by s^2 under SGD.

Options: `o_proj` divides o by s against v, `down_proj` divides down by s against up. Both cancel
the default scaling of v and up, so the gain moves from one layer to the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qurl.errors import ModelError
from qurl.ops.families import FAMILIES, Family

Powers = Mapping[str, tuple[int, ...]]
"""Parameter of a layer -> power of s, or one power for each of the equal parts of its rows.
In names, `*` stands for the number of an expert."""


_FUSED_EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@dataclass(frozen=True)
class ScaledPart:
    """A parameter or one of its equal parts: tensor <- s^power (offset + tensor) - offset."""

    name: str
    parameter: nn.Parameter
    power: int  # -1, 0 or 1
    offset: float
    part: int
    num_parts: int

    def cut(self, whole: Tensor) -> Tensor:
        """This part of the whole parameter, or of its gradient."""
        return whole.chunk(self.num_parts, dim=-2)[self.part] if self.num_parts > 1 else whole

    def apply_(self, scale: float, *, is_inverse: bool) -> None:
        # Not `.data`, which would hide the change from whoever watches the version.
        tensor = self.cut(self.parameter.detach())
        # A tensor, because CUDA turns division by a Python number into a rounded multiplication.
        factor = tensor.new_tensor(scale)
        if self.offset:
            tensor.add_(self.offset)
        (tensor.mul_ if (self.power > 0) != is_inverse else tensor.div_)(factor)
        if self.offset:
            tensor.sub_(self.offset)


@torch.no_grad()
def rescale_(
    model: nn.Module, scale: float = 1.5, *, o_proj: bool = False, down_proj: bool = False
) -> nn.Module:
    """Apply UAQ in place; `model.config.qurl_uaq` records it and is saved with the model."""
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale = {scale} must be finite and positive; the paper uses 1.5")
    if record := _record(model):
        raise ModelError(f"UAQ was applied already ({record}); unscale_ the model first")
    record = {"scale": float(scale), "o_proj": o_proj, "down_proj": down_proj}
    _apply_(model, record, is_inverse=False)
    model.config.qurl_uaq = record  # type: ignore[union-attr]
    return model


@torch.no_grad()
def unscale_(model: nn.Module, scale: float | None = None) -> nn.Module:
    """Undo `rescale_` in place: exactly if s is a power of two, else within rounding.

    The model knows its s; a `scale` that you give must be the same.
    """
    record = _record(model)
    if record is None:
        raise ModelError("the model carries no UAQ (config.qurl_uaq): nothing to undo")
    if scale not in (None, record["scale"]):
        raise ValueError(f"scale = {scale}, but UAQ was applied with {record['scale']}")
    _apply_(model, record, is_inverse=True)
    del model.config.qurl_uaq  # type: ignore[union-attr]
    return model


def uaq_scale(model: nn.Module) -> float:
    """The s applied to a model; 1 without UAQ."""
    return (_record(model) or {"scale": 1.0})["scale"]


def learning_rate_scales(model: nn.Module, scale: float) -> dict[nn.Parameter, float]:
    """The equivalent of UAQ under AdamW: s for norm-fed weights, 1/s for the norms."""
    parts = _scaled_parts(model, {"o_proj": False, "down_proj": False})
    return {part.parameter: scale**-part.power for part in parts}


@torch.no_grad()
def unscaled_grad_norm(model: nn.Module) -> float:
    """The norm that the gradients would have without UAQ: dL/dW = s^power dL/dW'."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    if record := _record(model):
        for part in _scaled_parts(model, record):
            if part.parameter.grad is not None:
                change = record["scale"] ** (2 * part.power) - 1
                squares.append(change * part.cut(part.parameter.grad).double().square().sum())
    if not squares:
        return 0.0
    total = torch.stack(squares).sum()
    if isinstance(total, DTensor):  # the sum of this rank's rows
        total = total.full_tensor()
    return math.sqrt(max(0.0, float(total)))


def _record(model: nn.Module) -> dict[str, Any] | None:
    record = getattr(getattr(model, "config", None), "qurl_uaq", None)
    if record is None:
        return None
    scale = record.get("scale") if isinstance(record, Mapping) else None
    if not isinstance(scale, float | int) or not 0 < scale < math.inf:
        raise ModelError(f"config.json: qurl_uaq = {str(record)[:100]} is not what QuRL writes")
    return {"o_proj": False, "down_proj": False, **record}


def _apply_(model: nn.Module, record: Mapping[str, Any], *, is_inverse: bool) -> None:
    scale, parts = record["scale"], _scaled_parts(model, record)
    is_power_of_two = math.frexp(scale)[0] == 0.5
    for part in parts:
        is_exact = is_power_of_two and not part.offset
        if not is_exact and part.parameter.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"UAQ with scale = {scale} would round {part.name} in {part.parameter.dtype}: load "
                "the model in float32 (it may still compute in bfloat16)"
            )
    for part in parts:
        part.apply_(scale, is_inverse=is_inverse)


def _scaled_parts(model: nn.Module, options: Mapping[str, Any]) -> list[ScaledPart]:
    """All that UAQ scales; every parameter of the decoder layers must be known."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ModelError(
            f"UAQ does not know the layers of model type {model_type!r}; it knows "
            f"{', '.join(FAMILIES)}. Set quant.update_scale = 1, or add a Family"
        )
    powers = _powers(family, o=int(options["o_proj"]), down=int(options["down_proj"]))
    norms = ("input_layernorm.weight", f"{family.mlp_norm}.weight")
    parts: list[ScaledPart] = []
    for i, layer in enumerate(model.base_model.layers):  # type: ignore[union-attr,arg-type]
        parameters = dict(layer.named_parameters(remove_duplicate=False))
        _check_layer(parameters, f"layers.{i} of {model_type}", family, powers)
        for name, parameter in parameters.items():
            offset, own = family.norm_offset if name in norms else 0.0, powers[_starred(name)]
            of_part = (f"layers.{i}.{name}", parameter)
            parts += [ScaledPart(*of_part, p, offset, j, len(own)) for j, p in enumerate(own)]
    if len({(id(part.parameter), part.part) for part in parts}) < len(parts):
        raise ModelError(f"{type(model).__name__} shares weights between layers: UAQ cannot scale")
    return [part for part in parts if part.power]


def _powers(family: Family, *, o: int, down: int) -> Powers:
    powers = {
        "input_layernorm.weight": (1,),
        f"{family.mlp_norm}.weight": (1,),
        **_linear("self_attn.q_proj", weight=-1),
        **_linear("self_attn.k_proj", weight=-1),
        # Attention is linear in V, so s passes through it (for grouped heads too).
        **_linear("self_attn.v_proj", weight=o - 1, bias=o),
        **_linear("self_attn.o_proj", weight=-o),
        **{f"{name}.weight": (0,) for name in family.other_norms},
    }
    for mlp in ("mlp", "mlp.experts.*", "mlp.shared_expert"):
        # act(gate) * up is linear in up alone.
        powers |= _linear(f"{mlp}.gate_proj", weight=-1)
        powers |= _linear(f"{mlp}.up_proj", weight=down - 1, bias=down)
        powers |= _linear(f"{mlp}.down_proj", weight=-down)
    powers |= {"mlp.experts.gate_up_proj": (-1, down - 1), "mlp.experts.down_proj": (-down,)}
    # Routers read the same activations as the experts.
    return powers | {"mlp.gate.weight": (-1,), "mlp.shared_expert_gate.weight": (-1,)}


def _linear(name: str, *, weight: int, bias: int = 0) -> Powers:
    return {f"{name}.weight": (weight,), f"{name}.bias": (bias,)}


def _starred(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _check_layer(
    parameters: Mapping[str, Tensor], where: str, family: Family, powers: Powers
) -> None:
    """Refuse a layer with an unknown parameter, or without one that its family has."""
    shapes = {_starred(name): tuple(parameter.shape) for name, parameter in parameters.items()}
    if unknown := sorted(shapes.keys() - powers.keys()):
        raise ModelError(
            f"{where} has {', '.join(unknown)}, which UAQ does not know; rescale before adding "
            "adapters, or set quant.update_scale = 1"
        )
    if missing := _required(family, shapes.keys()) - shapes.keys():
        raise ModelError(
            f"{where} lacks {', '.join(sorted(missing))}: UAQ cannot tell what feeds what"
        )
    if shapes.keys() >= _FUSED_EXPERTS:
        gate_up, down = shapes["mlp.experts.gate_up_proj"], shapes["mlp.experts.down_proj"]
        if gate_up != (down[0], 2 * down[2], down[1]):
            raise ModelError(
                f"{where} has mlp.experts.gate_up_proj {gate_up} and down_proj {down}; UAQ expects "
                "[experts, 2 x intermediate, hidden] and [experts, hidden, intermediate]"
            )


def _required(family: Family, names: Set[str]) -> set[str]:
    """The weights that a layer must have, by the form of its MLP."""
    required = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    required |= {"input_layernorm.weight", f"{family.mlp_norm}.weight"}
    if any(name.startswith("mlp.shared_expert") for name in names):
        required |= _mlp("mlp.shared_expert") | {"mlp.shared_expert_gate.weight"}
    if not any(name.startswith("mlp.experts.") for name in names):
        return required | _mlp("mlp")
    experts = _FUSED_EXPERTS if names & _FUSED_EXPERTS else _mlp("mlp.experts.*")
    return required | experts | {"mlp.gate.weight"}


def _mlp(path: str) -> set[str]:
    return {f"{path}.{name}_proj.weight" for name in ("gate", "up", "down")}
