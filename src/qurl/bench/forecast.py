"""Seconds of a step without running it: the terms of `qurl.bench.limits`, at rates measured once.

One decode step of B sequences at context c, with the letters of `limits`:

    t(B, c) = r0 (W / BW + C) + r1 B c kv / BW + L (r2 + r3 [8-bit]) + r4 A / BW [8-bit]
              + r5 B L n_kv [FP8 cache]

C is the time of the products at full speed, A the bytes of activations that are coded. r2 and r3
are launches of kernels, r5 is the decoding of keys. `python -m benchmarks.forecast` fits the six
rates to the rollouts of benchmarks/results (48 on an H200, 0.5B to 14B). Errors of a shape whose
own rollouts are left out of the fit:

    seconds            5 % (root mean square), 15 % at most
    gain over BF16     3 % (root mean square), 5 % in nine of ten, 9 % at most

A forward takes u0 (linears + head) / F + u1 attention / F + u2 A / BW, an update three times the
products, u3 A / BW, and AdamW's traffic. These are from one update of 1.5B in BF16 (its profile
gives u0, `attention_training.json` u1), the savings of FP8 from whole steps. Errors of others:

    updates            1.5B 3.5 % (FP8 in all products 7 %), 3B 2.5 %
    whole steps        0.5B to 3B 5 % at most; 7B 6 % too fast with micro-batches of 4160 tokens
    gains of steps     two pairs of 0.5B, six of 1.5B, one of 3B: 5.6 % at most

Small models with micro-batches of medium size are forecast too fast, because GPU and host wait for
each other in turns: updates of 0.5B by 26 % (16384 tokens) and 12 % (32768), forwards by 40 and 29.

LoRA has two measured steps, which set its rates: nothing checks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qurl.bench.arms import Arm
from qurl.bench.limits import Products, Speed, Storage, decode_parts
from qurl.run.shape import Shape

DECODE_RATES = (0.825, 0.923, 23.2e-6, 3.14e-6, 5.90, 25.6e-9)
"""r0 to r5."""
PRODUCTS, ATTENTION, FORWARD_TRAFFIC, UPDATE_TRAFFIC = 1.09, 2.15, 8.6, 30.0
"""u0 to u3."""
OPTIMIZER_BYTES = 36
"""Per parameter and update: AdamW reads four numbers and writes three; clipping reads, zeroing
writes one."""
REST_SECONDS = 0.25
"""Sync, grading and all else of a step."""
HOST_SECONDS = 2e-6
"""Per sampled token: texts and records, which rollout benchmarks do without. In whole steps,
rollouts took so much longer than forecast: 1.8 us (1.5B) and 2.0 us (0.5B, GRPO)."""
SAVED_FORWARD = {"fp8": 0.66, "int8": 0.53}
"""Share of a forward's ideal saving, half the time of its linears, that 8-bit linears reach."""
SAVED_UPDATE = {
    ("int8", 1): 0.16,
    ("int8", 2): 0.35,
    ("int8", 3): -0.16,
    ("fp8", 2): 0.70,
    ("fp8", 3): 0.70,
}
"""The same of an update, by format and by how many of its three products are in 8 bits. INT8 with
two is between three runs (0.25 to 0.49); coding a third costs more than it saves. FP8 is from whole
steps of 1.5B and 3B with two products (0.70, 0.73) and of 7B with three (0.58 to 0.88)."""
UNIFIED_ROLLOUT = {"fp8": 1.07}
"""How much longer decoding takes in a unified flow, whose FP8 products are not cut: 1.05 to 1.06 in
three steps of 1.5B and 3B, 1.12 in one of 7B, whose plans are not measured."""
UNFUSED_FORWARD, UNFUSED_UPDATE = 1.05, 1.07
"""How much longer training takes on shards, whose layers are not fused. From 1.5B on one H200
(benchmarks/results/update.json); shards themselves were never timed on GPUs."""
LORA_UPDATE = 0.83
"""Share of an update that remains with adapters, whose gradients are thin products. From a step of
7B with rank 32."""
LAUNCHES, LORA_LAUNCHES = (1.5e-3, 4.8e-3), (2.1e-3, 6.9e-3)
"""Seconds in which the host launches a layer's kernels for one micro-batch, of a forward and of an
update. From 0.5B with micro-batches of 8192 tokens, where the GPU was busy for a third of the time,
and from 1.5B with adapters and 4160 tokens, which took three times what its products need."""

ROLLOUT_ERROR = 0.055
"""|log(forecast / measured)| of a rollout's gain: nine of ten are below, with their shape left out
of the fit."""
STEP_ERROR = 0.06
"""The largest |log(forecast / measured)| of the gains of whole steps."""


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step."""

    sequences: float
    prompt_tokens: int
    new_tokens: int  # of a completion, on average
    together: float  # most sequences that are decoded at once
    longest: int = 0  # completion; 0 = all have new_tokens
    num_updates: int = 4
    num_passes: float = 1.0  # over the batch: epochs, for policy and critic each
    num_forwards: float = 0.75  # without gradients: prox, reference, values
    num_networks: int = 1  # that are trained
    has_checkpointing: bool = False
    has_lora: bool = False
    microbatch_tokens: int = 16384
    num_ranks: int = 1  # that share the weights; a rank updates its shard


@dataclass(frozen=True)
class StepSeconds:
    """Parts of a step."""

    rollout: float  # of the engine alone
    forwards: float
    update: float
    rest: float = REST_SECONDS

    @property
    def train(self) -> float:
        return self.forwards + self.update

    @property
    def total(self) -> float:
        return self.rollout + self.train + self.rest


def decode_terms(
    shape: Shape, arm: Arm, speed: Speed, sequences: float, context: float
) -> tuple[float, ...]:
    """What each of the decode rates multiplies, for one decode step."""
    storage = Storage.of(arm.format, arm.kv, "cuda")
    weights, compute, keys = decode_parts(shape, storage, speed, sequences, context)
    return (
        weights + compute,
        keys,
        shape.num_layers,
        shape.num_layers * storage.is_narrow,
        sequences * coded_bytes(shape) / speed.bandwidth * storage.is_narrow,
        sequences * shape.num_layers * shape.num_kv_heads * (arm.kv != "none"),
    )


def kv_bytes(shape: Shape, arm: Arm) -> int:
    """Bytes of keys and values per token, in the engine's cache."""
    return Storage.of(arm.format, arm.kv, "cuda").kv * shape.kv_numbers_per_token


def coded_bytes(shape: Shape) -> int:
    """Bytes per token of the inputs of all linear layers, in 16 bits."""
    return 2 * shape.num_layers * (2 * shape.hidden_size + shape.mlp_size + shape.head_numbers)


def rollout_seconds(
    shape: Shape, arm: Arm, speed: Speed, work: Work, rates: Sequence[float] = DECODE_RATES
) -> float:
    """All decode steps: as many as the longest completion has tokens, or more if not all
    sequences are decoded at once."""
    num_tokens = work.sequences * work.new_tokens
    num_steps = max(work.longest or work.new_tokens, num_tokens / work.together)
    context = work.prompt_tokens + (work.new_tokens - 1) / 2
    terms = decode_terms(shape, arm, speed, num_tokens / num_steps, context)
    return num_steps * sum(rate * term for rate, term in zip(rates, terms, strict=True))


def step_seconds(shape: Shape, arm: Arm, speed: Speed, work: Work) -> StepSeconds:
    """A whole step of one arm."""
    products = Products.of(shape, 1, work.prompt_tokens, work.new_tokens)
    linears = PRODUCTS * products.linears / speed.flops_wide
    others = PRODUCTS * products.head + ATTENTION * products.attention
    tokens = work.prompt_tokens + work.new_tokens
    traffic = tokens * coded_bytes(shape) / speed.bandwidth
    forward = linears + others / speed.flops_wide + FORWARD_TRAFFIC * traffic
    backward = 2 * linears + 2 * others / speed.flops_wide
    update = forward + backward + (UPDATE_TRAFFIC - FORWARD_TRAFFIC) * traffic
    update += forward * work.has_checkpointing
    if arm.is_unified:
        update -= SAVED_UPDATE[arm.format, arm.num_narrow] * arm.num_narrow * linears / 2
        forward -= SAVED_FORWARD[arm.format] * linears / 2
    if work.has_lora:
        update *= LORA_UPDATE
    launched = shape.num_layers / max(1, work.microbatch_tokens // tokens)  # per sequence
    launches = LORA_LAUNCHES if work.has_lora else LAUNCHES
    least_forward, least_update = (seconds * launched for seconds in launches)
    forward, update = max(forward, least_forward), max(update, least_update)
    if work.num_ranks > 1:
        forward, update = UNFUSED_FORWARD * forward, UNFUSED_UPDATE * update
    num_held = 0 if work.has_lora else shape.num_parameters / work.num_ranks
    optimizer = work.num_updates * num_held * OPTIMIZER_BYTES / speed.bandwidth
    slowdown = UNIFIED_ROLLOUT.get(arm.format, 1.0) if arm.is_unified else 1.0
    return StepSeconds(
        rollout=slowdown * rollout_seconds(shape, arm, speed, work),
        forwards=work.sequences * work.num_forwards * forward,
        update=work.num_networks * (work.sequences * work.num_passes * update + optimizer),
        rest=REST_SECONDS + HOST_SECONDS * work.sequences * work.new_tokens,
    )


def skips_prox(arm: Arm) -> bool:
    """Whether `correction.mode = "auto"` saves the prox forward: gaps of BF16 and of unified flows
    are far below its limit, those of quantized rollouts with BF16 training far above it."""
    return arm.is_unified or arm.format == arm.kv == "none"


def gain_range(
    base: StepSeconds, arm: StepSeconds, *, is_measured: bool = False
) -> tuple[float, float, float]:
    """How many times faster the arm's steps are: at least, by forecast, at most.

    The error of a rollout's gain counts as much as rollouts do in the step, unless they were
    measured.
    """
    gain = base.total / arm.total
    rollout_error = 0.0 if is_measured else ROLLOUT_ERROR * base.rollout / base.total
    error = math.hypot(rollout_error, STEP_ERROR)
    return gain * math.exp(-error), gain, gain * math.exp(error)
