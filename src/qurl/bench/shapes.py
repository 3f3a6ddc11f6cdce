"""Models of real shapes with random weights: speed does not depend on their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qurl.errors import ConfigError
from qurl.run.shape import Shape


def qwen2_shape(name: str, *sizes: int, is_tied: bool) -> Shape:
    """What `measure` counts in a Qwen2 of (width, layers, heads, key heads, MLP, vocabulary)."""
    width, layers, heads, kv_heads, mlp, vocabulary = sizes
    head_dim = width // heads
    kv_width = kv_heads * head_dim
    # Rows of the projections; down is counted transposed, so that all have `width` columns.
    rows = (width, kv_width, kv_width, width, mlp, mlp, mlp)
    num_quantized = layers * sum(rows) * width
    biases, norms = layers * sum(rows[:3]), (2 * layers + 1) * width
    num_untied = 0 if is_tied else vocabulary * width
    return Shape(
        name,
        *sizes,
        head_dim=head_dim,
        num_parameters=num_quantized + vocabulary * width + num_untied + biases + norms,
        num_quantized=num_quantized,
        num_in_rank=layers * sum(n + width for n in rows),
        num_narrow=num_quantized,
        num_coded=num_quantized + num_untied,
    )


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        qwen2_shape("tiny", 256, 4, 4, 2, 512, 1024, is_tied=True),
        qwen2_shape("0.5B", 896, 24, 14, 2, 4864, 151936, is_tied=True),
        qwen2_shape("1.5B", 1536, 28, 12, 2, 8960, 151936, is_tied=True),
        qwen2_shape("3B", 2048, 36, 16, 2, 11008, 151936, is_tied=True),
        qwen2_shape("7B", 3584, 28, 28, 4, 18944, 152064, is_tied=False),
        qwen2_shape("14B", 5120, 48, 40, 8, 13824, 152064, is_tied=False),
        qwen2_shape("32B", 5120, 64, 40, 8, 27648, 152064, is_tied=False),
        qwen2_shape("72B", 8192, 80, 64, 8, 29568, 152064, is_tied=False),
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
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp_size,
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
