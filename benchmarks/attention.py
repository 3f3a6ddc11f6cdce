"""How fast decode attention reads the KV cache, by tiling.

    python benchmarks/attention.py [OUT.json] [--page-size 64]

Every tiling is first checked against FP32 attention, then timed in a CUDA graph that goes round
layers of more than twice the L2. GB/s counts the keys and values alone; splitting and combining are
both in the time. A star marks the tiling that the engine would choose. Needs a GPU; a minute.

Shapes: B sequences of equal length, H heads, D head_dim.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch import Tensor

from qurl.ops.target import Target
from qurl.quant.formats import Quantized, dequantize, get_format
from qurl.rollout.local.kernels.attention import Tiling, attend_pages, choose_tiling, chunks_for

CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
HEADS = ((28, 4, 128), (12, 2, 128))
SIZES = ((256, 1024), (64, 1024), (64, 4608), (64, 8192))
TILINGS = (
    Tiling(),
    Tiling(chunk=256),
    Tiling(chunk=1024),
    Tiling(num_stages=2),
    Tiling(num_stages=4),
    Tiling(block=32, num_warps=2),
    Tiling(block=32, num_warps=2, num_stages=4),
    Tiling(chunk=256, block=32, num_warps=2, num_stages=4),
    Tiling(block=32, num_warps=1),
    Tiling(block=32, num_warps=1, num_stages=4),
    Tiling(block=64, num_warps=2),
    Tiling(block=128),
    Tiling(block=128, num_warps=8),
)
FORMAT = "int8"
NUM_COMPILERS = 12
NUM_CHECKED = 4
TOLERANCE = 0.02
"""BF16 weights, then INT8 codes of values up to about 1: some 0.004 each."""


@dataclass(frozen=True)
class Shape:
    """One layer's attention in a decode step."""

    cache: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    page_size: int

    @property
    def num_bytes(self) -> int:
        per_key = 2 * self.kv_heads * self.head_dim * CACHES[self.cache].itemsize
        return self.batch * self.context * per_key


@dataclass(frozen=True)
class Data:
    """Queries and several layers of cache, on pages in random order."""

    shape: Shape
    q: Tensor
    layers: Sequence[Tensor]
    table: Tensor
    positions: Tensor
    scale: Tensor | None

    @staticmethod
    def of(shape: Shape, num_layers: int) -> Data:
        torch.manual_seed(0)
        pages = -(-shape.context // shape.page_size)
        size = (shape.batch * pages, shape.page_size, shape.kv_heads, shape.head_dim)
        dtype = CACHES[shape.cache]
        return Data(
            shape,
            torch.randn(shape.batch, shape.heads, shape.head_dim, device="cuda").bfloat16(),
            [
                torch.stack([torch.randn(size, device="cuda").to(dtype) for _ in range(2)])
                for _ in range(num_layers)
            ],
            torch.randperm(size[0], device="cuda").int().reshape(shape.batch, pages),
            torch.full((shape.batch,), shape.context - 1, device="cuda"),
            torch.ones(2, shape.kv_heads, device="cuda") if shape.cache == "fp8" else None,
        )

    def attend(self, layer: int, tiling: Tiling) -> Quantized:
        operand = attend_pages(
            self.q,
            self.layers[layer],
            self.table,
            self.positions,
            None,
            self.scale,
            get_format(FORMAT),
            num_chunks=chunks_for(self.shape.context, tiling.chunk),
            tiling=tiling,
        )
        assert isinstance(operand, Quantized)
        return operand

    def reference(self) -> Tensor:
        """The first rows of the first layer, in FP32."""
        q = self.q[:NUM_CHECKED].float()
        group = self.shape.heads // self.shape.kv_heads
        k, v = (
            x[self.table[:NUM_CHECKED].long()]
            .flatten(1, 2)[:, : self.shape.context]
            .float()
            .repeat_interleave(group, 2)
            for x in self.layers[0]
        )
        scores = torch.einsum("bhd,bjhd->bhj", q, k) / math.sqrt(self.shape.head_dim)
        return torch.einsum("bhj,bjhd->bhd", scores.softmax(-1), v).flatten(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--page-size", type=int, default=64)
    args = parser.parse_args()
    target = Target.of(torch.device("cuda"))
    shapes = [
        Shape(cache, *heads, *size, args.page_size)
        for cache in CACHES
        for heads in HEADS
        for size in SIZES
    ]
    compile_all(shapes)
    rows = [row for shape in shapes for row in measure(shape)]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": target.name,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "pdl": target.has_pdl,
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def compile_all(shapes: Sequence[Shape]) -> None:
    """Fill Triton's cache on disk from many processes: one compiles for a second or two."""
    small = {dataclasses.replace(shape, batch=1, context=shape.page_size) for shape in shapes}
    jobs = [(shape, tiling) for shape in small for tiling in TILINGS]
    with multiprocessing.get_context("spawn").Pool(NUM_COMPILERS) as pool:
        pool.starmap(compile_one, jobs, chunksize=1)


def compile_one(shape: Shape, tiling: Tiling) -> None:
    Data.of(shape, 1).attend(0, tiling)
    torch.cuda.synchronize()


def measure(shape: Shape) -> list[dict]:
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    data = Data.of(shape, num_layers=2 + 2 * l2_bytes // shape.num_bytes)
    expected = data.reference()
    chosen = choose_tiling(shape.head_dim, CACHES[shape.cache])
    print(f"\n{shape}")
    rows = []
    for tiling in TILINGS:
        error = dequantize(data.attend(0, tiling))[:NUM_CHECKED] - expected
        assert error.abs().max() < TOLERANCE, f"{tiling} is off by {error.abs().max():.3f}"
        seconds = time_layers(data, tiling)
        rows.append(
            {"tiling": tiling, "us": 1e6 * seconds, "gb_s": shape.num_bytes / seconds / 1e9}
        )
    for row in sorted(rows, key=lambda row: row["us"]):
        star = "*" if row["tiling"] == chosen else " "
        print(f"{star} {row['us']:7.1f} us {row['gb_s']:6.0f} GB/s  {row['tiling']}")
    return [
        {**dataclasses.asdict(shape), **row, "tiling": dataclasses.asdict(row["tiling"])}
        for row in rows
    ]


def time_layers(data: Data, tiling: Tiling, *, repeats: int = 5) -> float:
    """Seconds of one layer, the median over repeats of a graph that goes through all."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(len(data.layers)):
            data.attend(layer, tiling)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / 4 / len(data.layers))
    return statistics.median(times)


if __name__ == "__main__":
    main()
