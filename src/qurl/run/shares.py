"""What one of N trainer ranks holds in memory (docs/parallel.md), from what one trainer holds.

    shards      policy, reference, critic, gradients and moments: 1 / N of the bytes
    gathered    the weights and gradients of the layer at work, and of the next, in FP32; embedding,
                head and norms for as long as a forward or backward lasts
    whole       the BF16 weights that autograd keeps from forward to backward, unless layers are
                checkpointed. Sharding does not divide them
    driver      rank 0 alone: a whole FP32 policy for its engine, the engine, its cache
    loading     every rank loads whole models before it keeps its shard

Which tensors autograd keeps was counted on two ranks on a CPU; the buffers of FSDP2 are those that
its source makes. No rank was ever measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from qurl.config import Config
from qurl.run.sizes import ModelSize

SHARDED = ("policy, FP32", "reference", "critic", "AdamW", "gradients")
DRIVER = ("driver's policy, FP32", "engine weights", "engine of evaluations", "KV cache")
"""Rows of rank 0 alone."""
LOADING = "while loading"
"""This row is no part of the others: whole models, before they are sharded."""
WEIGHT_BUFFERS, GRADIENT_BUFFERS = 3, 2
"""Layers that FSDP2 holds at once: weights at work, gathered and being gathered; gradients, and
their copy that is reduced."""


def share_held(held: Mapping[str, float], config: Config, num_parameters: int) -> dict[str, float]:
    """What the first of the ranks holds between updates."""
    ranks = config.parallel.trainers
    models = [held[name] for name in ("policy, FP32", "reference", "critic")]
    copy = 4.0 * num_parameters
    shared = {name: x / ranks if name in SHARDED else x for name, x in held.items()}
    return {"driver's policy, FP32": copy, **shared, LOADING: sum(models) + copy + held["CUDA"]}


def share_update(rows: Mapping[str, float], config: Config, size: ModelSize) -> dict[str, float]:
    """What the first of the ranks needs for an update; `rows` are those of one trainer."""
    layer = size.num_quantized / size.num_layers
    others = size.num_parameters - size.num_quantized
    copies = rows["BF16 copies"]
    if config.model.gradient_checkpointing:
        copies /= size.num_layers
    # The head's gradient is a row of one trainer already.
    gradients = GRADIENT_BUFFERS * (layer + others) - size.num_head
    return {
        **rows,
        "gradients": rows["gradients"] / config.parallel.trainers,
        "BF16 copies": copies,
        "gathered weights": 4.0 * (WEIGHT_BUFFERS * layer + others),
        "gathered gradients": 4.0 * gradients,
    }


def follower_rows(rows: Mapping[str, float]) -> dict[str, float]:
    """The rows of any other rank, from those of the first."""
    kept = {name: number for name, number in rows.items() if name not in DRIVER}
    return {**kept, LOADING: rows[LOADING] - rows["driver's policy, FP32"]}
