"""NVFP4 products of 7B with codes in another order, so that a thread fetches 16 bytes at once.

    python -m benchmarks.nvfp4_order [--tokens 16 64]

A thread of a matrix unit multiplies the same pair of bytes of every group. As stored, these pairs
are 8 bytes apart, and a thread fetches each by itself. Here the codes of 8 groups are transposed:
the first pair of each group, then the second ones, and so on. Each plan is checked against the
product as it is, then both are timed, with the L2 emptied in between. Needs a GPU; a minute.
Writes benchmarks/results/nvfp4_order.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.scripts import RESULTS, write_result
from qurl.bench.shapes import SHAPES
from qurl.ops.device import pick_device
from qurl.quant.formats import Quantized, quantize
from qurl.quant.kernels.gemm import Plan
from qurl.quant.kernels.packed import multiply_packed
from qurl.quant.nvfp4 import GROUP
from qurl.run.machine import describe_machine

BLOCK = 8
"""Groups whose codes lie together."""
PAIRS = GROUP // 4
PLANS = [
    Plan(tokens, 64, depth, 0, 4, stages)
    for tokens, depth, stages in itertools.product((16, 64), (128, 256), (2, 3, 4))
]


def reorder(weight: Quantized) -> Quantized:
    """The same weights with the codes of BLOCK groups transposed."""
    pairs = weight.codes.view(torch.int16).unflatten(1, (-1, BLOCK, PAIRS))
    codes = pairs.transpose(2, 3).contiguous().flatten(1).view(torch.uint8)
    return dataclasses.replace(weight, codes=codes)


def time_product(x: Tensor, weight: Quantized, plan: Plan, block: int) -> tuple[Tensor, float]:
    """The product, and its microseconds."""
    y = torch.full((1, len(x), len(weight.codes)), torch.nan, device=x.device)

    def run() -> None:
        multiply_packed(x, weight, None, y, plan, is_gated=False, block=block)

    run()
    result = y.clone()
    return result, 1e3 * triton.testing.do_bench(run, return_mode="median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    device, rows = pick_device("cuda"), []
    for name, (N, K) in SHAPES["7B"].products.items():
        weight = quantize(torch.randn(N, K, device=device), "nvfp4")
        orders: dict[int, Any] = {1: weight, BLOCK: reorder(weight)}
        for tokens in args.tokens:
            x = torch.randn(tokens, K, device=device, dtype=torch.bfloat16)
            for plan in (p for p in PLANS if p.tokens <= tokens):
                found = {b: time_product(x, w, plan, b) for b, w in orders.items()}
                if not torch.equal(found[1][0], found[BLOCK][0]):
                    raise SystemExit(f"{name}, {tokens} tokens, {plan}: other numbers")
                us = {f"block {b}": round(us, 1) for b, (_, us) in found.items()}
                rows.append({"product": name, "tokens": tokens, **dataclasses.asdict(plan), **us})
                print(name, tokens, plan.tokens, plan.depth, plan.stages, us, flush=True)
    path = RESULTS / "nvfp4_order.json"
    write_result(path, machine=describe_machine(device), what=__doc__.splitlines()[0], rows=rows)


if __name__ == "__main__":
    main()
