"""What the hardware allows: no engine generates faster than it reads weights and keys, no trainer
trains faster than it multiplies.

One decode step of B sequences at context c takes at least

    t(B, c) = max(W / BW, 2 B P_body / F_body + 2 B P_head / F_head) + B c kv / BW
    W       = P_body b_w + P_head b_h        bytes of weights
    kv      = 2 L n_kv d b_kv                bytes of keys and values per token

A rollout takes at least the sum of t over its contexts. The limit ignores prefill, so a share of it
counts prefill as a loss. It lets every sequence read all of its keys; an engine that reads a shared
prompt once per group may beat it. A sync reads every master weight and writes every weight of the
engine's copy once.

One forward over B sequences of T tokens, C of them completions, has the products

    linears    2 B T P_body
    attention  2 B L n d T (T + 1)           q k and p v, 2 n d each, of T (T + 1) / 2 causal pairs
    head       2 B C P_head                  prompts are not scored

and the backward has each of them twice, for the gradients of both factors. An update takes at least
their time at F_narrow for the passes of the linears in 8 bits, at F_wide for all else. This limit
ignores the optimizer and counts nothing that is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from qurl.bench.workload import Workload
from qurl.ops.device import default_dtype
from qurl.quant.formats import get_format
from qurl.run.cards import CARDS, Card
from qurl.run.shape import Shape


@dataclass(frozen=True)
class Speed:
    """What a device reaches in practice."""

    bandwidth: float  # BW, bytes per second
    flops_wide: float  # F of 16-bit numbers; on a CPU of FP32
    flops_narrow: float  # F of 8-bit codes


SPEEDS: Mapping[str, Speed] = {
    # Copies reach 4.3 TB/s (reads up to 4.6), cuBLAS 790 TFLOP/s; we assume twice that for 8 bits.
    "NVIDIA H200": Speed(bandwidth=4.3e12, flops_wide=790e12, flops_narrow=1580e12),
}
"""By the name that torch gives the device."""


def speed_of(card: Card) -> Speed:
    """From the data sheet, with the shares of it that were measured on an H200."""
    known, sheet = SPEEDS["NVIDIA H200"], CARDS["H200"]
    return Speed(
        bandwidth=card.bandwidth * known.bandwidth / sheet.bandwidth,
        flops_wide=card.flops_wide * known.flops_wide / sheet.flops_wide,
        flops_narrow=card.flops_narrow * known.flops_narrow / sheet.flops_narrow,
    )


@dataclass(frozen=True)
class Storage:
    """Bytes per number, and which numbers the projections multiply."""

    body: float
    head: int
    kv: int
    is_narrow: bool  # whether the projections multiply 8-bit codes in 8-bit units

    @staticmethod
    def of(quant: str, kv: str, device_type: str) -> Storage:
        """The engine's storage; on a CPU everything is FP32, even codes."""
        wide = 4 if device_type == "cpu" else 2
        format = None if quant == "none" or device_type == "cpu" else get_format(quant)
        body = wide if format is None else format.weight_bytes
        is_narrow = format is not None and not format.is_weight_only
        return Storage(body, wide, wide if kv == "none" else 1, is_narrow)


def find_speed(device: torch.device) -> Speed:
    """From the table if it has the device, else measured by a copy and a matrix product."""
    is_cuda = device.type == "cuda"
    if is_cuda and (known := SPEEDS.get(torch.cuda.get_device_name(device))):
        return known
    size = 2**30 if is_cuda else 2**26  # far larger than any cache
    source = torch.ones(size, dtype=torch.uint8, device=device)
    bandwidth = 2 * size / _seconds("b.copy_(a)", source)
    side = 8192 if is_cuda else 512
    matrix = torch.randn(side, side, dtype=default_dtype(device), device=device)
    flops = 2 * side**3 / _seconds("torch.mm(a, a, out=b)", matrix)
    return Speed(bandwidth, flops, 2 * flops if is_cuda else flops)


def _seconds(statement: str, a: torch.Tensor) -> float:
    names = {"a": a, "b": torch.empty_like(a), "torch": torch}
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return timer.blocked_autorange().median


def decode_parts(
    shape: Shape, storage: Storage, speed: Speed, batch: float, context: float
) -> tuple[float, float, float]:
    """Seconds of a decode step to read the weights, to multiply, and to read the keys."""
    weights = shape.num_quantized * storage.body + shape.num_head * storage.head
    flops_body = speed.flops_narrow if storage.is_narrow else speed.flops_wide
    compute = 2 * batch * (shape.num_quantized / flops_body + shape.num_head / speed.flops_wide)
    keys = batch * context * shape.kv_numbers_per_token * storage.kv
    return weights / speed.bandwidth, compute, keys / speed.bandwidth


def step_limit(shape: Shape, storage: Storage, speed: Speed, batch: int, context: float) -> float:
    """t(B, c) in seconds."""
    weights, compute, keys = decode_parts(shape, storage, speed, batch, context)
    return max(weights, compute) + keys


def rollout_limit(shape: Shape, storage: Storage, speed: Speed, workload: Workload) -> float:
    """Seconds of all decode steps; step i attends to the prompt and i new tokens."""
    # t is linear in the context, so the mean context gives the mean step.
    mean_context = workload.prompt_tokens + (workload.new_tokens - 1) / 2
    step = step_limit(shape, storage, speed, workload.num_sequences, mean_context)
    return workload.new_tokens * step


@dataclass(frozen=True)
class Products:
    """FLOPs of one forward; a backward has twice as many."""

    linears: int
    attention: int
    head: int

    @staticmethod
    def of(shape: Shape, num_sequences: int, prompt_tokens: int, new_tokens: int) -> Products:
        length = prompt_tokens + new_tokens
        width = shape.num_layers * shape.head_numbers
        return Products(
            linears=2 * num_sequences * length * shape.num_quantized,
            attention=2 * num_sequences * width * length * (length + 1),
            head=2 * num_sequences * new_tokens * shape.num_head,
        )

    @property
    def flops_of_update(self) -> int:
        return 3 * (self.linears + self.attention + self.head)

    def update_limit(self, speed: Speed, num_narrow: int) -> float:
        """Seconds of forward and backward with `num_narrow` of the linears' passes in 8 bits."""
        passes = num_narrow / speed.flops_narrow + (3 - num_narrow) / speed.flops_wide
        return self.linears * passes + 3 * (self.attention + self.head) / speed.flops_wide


def sync_bytes(shape: Shape, storage: Storage, master_bytes: int) -> int:
    """Bytes that a sync must read and write; weights of equal precision are shared, not copied."""
    body = int(shape.num_quantized * (master_bytes + storage.body))
    if master_bytes == storage.head:
        return body
    return body + shape.num_others * (master_bytes + storage.head)
