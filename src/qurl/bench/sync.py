"""`qurl bench sync`: how long the engine takes to follow the trainer.

The trainer's master weights are BF16 or FP32. Loading them into the engine is limited by memory
bandwidth (`qurl.bench.limits.sync_bytes`); verifying the copy is timed separately.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qurl.bench.limits import Speed, Storage, find_speed, sync_bytes
from qurl.bench.record import Record, free_memory, paused_gc
from qurl.bench.shapes import SHAPES, Bench, build_model, split_list
from qurl.ops.device import pick_device
from qurl.quant.formats import FORMATS
from qurl.rollout import build_engine
from qurl.run.shape import Shape

MASTERS = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_UP = 2
"""The first sync of a model may record launches that later ones replay."""

HEAD = "model  quant      master    load ms  verify ms  GB moved     GB/s   limit ms  of limit"
ROW = (
    "{model:5}  {quant:9}  {master:6}  {load_ms:9.3f}  {verify_ms:9.3f}  {gigabytes:8.2f}  "
    "{gigabytes_per_s:7,.0f}  {limit_ms:9.3f}  {limit_share:8.1%}"
)


@dataclass(frozen=True)
class SyncBench(Bench):
    """Seconds from trained weights to an engine that samples from them."""

    quant: str = "int8"
    """Formats: none, int8, fp8, fp8-block, int6, int4, nvfp4; several with commas."""
    master: str = "bf16,fp32"
    """Precision of the trainer's weights: bf16, fp32; several with commas."""


@dataclass(frozen=True)
class SyncFigures:
    """The measurements of one configuration."""

    load_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    load_ms: float
    verify_ms: float
    gigabytes: float  # that must be read and written
    gigabytes_per_s: float
    limit_ms: float
    limit_share: float


def run_sync(bench: SyncBench) -> None:
    """Measure every configuration in turn; print a row for each and save it at once."""
    device = pick_device(bench.device)
    bench.check()
    cases = [
        {"model": model, "quant": quant, "master": master}
        for model in split_list("model", bench.model)
        for master in split_list("master", bench.master, MASTERS)
        for quant in split_list("quant", bench.quant, ("none", *FORMATS))
    ]
    record, speed = Record("sync", bench.out, device), find_speed(device)
    print(HEAD)
    for case in cases:
        shape, dtype = SHAPES[case["model"]], MASTERS[case["master"]]
        model = build_model(shape, device, dtype, seed=bench.seed)
        figures = measure_sync(model, shape, case["quant"], bench.repeats, speed)
        print(ROW.format(**case, **asdict(figures)), flush=True)
        record.add(
            f"{shape.name} {case['quant']} master={case['master']}",
            settings={**case, "repeats": bench.repeats, "seed": bench.seed},
            speed=asdict(speed),
            figures=asdict(figures),
        )
        del model
        free_memory()
    print(f"saved to {record.path}")


def measure_sync(model: Any, shape: Shape, quant: str, repeats: int, speed: Speed) -> SyncFigures:
    """Sync several times; the engine verifies each copy and raises if it is wrong."""
    master = next(model.parameters())
    engine = build_engine("local", model, quant=quant)
    with paused_gc():
        reports = [engine.sync(model, version=i) for i in range(WARM_UP + repeats)]
    load = tuple(r.seconds for r in reports[WARM_UP:])
    verify = tuple(r.verify_seconds for r in reports[WARM_UP:])
    median = statistics.median(load)
    num_bytes = sync_bytes(shape, Storage.of(quant, "none", master.device.type), master.itemsize)
    limit = num_bytes / speed.bandwidth
    return SyncFigures(
        load_seconds=load,
        verify_seconds=verify,
        load_ms=1e3 * median,
        verify_ms=1e3 * statistics.median(verify),
        gigabytes=num_bytes / 1e9,
        gigabytes_per_s=num_bytes / 1e9 / median,
        limit_ms=1e3 * limit,
        limit_share=limit / median,
    )
