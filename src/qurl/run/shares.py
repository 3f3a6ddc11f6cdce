"""What trainers and engines hold in memory (docs/parallel.md), from what one trainer alone holds.

    shards      policy, reference, critic, gradients and moments: 1 / N of the bytes
    gathered    the weights and gradients of the layer at work, and of the next, in FP32; embedding,
                head and norms for as long as a forward or backward lasts
    whole       the BF16 weights that autograd keeps from forward to backward, unless layers are
                checkpointed. Sharding does not divide them
    engine      codes, the embedding as the trainer has it, a BF16 head, and a cache; on every
                rank, on the first, or on cards of their own (`Placed`)
    main        whole FP32 models, while the driver loads them into main memory; its policy stays

Which tensors autograd keeps was counted on two ranks on a CPU; how many buffers FSDP2 has is
assumed. No rank was ever measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from qurl.config import Config
from qurl.quant.formats import get_format
from qurl.quant.shipment import CHUNK_BYTES
from qurl.run.shape import Shape

SHARDED = ("policy, FP32", "reference", "critic", "AdamW", "gradients")
CACHE = "KV cache"
ENGINE = ("engine weights", "engine of evaluations", CACHE)
"""Rows of those that sample."""
WEIGHT_BUFFERS, GRADIENT_BUFFERS = 3, 2
"""Layers that FSDP2 is assumed to hold at once: weights at work, gathered and being gathered;
gradients, and their copy that is reduced."""
Placed = Literal["together", "apart", "driver"]
"""With every trainer, on cards of their own, or with the first trainer alone."""


def place_of(config: Config) -> Placed:
    """Where the engines of a recipe are (`qurl.run.engines`)."""
    if config.parallel.engines:
        return "apart"
    is_together = config.parallel.colocate and config.rollout.engine == "local"
    return "together" if is_together else "driver"


def num_engines(config: Config) -> int:
    """How many share the problems of a step."""
    numbers = {"together": config.parallel.trainers, "apart": config.parallel.engines, "driver": 1}
    return numbers[place_of(config)]


def is_shipped(config: Config) -> bool:
    """Whether weights come from elsewhere, so that an engine shares none with its trainer."""
    return config.parallel.is_sharded or config.parallel.engines > 0


def engine_weights(config: Config, shape: Shape, is_cuda: bool) -> dict[str, float]:
    """Bytes of the engine that samples, and of the unquantized one that evaluates."""
    wide = 2 if is_cuda else 4
    is_coded = is_cuda and config.quant.format != "none"  # a CPU holds codes as FP32
    narrow = get_format(config.quant.format).weight_bytes if is_coded else wide
    beside = wide * config.model.lora_rank * shape.num_in_rank * config.model.has_coded_base
    num_wide = shape.num_quantized * 2 * config.quant.full_layers // shape.num_layers
    if is_shipped(config):
        rest = _shipped_rest(config, shape, wide)
    else:
        # The engine shares embedding and norms, and the head if it has its precision.
        is_copied = is_cuda and not config.model.lora_rank
        rest = wide * shape.num_head * is_copied
    has_second = config.has_full_engine and (is_cuda or is_shipped(config))
    return {
        "engine weights": float(
            narrow * (shape.num_quantized - num_wide) + wide * num_wide + rest + beside
        ),
        "engine of evaluations": float((wide * shape.num_quantized + rest) * has_second),
    }


def _shipped_rest(config: Config, shape: Shape, wide: int) -> int:
    """The embedding as the trainer has it, a head even if it is tied, and norms in FP32."""
    num_norms = shape.num_others - shape.num_head * (2 - shape.is_tied)
    embedding = wide if config.model.lora_rank else 4
    return (embedding + wide) * shape.num_head + 4 * num_norms


def transit_bytes(shape: Shape, weights: float) -> float:
    """The largest chunk of a sync that an engine receives before it writes it into its buffers.

    A chunk ends with the weight that makes it `CHUNK_BYTES`, and the largest weights are the
    embedding, which is the first, and the head, which is the last.
    """
    largest = max(4 * shape.num_head, CHUNK_BYTES + 2 * shape.num_head)
    return float(min(largest, weights))


def share_held(held: Mapping[str, float], config: Config) -> dict[str, float]:
    """What the first of the ranks holds between updates."""
    ranks = config.parallel.trainers
    return {name: x / ranks if name in SHARDED else x for name, x in held.items()}


def share_update(rows: Mapping[str, float], config: Config, shape: Shape) -> dict[str, float]:
    """What the first of the ranks needs for an update; `rows` are those of one trainer."""
    layer, others = shape.num_quantized / shape.num_layers, shape.num_others
    copies = rows["BF16 copies"]
    if config.model.gradient_checkpointing:
        copies /= shape.num_layers
    # The head's gradient is a row of one trainer already.
    gradients = GRADIENT_BUFFERS * (layer + others) - shape.num_head
    return {
        **rows,
        "gradients": rows["gradients"] / config.parallel.trainers,
        "BF16 copies": copies,
        "gathered weights": 4.0 * (WEIGHT_BUFFERS * layer + others),
        "gathered gradients": 4.0 * gradients,
    }


def follower_rows(config: Config, rows: Mapping[str, float]) -> dict[str, float]:
    """The rows of any other rank, from those of the first."""
    is_alike = place_of(config) != "driver"
    return {name: number for name, number in rows.items() if is_alike or name not in ENGINE}
