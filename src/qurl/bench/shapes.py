"""Models of real shapes with random weights: speed does not depend on their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qurl.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool  # whether the head is the embedding
    head_size: int = 0  # of one attention head; 0 = hidden / heads

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        """(N, K) of a layer's matrix products: output and input channels."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def num_body(self) -> int:
        """Weights of the projections, which formats quantize."""
        return self.layers * sum(n * k for n, k in self.products.values())

    @property
    def num_head(self) -> int:
        """Weights of lm_head; the embedding has as many."""
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        biases = self.layers * (self.heads + 2 * self.kv_heads) * self.head_dim
        norms = (2 * self.layers + 1) * self.hidden
        return self.num_body + self.num_head * (1 if self.is_tied else 2) + biases + norms

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("tiny", 256, 4, 4, 2, 512, 1024, is_tied=True),
        Shape("0.5B", 896, 24, 14, 2, 4864, 151936, is_tied=True),
        Shape("1.5B", 1536, 28, 12, 2, 8960, 151936, is_tied=True),
        Shape("3B", 2048, 36, 16, 2, 11008, 151936, is_tied=True),
        Shape("7B", 3584, 28, 28, 4, 18944, 152064, is_tied=False),
        Shape("14B", 5120, 48, 40, 8, 13824, 152064, is_tied=False),
        Shape("32B", 5120, 64, 40, 8, 27648, 152064, is_tied=False),
        Shape("72B", 8192, 80, 64, 8, 29568, 152064, is_tied=False),
    )
}
"""The sizes of Qwen2.5, and a tiny one for machines without a GPU."""


@dataclass(frozen=True)
class Bench:
    """The flags of every benchmark."""

    model: str = "1.5B"
    """Shapes of Qwen2.5 with random weights: tiny, 0.5B, 1.5B, 3B, 7B, 14B, 32B, 72B;
    several with commas."""
    repeats: int = 5
    """Measured runs; the median counts."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU if there is one."""
    seed: int = 0
    """Seed of all that is random."""
    out: Path | None = None
    """JSON file to add results to; by default one in benchmarks/results named after the bench."""

    def check(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} must be at least 1")


def split_list(flag: str, text: str, allowed: Iterable[str] = SHAPES) -> list[str]:
    """Values separated by commas, without duplicates; by default names of shapes."""
    values = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for value in values:
        if value not in allowed:
            raise ConfigError(f"--{flag} {text}: {value!r} is not one of {', '.join(allowed)}")
    return values


def model_config(shape: Shape) -> dict[str, Any]:
    """The keys of a Qwen2 `config.json`."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "bos_token_id": shape.vocabulary - 2,
        "eos_token_id": shape.vocabulary - 1,
    }


def build_model(
    shape: Shape, device: torch.device, dtype: torch.dtype | None = None, *, seed: int = 0
) -> Any:
    """A transformers model, made on the device; by default BF16 on a GPU, FP32 on a CPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    config = Qwen2Config(**model_config(shape))
    # On the device and in this dtype from the start: no second copy of the weights.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype).requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zeros would hide a missing bias
                parameter.normal_(std=0.02)
    return model.eval()
