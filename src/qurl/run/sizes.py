"""The sizes of a model, counted without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qurl.config import Config
from qurl.quant.linear import PROJECTIONS, projections
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.adamw8bit import find_coded
from qurl.trainer.policy import load_empty_model
from qurl.trainer.scratch import build_tiny_llama


@dataclass(frozen=True)
class ModelSize:
    num_parameters: int
    num_quantized: int
    """Parameters of the projections, which the engine holds in codes."""
    num_in_rank: int
    """Parameters of the projections' adapters of rank 1."""
    num_narrow: int
    """Parameters that optim.masters = "bf16" keeps in BF16."""
    num_coded: int
    """Parameters whose moments AdamW can hold in 8 bits."""
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    head_numbers: int
    """Numbers of all query heads of a token."""
    kv_numbers: int
    """Numbers of all key heads of a token, in one layer."""
    vocabulary: int

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_numbers

    @property
    def num_head(self) -> int:
        return self.vocabulary * self.hidden_size


def measure_model(config: Config) -> ModelSize:
    """Count parameters on the meta device: no weights are read or made."""
    if config.model.path != "scratch":
        return measure(load_empty_model(config.model.path))
    with torch.device("meta"):
        return measure(build_tiny_llama(config.model.scratch, build_tokenizer()))


def measure(model: Any) -> ModelSize:
    text = model.config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSize(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_quantized=sum(
            p.numel()
            for name, p in model.named_parameters()
            if p.dim() >= 2 and any(part in PROJECTIONS for part in name.split("."))
        ),
        num_in_rank=sum(sum(layer.weight.shape) for _, layer in projections(model)),
        num_narrow=sum(layer.weight.numel() for _, layer in projections(model)),
        num_coded=sum(p.numel() for p in find_coded(model)),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        mlp_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_heads=text.num_attention_heads,
        head_numbers=text.num_attention_heads * head_dim,
        kv_numbers=kv_heads * head_dim,
        vocabulary=text.vocab_size,
    )
