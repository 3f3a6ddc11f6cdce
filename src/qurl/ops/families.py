"""The model families that QuRL knows by name, for UAQ, the fused layers and the local engine.

The trainer also takes other families, as far as transformers loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """The decoder layer of one model type of transformers; the defaults are Llama's.

    Paths of norms are relative to the layer.
    """

    model_type: str
    mlp_norm: str = "post_attention_layernorm"
    """The norm that feeds the MLP. `input_layernorm` feeds the attention in every family."""
    norm_offset: float = 0.0
    """Norms multiply by offset + weight."""
    other_norms: tuple[str, ...] = ()
    """Norms that feed no projection: QK-norms (they read outputs) and post-norms."""
    is_local: bool = False
    """The local engine runs it."""
    windows: Literal["none", "every layer", "layer types"] = "none"
    """Where the attention has sliding windows; "layer types": as `config.layer_types` says."""
    fusible: str | None = None
    """How transformers' class names begin, if fused modules may replace its modules: "Llama"."""


_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_GEMMA = {"mlp_norm": "pre_feedforward_layernorm", "norm_offset": 1.0}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", is_local=True, fusible="Llama"),
        Family("mistral", is_local=True, fusible="Mistral", windows="every layer"),
        Family("qwen2", is_local=True, fusible="Qwen2", windows="layer types"),
        Family(
            "qwen3", is_local=True, fusible="Qwen3", windows="layer types", other_norms=_QK_NORMS
        ),
        Family("gemma", norm_offset=1.0),
        Family("gemma2", **_GEMMA, other_norms=_POST_NORMS),
        Family("gemma3_text", **_GEMMA, other_norms=_POST_NORMS + _QK_NORMS),
        Family("mixtral"),
        Family("qwen2_moe"),
        Family("qwen3_moe", other_norms=_QK_NORMS),
    )
}


def local_engine_families() -> tuple[str, ...]:
    """Model types that the local engine runs."""
    return tuple(family.model_type for family in FAMILIES.values() if family.is_local)
