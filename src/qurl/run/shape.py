"""The sizes of a model, counted without its weights."""

from __future__ import annotations

from collections.abc import Mapping
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
class Shape:
    """The sizes of a model, and how many of its parameters are of which kind."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocabulary: int
    head_dim: int
    num_parameters: int
    num_quantized: int
    """Parameters of the projections, which the engine holds in codes."""
    num_in_rank: int
    """Parameters of the projections' adapters of rank 1."""
    num_narrow: int
    """Parameters that optim.masters = "bf16" keeps in BF16."""
    num_coded: int
    """Parameters whose moments AdamW can hold in 8 bits."""

    @property
    def num_others(self) -> int:
        """Parameters of embedding, head, norms and biases."""
        return self.num_parameters - self.num_quantized

    @property
    def num_head(self) -> int:
        """Parameters of lm_head; the embedding has as many."""
        return self.vocabulary * self.hidden_size

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.num_others < 2 * self.num_head

    @property
    def head_numbers(self) -> int:
        """Numbers of all query heads of a token, in one layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers of all key heads of a token, in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_numbers

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        """(N, K) of the matrix products of a Llama's layer: output and input channels."""
        return {
            "qkv": (self.head_numbers + 2 * self.kv_numbers, self.hidden_size),
            "o": (self.hidden_size, self.head_numbers),
            "gate_up": (2 * self.mlp_size, self.hidden_size),
            "down": (self.hidden_size, self.mlp_size),
        }


def empty_model(config: Config) -> Any:
    """The recipe's model on the meta device: no weights are read or made."""
    if config.model.path != "scratch":
        return load_empty_model(config.model.path)
    with torch.device("meta"):
        return build_tiny_llama(config.model.scratch, build_tokenizer())


def measure_model(config: Config) -> Shape:
    return measure(empty_model(config))


def measure(model: Any) -> Shape:
    text = model.config.get_text_config()
    num_heads = text.num_attention_heads
    return Shape(
        name="model",
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        mlp_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_quantized=sum(
            p.numel()
            for name, p in model.named_parameters()
            if p.dim() >= 2 and any(part in PROJECTIONS for part in name.split("."))
        ),
        num_in_rank=sum(sum(layer.weight.shape) for _, layer in projections(model)),
        num_narrow=sum(layer.weight.numel() for _, layer in projections(model)),
        num_coded=sum(p.numel() for p in find_coded(model)),
    )
