"""What a model looks like to the local engine, and which models it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from qurl.errors import ModelError
from qurl.ops.families import FAMILIES, local_engine_families
from qurl.quant.coded_linear import CodedLinear
from qurl.quant.linear import PROJECTIONS

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
"""Modules of a layer that hold a norm; the last two only in some models."""


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


def read_architecture(model: Any) -> Architecture:
    """The shape of the model, or a ModelError that names what the local engine cannot compute."""
    config = model.config
    if config.model_type not in (known := local_engine_families()):
        raise ModelError(refusal(f"model_type = {config.model_type!r}", known))
    if config.hidden_act != "silu":
        raise ModelError(refusal(f"hidden_act = {config.hidden_act!r}", ("silu",)))
    rotary = model.model.rotary_emb
    if rotary.rope_type not in ROPE_TYPES:
        raise ModelError(refusal(f"rope_type = {rotary.rope_type!r}", ROPE_TYPES))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rotary.inv_freq.shape[-1] * 2 != head_dim:
        raise ModelError(refusal("partial rotary embedding", ("rotation of the whole head",)))
    _check_layers(model)
    return Architecture(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        windows=_windows(config),
    )


def refusal(what: str, supported: Sequence[str]) -> str:
    return (
        f"the local engine cannot run {what}; it supports {', '.join(supported)}. "
        'Set rollout.engine = "hf" to sample with transformers instead'
    )


def _check_layers(model: Any) -> None:
    """Raise unless the decoder uses every weight, and every projection is a plain linear layer."""
    for name, module in model.model.layers.named_modules():
        kind = name.rpartition(".")[2]
        if ".parametrizations" in name or kind == "adapter":  # of a weight that is computed: LoRA
            continue
        if kind in PROJECTIONS and not _is_linear(module):
            what = f"model.layers.{name} of type {type(module).__name__}"
            raise ModelError(refusal(what, ("nn.Linear",)))
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and kind not in PROJECTIONS + NORMS:
            raise ModelError(refusal(f"weights in model.layers.{name}", PROJECTIONS + NORMS))
    if getattr(model.lm_head, "bias", None) is not None:
        raise ModelError(refusal("lm_head with a bias", ("lm_head without bias",)))


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer is all in its weight and bias, also if it multiplies in its own way."""
    names = {name.partition(".")[0] for name, _ in module.named_parameters()}
    computed = "adapter" if isinstance(module, CodedLinear) else "parametrizations"
    return isinstance(module, nn.Linear) and names <= {"weight", "bias", computed}


def _windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each layer, as transformers applies it."""
    windows = FAMILIES[config.model_type].windows
    if windows != "layer types":
        window = config.sliding_window if windows == "every layer" else None
        return (window,) * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    if unknown := set(config.layer_types) - set(known):
        raise ModelError(refusal(f"layer_types with {sorted(unknown)}", tuple(known)))
    return tuple(known[kind] for kind in config.layer_types)
