"""Bytes and seconds between processes of one machine (gloo), against `qurl.bench.cluster`.

    python -m benchmarks.wire

    broadcast   weights as INT8 codes and as BF16, to one to four receivers
    FSDP2       what a rank receives for one micro-batch: two gathers and one reduction
    records     rollouts on their way to the driver, with their tokens and without, rows on their
                way to the trainers, and tokens on shelves

Bytes are those of any machine. Seconds are those of this one, whose processes share its cores: they
say how a broadcast grows with receivers, and nothing about the network of a cluster.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qurl.bench.cluster import ring_bytes
from qurl.bench.record import Record
from qurl.bench.shapes import SHAPES, build_model
from qurl.ops.shelf import TOKEN_BYTES, Shelf, Slip, shelve, slip_of
from qurl.trainer.batches import rows_of
from qurl.trainer.parallel.processes import Post, lead
from qurl.trainer.parallel.sharding import shard_model_
from qurl.types import Completion, Graded, Problem, Rollout

CPU = torch.device("cpu")
MEGABYTE = 1_000_000
PARAMETERS = (4 * MEGABYTE, 16 * MEGABYTE, 64 * MEGABYTE)
RECEIVERS = (1, 2, 3, 4)
REPEATS = 15
"""The fastest counts: others use the machine too."""
FORMATS = {"int8": torch.int8, "bf16": torch.bfloat16}


def broadcast(post: Post, num_parameters: int, format: str) -> list[float]:
    """Seconds until the last receiver has the weights, for each repetition."""
    weights = torch.zeros(num_parameters, dtype=FORMATS[format])
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(weights, src=0)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
    return seconds


def measure_broadcasts(record: Record) -> None:
    for receivers in RECEIVERS:
        with lead(receivers + 1, "cpu", threads=1) as workers:
            for num_parameters in PARAMETERS:
                for format, dtype in FORMATS.items():
                    seconds = workers.run(broadcast, num_parameters, format)
                    num_bytes, fastest = num_parameters * dtype.itemsize, min(seconds)
                    key = f"broadcast {num_parameters // MEGABYTE}M {format} to {receivers}"
                    print(f"{key:32}{num_bytes / 1e6:8.0f} MB {1e3 * fastest:9.1f} ms", flush=True)
                    figures = {"bytes": num_bytes, "seconds": seconds, "fastest_s": fastest}
                    record.add(key, figures={**figures, "receivers": receivers})


class Total(torch.nn.Module):
    """A loss of all logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits.sum()


def count_received(post: Post) -> tuple[dict[str, int], int]:
    """Bytes that this rank gets from others in the forward and backward of one micro-batch.

    The collectives are watched from outside; what their results hold beyond the rank's own share
    came over the wire.
    """
    model = build_model(SHAPES["tiny"], CPU).requires_grad_(True)
    num_parameters = sum(p.numel() for p in model.parameters())
    root = Total(model)
    shard_model_(root, dist.device_mesh.init_device_mesh("cpu", (post.ranks.size,)))
    ids = torch.zeros(1, 8, dtype=torch.long)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        root(ids).backward()
    received = {"gathers": 0, "reductions": 0}
    share = (post.ranks.size - 1) / post.ranks.size
    for event in profile.events():
        whole = max((_numel(s) for s in event.input_shapes if s), default=0)
        if event.name == "c10d::_allgather_base_":
            received["gathers"] += int(4 * whole * share)
        elif event.name == "c10d::_reduce_scatter_base_":
            received["reductions"] += int(4 * whole * share)
    return received, num_parameters


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel()) if all(isinstance(n, int) for n in shape) else 0


def measure_sharding(record: Record) -> None:
    with lead(2, "cpu", threads=1) as workers:
        received, num_parameters = workers.run(count_received)
    expected = ring_bytes(4.0 * num_parameters, 2)
    shares = {name: number / expected for name, number in received.items()}
    print(f"FSDP2, 2 ranks: {received} bytes; of 4 P (n - 1) / n each: {shares}", flush=True)
    record.add("fsdp2 tiny 2 ranks", figures={"parameters": num_parameters, "received": received})


NUM_TOKENS, PROMPT_TOKENS, GROUP_SIZE, NUM_PROBLEMS = 1000, 24, 8, 8
"""Of the rollouts that are sent."""


def make_rollouts() -> list[Rollout]:
    """Rollouts of random tokens, as engines sample them."""
    draw, rollouts = torch.Generator().manual_seed(0), []
    for number in range(NUM_PROBLEMS):
        ids = torch.randint(150_000, (GROUP_SIZE, NUM_TOKENS), generator=draw).tolist()
        logps = (-torch.rand(GROUP_SIZE, NUM_TOKENS, generator=draw)).tolist()
        completions = [
            Completion(tuple(t), tuple(p), "", "stop") for t, p in zip(ids, logps, strict=True)
        ]
        problem = Problem(f"problem-{number}", tuple(range(PROMPT_TOKENS)))
        rollouts.append(Rollout(problem, completions, version=0, temperature=1.0))
    return rollouts


def measure_records(record: Record) -> None:
    """What the driver gets and sends, and what shelves take, per completion and per token."""
    rollouts, shelf = make_rollouts(), Shelf(0)
    seconds: dict[str, list[float]] = {"put": [], "get": [], "outline": [], "whole": []}
    for _ in range(REPEATS):
        away = _timed(seconds["put"], _put, rollouts, shelf)
        sent = _timed(seconds["outline"], _copy, away)
        slips = [slip for r in sent for c in r.completions if (slip := slip_of(c))]
        _timed(seconds["get"], _get, slips)
        _timed(seconds["whole"], _copy, rollouts)
        shelf.drop([slip.key for slip in slips])
    details = [{"accuracy": 0.0}] * GROUP_SIZE
    rows = rows_of([Graded(rollout, [0.0] * GROUP_SIZE, details) for rollout in sent])
    num_rows = GROUP_SIZE * NUM_PROBLEMS
    num_bytes = num_rows * NUM_TOKENS * TOKEN_BYTES
    figures = {
        "outline_bytes_per_completion": len(pickle.dumps(sent)) / num_rows,
        "outline_us_per_completion": 1e6 * min(seconds["outline"]) / num_rows,
        "row_bytes_per_completion": len(pickle.dumps(rows)) / num_rows,
        "shelf_put_mb_per_s": num_bytes / min(seconds["put"]) / 1e6,
        "shelf_get_mb_per_s": num_bytes / min(seconds["get"]) / 1e6,
        "rollout_bytes_per_token": len(pickle.dumps(rollouts)) / num_rows / NUM_TOKENS,
        "rollout_us_per_token": 1e6 * min(seconds["whole"]) / num_rows / NUM_TOKENS,
    }
    for name, number in figures.items():
        print(f"{name:40}{number:8.3f}", flush=True)
    record.add("records", figures=figures)


def _timed(seconds: list[float], function: Callable[..., Any], *arguments: Any) -> Any:
    start = time.perf_counter()
    found = function(*arguments)
    seconds.append(time.perf_counter() - start)
    return found


def _put(rollouts: Sequence[Rollout], shelf: Shelf) -> list[Rollout]:
    return [shelve(rollout, [shelf.address]) for rollout in rollouts]


def _get(slips: Sequence[Slip]) -> list[Any]:
    return [slip.read() for slip in slips]


def _copy(rollouts: Sequence[Rollout]) -> Any:
    return pickle.loads(pickle.dumps(rollouts))


def main() -> None:
    record = Record("wire", Path(__file__).parent / "results" / "wire.json", CPU)
    measure_records(record)
    measure_sharding(record)
    measure_broadcasts(record)


if __name__ == "__main__":
    main()
