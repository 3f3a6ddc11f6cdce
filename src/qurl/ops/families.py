"""The model families that QuRL knows by name: one record each, for every part that must know.

UAQ reads which norm feeds what, the fused layers which classes they may replace, the local engine
what it can run. The trainer also takes other families, as far as transformers loads them.
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
    has_experts: bool = False
    """Some layers have experts, fused in one tensor or a module each."""
    has_shared_expert: bool = False
    """The experts come with a shared one and its gate."""
    is_local: bool = False
    """The local engine runs it."""
    windows: Literal["none", "every layer", "layer types"] = "none"
    """Where the attention has sliding windows; "layer types": as `config.layer_types` says."""
    fusible_layer: str | None = None
    """Class of transformers whose norms and MLP fused modules may replace."""
    fusible_attention: str | None = None
    """Class of transformers that fused attention may replace."""


_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            is_local=True,
            fusible_layer="LlamaDecoderLayer",
            fusible_attention="LlamaAttention",
        ),
        Family(
            "mistral",
            is_local=True,
            windows="every layer",
            fusible_layer="MistralDecoderLayer",  # its attention does not tell its window
        ),
        Family(
            "qwen2",
            is_local=True,
            windows="layer types",
            fusible_layer="Qwen2DecoderLayer",
            fusible_attention="Qwen2Attention",
        ),
        Family(
            "qwen3",
            other_norms=_QK_NORMS,
            is_local=True,
            windows="layer types",
            fusible_layer="Qwen3DecoderLayer",
            fusible_attention="Qwen3Attention",
        ),
        Family("gemma", norm_offset=1.0),
        Family("gemma2", "pre_feedforward_layernorm", norm_offset=1.0, other_norms=_POST_NORMS),
        Family(
            "gemma3_text",
            "pre_feedforward_layernorm",
            norm_offset=1.0,
            other_norms=_POST_NORMS + _QK_NORMS,
        ),
        Family("mixtral", has_experts=True),
        Family("qwen2_moe", has_experts=True, has_shared_expert=True),
        Family("qwen3_moe", other_norms=_QK_NORMS, has_experts=True),
    )
}


def local_engine_families() -> tuple[str, ...]:
    """Model types that the local engine runs."""
    return tuple(family.model_type for family in FAMILIES.values() if family.is_local)
