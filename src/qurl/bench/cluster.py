"""What networks add to a step: bytes and seconds of each exchange, as pure functions.

    n       processes of an exchange            P   parameters of the model
    B       bytes that all of them hold after   P_q parameters of its projections
    rate    bytes per second and process        hop seconds from one process to the next

Nothing here was measured between GPUs: rates are vendors' numbers times an assumed share.
`benchmarks.wire` counts the bytes between processes of one machine. All that is assumed is in
`ASSUMPTIONS`, which `qurl advise --gpus` prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from qurl.ops.shelf import TOKEN_BYTES
from qurl.quant.formats import get_format
from qurl.quant.shipment import CHUNK_BYTES
from qurl.run.cards import Card
from qurl.run.shape import Shape

NODE = 8
LINK_SHARE = 0.8
HOP_SECONDS = 10e-6
BUCKET_BYTES = float(CHUNK_BYTES)
GATHERS_PER_LAYER = 16
"""In a sync: codes and scales of seven projections, and two norms."""
GRADIENTS_PER_LAYER = 12
"""In replicas: those of seven projections, three biases and two norms."""
CONTROL_RATE = 1.25e9
VERIFY_SECONDS = 0.12
OUTLINE_BYTES, OUTLINE_SECONDS, ROW_BYTES = 170, 20e-6, 200
"""What a completion without its tokens costs: to the driver, and from there to a trainer."""
SHELF_PUT, SHELF_GET = 115e6, 180e6
"""Bytes per second of one trainer's shelf."""
TEXT_BYTES, PROMPT_BYTES = 4, 4
RECORD_BYTES, RECORD_SECONDS = 16, 0.1e-6
"""What a token costs that passes through the driver."""
MTBF_HOURS = 16_384 * 54 * 24 / 419
RESTART_SECONDS = 600.0

Source = Literal["measured", "vendor", "public", "assumed"]


ASSUMPTIONS: Sequence[tuple[Source, str]] = (
    ("measured", "one GPU: rates of an H200 (qurl.bench.forecast states their errors)"),
    ("measured", "layers that are not fused: forwards 1.05, updates 1.07 times as long"),
    ("measured", f"verifying a copy takes {VERIFY_SECONDS} s (7B on an H200)"),
    (
        "measured",
        f"the driver gets {OUTLINE_BYTES} bytes of each completion, in {OUTLINE_SECONDS * 1e6:.0f} "
        f"us, and sends {ROW_BYTES} to a trainer, whose shelf takes {SHELF_PUT / 1e6:.0f} MB/s of "
        f"tokens and gives {SHELF_GET / 1e6:.0f} MB/s (benchmarks/results/wire.json, a CPU)",
    ),
    ("vendor", "links and networks are those of data sheets (qurl.run.cards)"),
    ("public", f"one failure in {MTBF_HOURS:,.0f} GPU hours (Llama 3, 16,384 H100s)"),
    ("assumed", f"exchanges reach {LINK_SHARE:.0%} of links and networks"),
    ("assumed", f"nodes of {NODE} GPUs; {HOP_SECONDS * 1e6:.0f} us per hop of a ring"),
    ("assumed", "exchanges of FSDP2 hide behind products, or products behind them"),
    ("assumed", "replicas add up their gradients after all products of a mini-batch"),
    ("assumed", f"the driver receives and sends {CONTROL_RATE / 1e9} GB/s"),
    ("assumed", f"texts have {TEXT_BYTES} bytes a token"),
    ("assumed", f"a restart takes {RESTART_SECONDS:.0f} s"),
)
"""What forecasts for many GPUs rest on, and where it comes from."""


def collective_rate(card: Card, ranks: int) -> float:
    """Bytes per second that each rank of a ring receives.

    Within a node the link to a neighbour counts. Between nodes a ring per network card runs through
    each node, so that all cards of the node carry one GPU's traffic.
    """
    rate = card.link if ranks <= NODE else min(card.link, card.network)
    return LINK_SHARE * rate


def point_rate(card: Card, ranks: int) -> float:
    """Bytes per second from one GPU to others: one of the node's network cards carries them."""
    return LINK_SHARE * (card.link if ranks <= NODE else min(card.link, card.network / NODE))


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """What each rank receives in an all-gather or a reduce-scatter: B (n - 1) / n."""
    return num_bytes * (ranks - 1) / ranks


def ring_seconds(num_bytes: float, ranks: int, rate: float, num_calls: int) -> float:
    """One all-gather or reduce-scatter of B bytes, in `num_calls` parts (layers, buckets).

    t = B (n - 1) / n / rate + calls (n - 1) hop
    """
    return ring_bytes(num_bytes, ranks) / rate + num_calls * (ranks - 1) * HOP_SECONDS


def broadcast_seconds(num_bytes: float, receivers: int, rate: float) -> float:
    """NCCL's ring, in buckets that flow through it: t = B / rate + (B / bucket) receivers hop."""
    num_buckets = math.ceil(num_bytes / BUCKET_BYTES)
    return num_bytes / rate + num_buckets * receivers * HOP_SECONDS


def shipment_bytes(shape: Shape, format: str) -> float:
    """What engines elsewhere receive: codes with an FP32 scale per row, the embedding in FP32, all
    else in BF16.

    B = P_q + 4 rows + 2 (P - P_q) + 2 V H, or 2 P + 2 V H without a format. Rows are counted at H
    inputs each.
    """
    others = shape.num_others + shape.num_head
    return _coded_bytes(shape, format, wide=2) + 2 * others


def collected_bytes(shape: Shape, format: str) -> float:
    """What every rank holds after the ranks gathered for a sync: codes, and all else in FP32.

    B = P_q + 4 rows + 4 (P - P_q), or 4 P without a format or with one of tiles.
    """
    return _coded_bytes(shape, format, wide=4) + 4.0 * shape.num_others


def _coded_bytes(shape: Shape, format: str, wide: int) -> float:
    """Projections as codes and scales; `wide` bytes a parameter where they are not coded."""
    has_tiles = format != "none" and get_format(format).block is not None
    if format == "none" or (has_tiles and wide == 4):
        return float(wide * shape.num_quantized)
    return shape.num_quantized * (1 + 4 / shape.hidden_size)


def gathered_bytes(shape: Shape, *, is_unified: bool) -> float:
    """One gather of all weights by FSDP2: FP32, or codes for projections of one precision flow."""
    width = 1 if is_unified else 4
    return width * shape.num_quantized + 4.0 * shape.num_others


def exchange_seconds(
    shape: Shape, card: Card, ranks: int, gathers: float, reductions: float, *, is_unified: bool
) -> tuple[float, float]:
    """(seconds, bytes that a rank receives) of so many exchanges of FSDP2, layer by layer.

    A forward gathers once. An update gathers for forward and backward, and reduces FP32 gradients.
    """
    rate, num_calls = collective_rate(card, ranks), shape.num_layers + 1
    seconds = received = 0.0
    weights = gathered_bytes(shape, is_unified=is_unified)
    for count, num_bytes in ((gathers, weights), (reductions, 4.0 * shape.num_parameters)):
        seconds += count * ring_seconds(num_bytes, ranks, rate, num_calls)
        received += count * ring_bytes(num_bytes, ranks)
    return seconds, received


def addition_seconds(
    shape: Shape, card: Card, ranks: int, num_trained: float, num_updates: float
) -> tuple[float, float]:
    """(seconds, bytes that a rank receives) of adding up the FP32 gradients of replicas.

    An all-reduce is a reduce-scatter and an all-gather: 2 B (n - 1) / n. There is one for each of a
    layer's tensors.
    """
    gradients, num_calls = 4.0 * num_trained, GRADIENTS_PER_LAYER * shape.num_layers
    seconds = ring_seconds(gradients, ranks, collective_rate(card, ranks), num_calls)
    return 2 * num_updates * seconds, 2 * num_updates * ring_bytes(gradients, ranks)


def sync_seconds(
    shape: Shape, format: str, card: Card, trainers: int, engines: int, *, is_colocated: bool
) -> float:
    """From shards to engines that sample: gather codes on the trainers, broadcast, verify.

    Where every GPU trains and samples, the gather leaves the codes where they are needed.
    """
    collected, shipped = collected_bytes(shape, format), shipment_bytes(shape, format)
    num_calls = GATHERS_PER_LAYER * shape.num_layers
    gather = ring_seconds(collected, trainers, collective_rate(card, trainers), num_calls)
    if is_colocated:
        return gather + VERIFY_SECONDS
    rate = point_rate(card, trainers + engines)
    return gather + broadcast_seconds(shipped, engines, rate) + VERIFY_SECONDS


def driver_seconds(
    sequences: float, prompt_tokens: float, new_tokens: float, trainers: int, *, is_shelved: bool
) -> tuple[float, float, float]:
    """(seconds, bytes in, bytes out) of handing a step's completions to those that train on them.

    in       outlines and texts; without shelves all tokens
    out      rows with their prompts; without shelves all tokens, if there are other trainers
    shelves  13 bytes a token, on and off, of each trainer's share
    """
    num_tokens, text = sequences * new_tokens, TEXT_BYTES * sequences * new_tokens
    received = OUTLINE_BYTES * sequences + text
    sent = (ROW_BYTES + PROMPT_BYTES * prompt_tokens) * sequences * (trainers > 1)
    seconds = OUTLINE_SECONDS * sequences
    if is_shelved:
        seconds += TOKEN_BYTES * num_tokens / trainers * (1 / SHELF_PUT + 1 / SHELF_GET)
    else:
        received += RECORD_BYTES * num_tokens
        sent += RECORD_BYTES * num_tokens * (trainers > 1)
        seconds += RECORD_SECONDS * num_tokens
    return seconds + (received + sent) / CONTROL_RATE, received, sent


def lost_share(gpus: int, seconds_between_saves: float) -> float:
    """Share of the time that failures cost, if any GPU's failure stops the run.

    failures per second f = N / MTBF; each costs half the time between checkpoints and a restart
    """
    failures = gpus / (MTBF_HOURS * 3600)
    return min(1.0, failures * (seconds_between_saves / 2 + RESTART_SECONDS))
