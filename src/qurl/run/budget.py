"""The memory and tokens that a recipe needs, before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import torch

from qurl.config import Config
from qurl.config.rules import find_unsharded
from qurl.errors import first_line
from qurl.objectives import ADVANTAGES, Advantage
from qurl.ops.device import pick_device
from qurl.ops.ray import HERE
from qurl.quant import get_format
from qurl.run.cards import Card
from qurl.run.shape import Shape, measure_model
from qurl.run.shares import (
    CACHE,
    ENGINE,
    engine_weights,
    follower_rows,
    num_engines,
    place_of,
    share_held,
    share_update,
    transit_bytes,
)
from qurl.trainer.moments import BLOCK

GIB = 1024**3
CUDA_BYTES = GIB
"""CUDA's own memory and the workspaces of its libraries, about."""
BUSY_WORK = 2e13
"""Tokens times parameters of a micro-batch from which launches hardly count; on an H200 the GPU was
busy for 88 % of the time with 1.6e13 and for 98 % with 2.5e13 (docs/log.md)."""
SAFE_SHARE = 0.9
"""Share of a card's memory that a setting may need if we recommend it: runs with LoRA took 11 and
15 % more than estimated, for blocks that torch's allocator keeps, CUDA's context and graphs
(docs/log.md)."""
UPDATE = (
    *("gradients", "gathered weights", "gathered gradients", "BF16 copies", "merged weights"),
    "decoded weights",
    *("activations", "logits and head"),
)
"""Rows that a step needs while it updates. Policy and critic update in turn and share them."""


def describe_budget(config: Config, card: Card | None = None) -> str:
    """Token and memory budget as text, on this machine or on a card that is not here."""
    sequences = config.sequences_per_step
    device = torch.device("cuda") if card else pick_device(config.device)
    lines = [
        "",
        "tokens",
        f"  sequences per step      {sequences} ({config.batch.problems} problems"
        f" x {config.sampling.group_size})",
        f"  sampled per step        at most {sequences * config.sampling.max_tokens:,}",
        f"  updates per step        {config.updates_per_step}",
        f"  age of rollouts         {config.rollout.ahead} steps (rollout.ahead)",
        f"  updates in the run      {config.steps * config.updates_per_step:,}",
        f"memory (GiB) on {card.name if card else device}",
    ]
    try:
        shape = measure_model(config)
    except (OSError, ValueError) as error:
        if os.path.exists(config.model.path):
            raise
        return "\n".join([*lines, f"  unknown: {first_line(error)}"])
    room, of = (card.memory, card.name) if card else room_of(device)
    rows = memory_rows(config, shape, room, is_cuda=device.type == "cuda")
    lines += [f"  {name:<24}{number / GIB:10.3f}" for name, number in rows.items()]
    peak = peak_memory(config, rows)
    of = f" of {room / GIB:.1f} ({of})" if room else ""
    lines.append(f"  {'at the peak':<24}{peak / GIB:10.3f}{of}, estimated")
    lines += describe_ranks(config, rows)
    if room and peak > SAFE_SHARE * room:
        verdict = "too much" if peak > room else "tight, since runs take up to 15 % more"
        lines.append(f"  {verdict}: {' or '.join(find_savings(config))} saves memory")
    elif room and (tokens := larger_microbatch(config, shape, room)):
        lines.append(
            f"  batch.microbatch_tokens = {tokens} fits too; the GPU would wait less for its host"
        )
    if config.parallel.is_sharded:
        loaded = loaded_bytes(config, shape) / GIB
        lines.append(f"  {'in main memory':<24}{loaded:10.3f} for the driver to load models")
    lines += describe_engines(config, shape, room, is_cuda=device.type == "cuda")
    return "\n".join(lines)


def describe_ranks(config: Config, rows: Mapping[str, float]) -> list[str]:
    """What several trainers add to the text; `rows` are those of the first."""
    if config.parallel.trainers == 1:
        return []
    if place_of(config) == "driver":
        peak = peak_memory(config, follower_rows(config, rows))
        return [f"  of rank 0, which samples; {'each other rank':<22}{peak / GIB:10.3f}"]
    return [f"  of each of {config.parallel.trainers} ranks"]


def describe_engines(
    config: Config, shape: Shape, room: float | None, *, is_cuda: bool
) -> list[str]:
    """The rows of an engine that has a card of its own, as text."""
    if place_of(config) != "apart":
        return []
    rows = engine_rows(config, shape, room, is_cuda=is_cuda)
    of = f" of {room / GIB:.1f}" if room else ""
    too_much = ", too much" if room and sum(rows.values()) > room else ""
    return [
        f"memory (GiB) of each of {config.parallel.engines} engines",
        *(f"  {name:<24}{number / GIB:10.3f}" for name, number in rows.items()),
        f"  {'all of it':<24}{sum(rows.values()) / GIB:10.3f}{of}, estimated{too_much}",
    ]


def room_of(device: torch.device) -> tuple[float | None, str]:
    """Bytes and name of a GPU here; None for a CPU."""
    if device.type != "cuda":
        return None, ""
    found = torch.cuda.get_device_properties(device)
    return found.total_memory, found.name


def total_memory(device: torch.device) -> int:
    """Bytes of the card, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(config: Config, rows: Mapping[str, float]) -> float:
    """All rows; with rollout.release_kv the cache and what an update needs take turns."""
    update = sum(rows.get(name, 0.0) for name in UPDATE)
    spared = min(update, rows.get(CACHE, 0.0)) if config.rollout.release_kv else 0.0
    return sum(rows.values()) - spared


def machine_memory(config: Config, shape: Shape) -> float:
    """Bytes at the peak of what all processes share: a machine's memory, where they have no GPUs.

    Trainers and engines of a Ray cluster may be elsewhere, and do not count.
    """
    rows, parallel = memory_rows(config, shape, is_cuda=False), config.parallel
    total = peak_memory(config, rows) + 4.0 * shape.num_parameters * config.parallel.is_sharded
    if parallel.address not in HERE:
        return total
    if parallel.engines:
        total += parallel.engines * sum(engine_rows(config, shape, is_cuda=False).values())
    return total + (parallel.trainers - 1) * peak_memory(config, follower_rows(config, rows))


def loaded_bytes(config: Config, shape: Shape) -> float:
    """Main memory of the driver of shards: whole FP32 models, of which its policy stays."""
    return 4.0 * shape.num_parameters * (1 + (config.algo.kl_coef > 0) + has_critic(config))


def find_savings(config: Config) -> list[str]:
    """Settings that would lower the peak, the cheapest first."""
    has_lora, is_alone = config.model.lora_rank > 0, config.parallel.trainers == 1
    is_whole = not config.parallel.is_sharded
    can_shard = not find_unsharded(config)
    is_apart = place_of(config) == "apart"
    settings = {
        "rollout.release_kv = true": not config.rollout.release_kv and not is_apart,
        "model.keep_logits = false": config.model.keep_logits,
        "parallel.shard = true": not is_alone and is_whole and can_shard,
        "more GPUs (parallel.trainers)": not is_whole,
        "engines on other GPUs (parallel.engines)": not is_alone and not is_apart,
        'optim.moments = "8bit"': config.optim.moments != "8bit" and not has_lora,
        "model.gradient_checkpointing = true": not config.model.gradient_checkpointing,
        "a smaller batch.microbatch_tokens": longest_sequence(config)
        < config.batch.microbatch_tokens,
        'optim.masters = "bf16"': config.optim.masters != "bf16" and is_whole and not has_lora,
        "model.lora_rank": is_whole and not has_lora,
        'model.base = "nvfp4"': has_lora and not config.model.has_coded_base and is_alone,
    }
    return [name for name, helps in settings.items() if helps] or ["a smaller model"]


def memory_rows(
    config: Config, shape: Shape, card: float | None = None, *, is_cuda: bool | None = None
) -> dict[str, float]:
    """Bytes by use, of the first rank if several train.

    The cache shrinks to what a card of `card` bytes has when it is first made. Without `is_cuda`,
    on the device that the recipe names.
    """
    if is_cuda is None:
        is_cuda = pick_device(config.device).type == "cuda"
    wide = 2 if is_cuda else 4  # compute precision, and the engine's full precision
    held, moments = held_rows(config, shape, is_cuda), moment_bytes(config, shape)
    if config.parallel.is_sharded:
        held = share_held(held, config)
        moments /= config.parallel.trainers
    # The moments come with the first update. Only a cache that is given back makes room.
    used = sum(held.values()) + moments * config.rollout.release_kv
    cache = fit_cache(config, cache_bytes(config, shape, wide), used, card)
    rows = held | {"AdamW": moments, CACHE: cache} | update_rows(config, shape, wide)
    if config.parallel.is_sharded:
        rows = share_update(rows, config, shape)
    is_apart = place_of(config) == "apart"
    return {n: number for n, number in rows.items() if number and not (is_apart and n in ENGINE)}


def engine_rows(
    config: Config, shape: Shape, card: float | None = None, *, is_cuda: bool | None = None
) -> dict[str, float]:
    """Bytes by use of an engine that has a card of its own (`parallel.engines`)."""
    if is_cuda is None:
        is_cuda = pick_device(config.device).type == "cuda"
    weights = engine_weights(config, shape, is_cuda)
    rows = weights | {
        "weights in transit": transit_bytes(shape, max(weights.values())),
        "CUDA": float(CUDA_BYTES * is_cuda),
    }
    wanted = cache_bytes(config, shape, 2 if is_cuda else 4)
    rows[CACHE] = fit_cache(config, wanted, sum(rows.values()), card)
    return {name: number for name, number in rows.items() if number}


def fit_cache(config: Config, wanted: float, used: float, card: float | None) -> float:
    """The wanted size, but no more than a card has free when the cache is made."""
    if card is None or config.rollout.kv_tokens:
        return wanted
    return min(wanted, config.rollout.kv_memory_frac * max(card - used, 0.0))


def held_rows(config: Config, shape: Shape, is_cuda: bool) -> dict[str, float]:
    """Weights of one trainer and of its engine."""
    wide, parameters = 2 if is_cuda else 4, shape.num_parameters
    num_adapters = config.model.lora_rank * shape.num_in_rank
    base = get_format(config.model.base).weight_bytes if config.model.has_coded_base else wide
    is_full = not num_adapters
    narrow = num_narrow(config, shape)
    return {
        "policy, FP32": 4.0 * (parameters - narrow) * is_full,
        "policy, BF16 + rest": 4.0 * narrow,
        "policy, frozen": (wide * shape.num_others + base * shape.num_quantized) * (not is_full),
        "adapters, FP32": 4.0 * num_adapters,
        "reference": 4.0 * parameters * (config.algo.kl_coef > 0) * is_full,
        "critic": 4.0 * parameters * has_critic(config),
        **engine_weights(config, shape, is_cuda),
        "CUDA": float(CUDA_BYTES * is_cuda),
    }


def update_rows(config: Config, shape: Shape, wide: int) -> dict[str, float]:
    """What one trainer needs while it updates one of its networks."""
    num_quantized, is_full = shape.num_quantized, not config.model.lora_rank
    head = shape.num_head * is_full  # a frozen one has no copy, no gradient
    tokens = microbatch_tokens(config)
    chunk = min(config.model.logits_chunk, tokens)
    num_kept = tokens if config.model.keep_logits and not config.algo.entropy_coef else chunk
    has_coded_base = config.model.has_coded_base
    num_copied = num_quantized - num_narrow(config, shape) + head
    return {
        "gradients": 4.0 * num_trained(config, shape),
        "BF16 copies": 2.0 * num_copied * (wide == 2 and is_full),
        "merged weights": float(wide * num_quantized * (not is_full and not has_coded_base)),
        # Gate and up of a layer, and the two side by side.
        "decoded weights": 4.0 * wide * shape.hidden_size * shape.mlp_size * has_coded_base,
        "activations": activation_bytes(config, shape, wide),
        # The logits in FP32 and their gradients in compute precision; the gradient of the head.
        "logits and head": (4.0 * chunk + wide * num_kept) * shape.vocabulary + 4.0 * head,
    }


def moment_bytes(config: Config, shape: Shape) -> float:
    """The optimizers' moments, of policy and critic."""
    trained = num_trained(config, shape)
    moments = (4.0 if config.optim.moments == "fp16" else 8.0) * trained
    if config.optim.moments == "8bit":
        moments -= (8 - 2 - 4 / BLOCK) * (trained if config.model.lora_rank else shape.num_coded)
    return moments * (1 + has_critic(config))


def num_narrow(config: Config, shape: Shape) -> int:
    """Parameters whose masters are in BF16."""
    return shape.num_narrow if config.optim.masters == "bf16" else 0


def num_trained(config: Config, shape: Shape) -> int:
    return config.model.lora_rank * shape.num_in_rank or shape.num_parameters


def has_critic(config: Config) -> bool:
    return ADVANTAGES.get(config.algo.advantage, Advantage()).needs_critic


def cache_bytes(config: Config, shape: Shape, wide: int) -> float:
    """The cache of as many sequences as an engine decodes together in a round of sampling.

    Dynamic sampling asks for gen_multiple times the problems at once. Engines share them; each
    still decodes at most max_batch sequences together.
    """
    multiple = config.algo.gen_multiple if config.algo.dynamic_sampling else 1
    num_problems = -(-config.batch.problems * multiple // num_engines(config))
    num_sequences = min(config.rollout.max_batch, num_problems * config.sampling.group_size)
    tokens = config.rollout.kv_tokens or longest_sequence(config) * num_sequences
    itemsize = 1 if config.quant.kv == "fp8" else wide
    return float(itemsize * shape.kv_numbers_per_token * tokens)


def activation_bytes(config: Config, shape: Shape, wide: int) -> float:
    """What the backward pass of one micro-batch keeps, with fused layers.

    Per token and layer, in compute precision: the results of both norms (2 H), queries, keys,
    values and attention's result, gate, up, and as much again as one of those for what the backward
    pass computes meanwhile; in FP32: the residual stream before each norm (2 H) and a number per
    head. With checkpointing: the residual stream once per layer, and one layer with its gradients.

    Layers on shards are not fused: they keep 4 H and 2 MLP in compute precision and 2 H in FP32
    more, by count of what autograd saves.
    """
    tokens = microbatch_tokens(config)
    computed = 2 * (shape.hidden_size + shape.head_numbers + shape.kv_numbers) + 3 * shape.mlp_size
    layer = wide * computed + 4 * (2 * shape.hidden_size + shape.num_heads)
    if config.parallel.is_sharded:
        layer += wide * (4 * shape.hidden_size + 2 * shape.mlp_size) + 4 * 2 * shape.hidden_size
    if config.model.gradient_checkpointing:
        return float(tokens * (4 * shape.hidden_size * shape.num_layers + 2 * layer))
    return float(tokens * layer * shape.num_layers)


def microbatch_tokens(config: Config) -> int:
    """Most tokens of one forward and backward pass of a rank."""
    longest = longest_sequence(config)
    parts = config.batch.minibatches * config.parallel.trainers
    rows = -(-config.sequences_per_step // parts)
    return min(max(config.batch.microbatch_tokens, longest), rows * longest)


def larger_microbatch(config: Config, shape: Shape, room: float) -> int | None:
    """A larger batch.microbatch_tokens that fits the card and keeps its GPU busier, if any.

    It doubles up to a whole mini-batch. Small ones leave a small model's GPU waiting for launches.
    """
    fitting, tokens = None, microbatch_tokens(config)
    while tokens * shape.num_parameters < BUSY_WORK:
        batch = dataclasses.replace(config.batch, microbatch_tokens=2 * tokens)
        larger = dataclasses.replace(config, batch=batch)
        peak = peak_memory(larger, memory_rows(larger, shape, room, is_cuda=True))
        if microbatch_tokens(larger) <= tokens or peak > SAFE_SHARE * room:
            break
        fitting = tokens = microbatch_tokens(larger)
    return fitting


def longest_sequence(config: Config) -> int:
    return config.task.max_prompt_tokens + config.sampling.max_tokens
