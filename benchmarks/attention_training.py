"""How fast attention over packed sequences trains, by tiles, beside torch's and cuDNN's.

    python benchmarks/attention_training.py [OUT.json] [--head-dim 64]

Each of the three kernels runs with each of its candidates, on every shape. A candidate is first
compared with torch's FlashAttention 2, then timed: the median of single runs after a warm-up, with
the L2 emptied in between. Stars mark what `PLANS` of `qurl.ops.flash` has now. At the end stand the
candidates that are best over all shapes (geometric mean), which belong in `PLANS`, and a table of
forward and backward with them beside torch and, where all lengths are equal, cuDNN.

TFLOP/s count 4 D H T^2 / 2 per sequence forward and 2.5 times that backward. Needs a GPU; a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qurl.ops.attention import attend_torch
from qurl.ops.flash import (
    Inputs,
    Spans,
    Tiles,
    forward,
    key_gradients,
    plan_for,
    query_gradients,
)
from qurl.ops.target import Target

HEADS = {128: {"1.5B": (12, 2), "3B": (16, 2), "7B": (28, 4)}, 64: {"0.5B": (14, 2)}}
"""By head_dim and model: query heads, key heads."""
LENGTHS = {
    "13 x 1040": (1040,) * 13,
    "mixed": tuple(random.Random(0).randint(100, 2000) for _ in range(13)),
    "3 x 4112": (4112,) * 3,
    "1 x 16384": (16384,),
}
KERNELS = ("forward", "query_gradients", "key_gradients")
CANDIDATES: Mapping[str, Sequence[Tiles]] = {
    "forward": (
        Tiles(128, 64, warps=8, stages=3, copies=True),
        Tiles(128, 64, warps=8, stages=3),
        Tiles(128, 128, warps=8, stages=2, copies=True),
        Tiles(64, 64, warps=4, stages=2, copies=True),
        Tiles(64, 64, warps=4, stages=2),
    ),
    "query_gradients": (
        Tiles(128, 64, warps=8, stages=3, copies=True),
        Tiles(128, 64, warps=8, stages=2, copies=True),
        Tiles(128, 64, warps=8, stages=3),
        Tiles(64, 64, warps=4, stages=2, copies=True),
        Tiles(64, 64, warps=4, stages=2),
    ),
    "key_gradients": (
        Tiles(64, 128, warps=8, stages=3),
        Tiles(64, 128, warps=8, stages=2),
        Tiles(64, 64, warps=4, stages=2, copies=True),
        Tiles(64, 64, warps=4, stages=2),
    ),
}
"""The first of each should do."""
NUM_COMPILERS = 12
NUM_RUNS = 7
TOLERANCE = 0.02
"""Of the norm: both round p and ds to BF16, in different places."""


@dataclass(frozen=True)
class Data:
    """One layer's attention: queries, keys, values and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    lengths: Sequence[int]

    @staticmethod
    def of(heads: tuple[int, int], head_dim: int, lengths: Sequence[int]) -> Data:
        torch.manual_seed(0)
        num_heads, kv_heads = heads
        sizes = [num_heads, kv_heads, kv_heads]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        qkv = torch.randn(sum(lengths), sum(sizes), head_dim, **options)
        d_out = torch.randn(sum(lengths), num_heads, head_dim, **options)
        q, k, v = qkv.split(sizes, 1)
        return Data(q, k, v, d_out, lengths)

    @property
    def spans(self) -> Spans:
        bounds = torch.tensor([0, *self.lengths], device="cuda").cumsum(0, dtype=torch.int32)
        return Spans(bounds, max(self.lengths))

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def flops(self) -> float:
        """Of the forward."""
        _, num_heads, head_dim = self.q.shape
        return 2.0 * head_dim * num_heads * sum(length**2 for length in self.lengths)

    def torch_flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_torch(q, k, v, self.spans.bounds, max(self.lengths), None)

    def cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (len(self.lengths), -1)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def kernels(self) -> Mapping[str, Callable[[Tiles], Sequence[Tensor]]]:
        """By name, what runs a kernel and gives its results."""
        plan, inputs = plan_for(self.q), Inputs(self.q, self.k, self.v, self.spans, self.scale)
        out, lse = forward(inputs, plan.forward)
        before = (inputs, out, lse, self.d_out)
        _, delta = query_gradients(*before, plan.query_gradients)
        return {
            "forward": lambda tiles: forward(inputs, tiles)[:1],
            "query_gradients": lambda tiles: query_gradients(*before, tiles)[:1],
            "key_gradients": lambda tiles: key_gradients(inputs, lse, delta, self.d_out, tiles),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--head-dim", type=int, default=128, choices=HEADS)
    args = parser.parse_args()
    candidates = compile_all(args.head_dim)
    rows = [
        measure(f"{model} {name}", Data.of(heads, args.head_dim, lengths), candidates)
        for model, heads in HEADS[args.head_dim].items()
        for name, lengths in LENGTHS.items()
    ]
    best = sum_up(rows, candidates)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": Target.of(torch.device("cuda")).name,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "head_dim": args.head_dim,
        "best": {kernel: dataclasses.asdict(tiles) for kernel, tiles in best.items()},
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def compile_all(head_dim: int) -> dict[str, list[Tiles]]:
    """The candidates that compile and fit; fills Triton's cache on disk from many processes."""
    jobs = [(kernel, tiles, head_dim) for kernel in KERNELS for tiles in CANDIDATES[kernel]]
    with multiprocessing.get_context("spawn").Pool(NUM_COMPILERS) as pool:
        errors = pool.starmap(compile_one, jobs, chunksize=1)
    fitting: dict[str, list[Tiles]] = {kernel: [] for kernel in KERNELS}
    for (kernel, tiles, _), error in zip(jobs, errors, strict=True):
        if error is None:
            fitting[kernel].append(tiles)
        else:
            print(f"left out: {kernel} {label(tiles)}: {error}")
    return fitting


def compile_one(kernel: str, tiles: Tiles, head_dim: int) -> str | None:
    """The error, if any: one that does not fit must not stop the others."""
    try:
        Data.of((2, 1), head_dim, (256,)).kernels()[kernel](tiles)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def measure(name: str, data: Data, candidates: Mapping[str, Sequence[Tiles]]) -> dict:
    """Microseconds of each candidate, torch and cuDNN; prints a line per kernel."""
    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    libraries = {"torch": data.torch_flash}
    if len(set(data.lengths)) == 1:
        libraries["cudnn"] = data.cudnn
    row: dict = {"shape": name, "flops": data.flops, "us": {}}
    expected: Sequence[Tensor] = ()
    for library, function in libraries.items():
        try:
            out = function(*leaves)
        except RuntimeError as error:
            print(f"left out: {library}: {error}")
            continue
        differentiate = partial(torch.autograd.grad, out, leaves, data.d_out, retain_graph=True)
        if library == "torch":
            expected = (out.detach(), *differentiate())
        with torch.no_grad():
            forward_us = time_runs(partial(function, *leaves))
        row["us"][library] = {"forward": forward_us, "backward": time_runs(differentiate)}
    results = {"forward": expected[:1], "query_gradients": expected[1:2]}
    results["key_gradients"] = expected[2:]
    print(f"\n{name}")
    for kernel, run in data.kernels().items():
        times = {}
        for tiles in candidates[kernel]:
            check(f"{name} {kernel} {label(tiles)}", run(tiles), results[kernel])
            times[label(tiles)] = time_runs(partial(run, tiles))
        row["us"][kernel] = times
        now = label(getattr(plan_for(data.q), kernel))
        shown = (f"{us:6.0f} {text}{'*' * (text == now)}" for text, us in times.items())
        print(f"  {kernel:16}" + " |".join(shown))
    return row


def check(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < TOLERANCE, f"{what} is off by {error:.3f}"


def time_runs(function: Callable[[], Any]) -> float:
    """Microseconds, the median of runs with an empty L2."""
    function()
    # Writing it also takes longer than a launch, so that the GPU never waits for the host.
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(NUM_RUNS)]
    for start, end in events:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def sum_up(rows: Sequence[dict], candidates: Mapping[str, Sequence[Tiles]]) -> dict[str, Tiles]:
    """Print the table; the tiles that are best over all shapes."""

    def typical(kernel: str, tiles: Tiles) -> float:
        return statistics.geometric_mean(row["us"][kernel][label(tiles)] for row in rows)

    best = {kernel: min(candidates[kernel], key=partial(typical, kernel)) for kernel in KERNELS}
    print("\nbest over all shapes")
    for kernel, tiles in best.items():
        print(f"  {kernel:16} {tiles}")
    columns = [f"{who} {way}" for way in ("fwd", "bwd") for who in ("ours", "torch", "cuDNN")]
    print(f"\n{'us (TFLOP/s)':18}" + "".join(f"{column:>14}" for column in columns))
    for row in rows:
        us, flops = row["us"], row["flops"]
        ours = {kernel: us[kernel][label(tiles)] for kernel, tiles in best.items()}
        backward = ours["query_gradients"] + ours["key_gradients"]
        times = {"ours": {"forward": ours["forward"], "backward": backward}, **us}
        cells = [
            f"{t:.0f} ({work / t / 1e6:.0f})" if t else "-"
            for pass_, work in (("forward", flops), ("backward", 2.5 * flops))
            for t in (times.get(who, {}).get(pass_) for who in ("ours", "torch", "cudnn"))
        ]
        print(f"{row['shape']:18}" + "".join(f"{cell:>14}" for cell in cells))
    return best


def label(tiles: Tiles) -> str:
    name = f"{tiles.queries}x{tiles.keys} w{tiles.warps} s{tiles.stages}"
    return f"{name} copies" if tiles.copies else name


if __name__ == "__main__":
    main()
