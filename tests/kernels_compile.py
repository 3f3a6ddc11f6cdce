"""Compiles the kernels for GPUs that are not here, exactly as their launchers launch them.

A launcher gets CPU tensors of real sizes. In place of the GPU's driver there is one that only says
which GPU it would be, and instead of being launched a kernel is compiled and disassembled.

    python tests/kernels_compile.py [NAME ...]       a line per kernel (without TRITON_INTERPRET)
    python tests/kernels_compile.py --json OUT       what the test reads

Shapes are those of Qwen2.5 7B where nothing else is said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qurl.quant import get_format
from qurl.quant.formats import Quantized
from qurl.quant.kernels import gemm, requantize
from qurl.quant.kernels.gemm import Plan
from qurl.quant.linear import Partial
from qurl.rollout.local.kernels import attention, rope, rows, sampling, step

AMPERE, HOPPER = 80, 90
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
NUM_WORKERS = 2


@dataclass(frozen=True)
class Launch:
    """One call of a launcher, and what its kernels must look like."""

    name: str
    call: Callable[[bool], Any]
    """Takes `pdl`."""
    kernels: Mapping[str, Mapping[int, str]]
    """Kernels that it launches, and by GPU a pattern that an instruction of each must match."""
    targets: Sequence[int] = field(default=(AMPERE, HOPPER))


@dataclass(frozen=True)
class Compiled:
    """A kernel as one GPU would run it."""

    launch: str
    kernel: str
    target: int
    instructions: Mapping[str, int]
    """How often each occurs."""
    num_warps: int
    shared_bytes: int


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Never read: not even filled, so that large ones cost nothing."""
    return torch.empty(*shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.float32)


def codes(num_rows: int, columns: int, format: str, *, is_weight: bool = False) -> Quantized:
    f = get_format(format)
    groups = 1 if f.block is None else -(-columns // f.block)
    scale_rows = -(-num_rows // f.block) if f.block and is_weight else num_rows
    return Quantized(numbers(num_rows, columns, dtype=f.dtype), floats(scale_rows, groups), f)


def product(num_rows: int, columns: int, parts: int, dtype: torch.dtype = torch.int32) -> Partial:
    return Partial(
        numbers(parts, num_rows, columns, dtype=dtype),
        floats(num_rows, 1),
        floats(columns, 1),
        numbers(columns),
        torch.bfloat16,
    )


def multiply(kind: str, tokens: int, channels: int, depth: int, plan: Plan) -> Callable:
    def call(pdl: bool) -> Any:
        if kind == "bf16":
            x, w = numbers(tokens, depth), numbers(channels, depth)
        else:
            x, w = codes(tokens, depth, kind), codes(channels, depth, kind, is_weight=True)
        return gemm.multiply(x, w, None, torch.bfloat16, plan, pdl=pdl)

    return call


def multiply_gated(tokens: int, channels: int, depth: int, plan: Plan) -> Callable:
    def call(pdl: bool) -> Any:
        x, w = codes(tokens, depth, "int8"), codes(channels, depth, "int8", is_weight=True)
        amax = floats(tokens)
        return gemm.multiply_gated(x, w, None, torch.bfloat16, plan, amax, pdl=pdl)

    return call


def add_norm(width: int, parts: int, format: str | None) -> Callable:
    def call(pdl: bool) -> Any:
        delta = product(64, width, parts) if parts else numbers(64, width)
        f = None if format is None else get_format(format)
        return rows.add_norm(
            floats(64, width), delta, floats(width), 1e-6, f, torch.bfloat16, pdl=pdl
        )

    return call


def swiglu(width: int, parts: int, format: str | None) -> Callable:
    def call(pdl: bool) -> Any:
        gate_up = product(64, 2 * width, parts) if parts else numbers(64, 2 * width)
        f = None if format is None else get_format(format)
        return rows.swiglu(gate_up, f, torch.bfloat16, pdl=pdl)

    return call


def rotate(kv_dtype: torch.dtype) -> Callable:
    def call(pdl: bool) -> Any:
        heads, kv_heads, head_dim = 28, 4, 128
        has_scale = kv_dtype == torch.float8_e4m3fn
        index = numbers(64, dtype=torch.int64)
        return rope.rotate_and_store(
            product(64, (heads + 2 * kv_heads) * head_dim, 2),
            positions=index,
            slots=index,
            cos=floats(2048, head_dim // 2),
            sin=floats(2048, head_dim // 2),
            q_norm=None,
            k_norm=None,
            eps=1e-6,
            kv=numbers(2, 8, 16, kv_heads, head_dim, dtype=kv_dtype),
            kv_scale=floats(2, kv_heads) if has_scale else None,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            keep_kv=False,
            pdl=pdl,
        )

    return call


def attend(kv_dtype: torch.dtype, page_size: int, format: str | None) -> Callable:
    def call(pdl: bool) -> Any:
        heads, kv_heads, head_dim = 28, 4, 128
        has_scale = kv_dtype == torch.float8_e4m3fn
        return attention.attend_pages(
            numbers(64, heads, head_dim),
            numbers(2, 8, page_size, kv_heads, head_dim, dtype=kv_dtype),
            numbers(64, 2048 // page_size, dtype=torch.int32),
            numbers(64, dtype=torch.int64),
            None,
            floats(2, kv_heads) if has_scale else None,
            None if format is None else get_format(format),
            num_chunks=attention.chunks_for(2048),
            pdl=pdl,
        )

    return call


def sample(pdl: bool) -> Any:
    index = numbers(64, dtype=torch.int64)
    entropy = floats(64)
    logits = floats(64, 152064)
    return sampling.sample_rows(logits, floats(1), index, index, pdl=pdl, out_entropy=entropy)


def begin_step(pdl: bool) -> Any:
    index = numbers(64, dtype=torch.int64)
    table = numbers(64, 32, dtype=torch.int32)
    return step.begin_step(numbers(152064, 3584), index, index, table, 64, pdl=pdl)


def requantize_from(dtype: torch.dtype, columns: int, format: str) -> Callable:
    def call(pdl: bool) -> Any:
        source = numbers(256, columns, dtype=dtype)
        target = codes(256, columns, format, is_weight=True)
        flips = numbers(*target.scale.shape, dtype=torch.int32)
        return requantize.requantize_(source, target, flips, pdl=pdl)

    return call


def quantize_input(pdl: bool) -> Any:
    return rows.quantize_rows(numbers(64, 3584), get_format("int8"), pdl=pdl)


FP8 = torch.float8_e4m3fn
DECODE = Plan(tokens=64, channels=128, depth=128, splits=4)
INT8_MATRIX = {HOPPER: r"IGMMA", AMPERE: r"IMMA"}
FP8_MATRIX = {HOPPER: r"QGMMA"}
BF16_MATRIX = {HOPPER: r"HGMMA", AMPERE: r"HMMA"}
SMALL_MATRIX = {HOPPER: r"HMMA", AMPERE: r"HMMA"}
WIDE_LOADS = {HOPPER: r"LDG\.\S*(128|64)", AMPERE: r"LDG\.\S*(128|64)"}
ANY: Mapping[int, str] = {}

LAUNCHES = (
    Launch(
        "int8 product of 16 tokens, in parts",
        multiply("int8", 16, 3584, 3584, dataclasses.replace(DECODE, tokens=16)),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "int8 product of 64 tokens, in parts",
        multiply("int8", 64, 3584, 18944, dataclasses.replace(DECODE, prefetch=2)),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "int8 product of 256 tokens, finished",
        multiply("int8", 256, 4608, 3584, Plan(128, 128, 128, warps=8, stages=3)),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "fp8 product of 64 tokens, in parts",
        multiply("fp8", 64, 3584, 18944, DECODE),
        {"gemm_kernel": FP8_MATRIX},
        targets=(HOPPER,),
    ),
    Launch(
        "fp8 product of 64 tokens, in blocks",
        multiply("fp8-block", 64, 3584, 18944, DECODE),
        {"gemm_kernel": FP8_MATRIX},
        targets=(HOPPER,),
    ),
    Launch(
        "bf16 product of 64 tokens, finished",
        multiply("bf16", 64, 4608, 3584, Plan(64, 64, 64)),
        {"gemm_kernel": BF16_MATRIX},
    ),
    Launch(
        "int8 gated product of 64 tokens",
        multiply_gated(64, 37888, 3584, Plan(64, 128, 128)),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch("embedding", begin_step, {"begin_kernel": WIDE_LOADS}),
    Launch("norm to int8", add_norm(3584, 4, "int8"), {"add_norm_kernel": WIDE_LOADS}),
    Launch("norm of 8192 to bf16", add_norm(8192, 16, None), {"add_norm_kernel": WIDE_LOADS}),
    Launch(
        "norm to fp8 in blocks",
        add_norm(3584, 0, "fp8-block"),
        {"add_norm_kernel": WIDE_LOADS},
        targets=(HOPPER,),
    ),
    Launch("swiglu to int8", swiglu(18944, 2, "int8"), {"map_row_kernel": WIDE_LOADS}),
    Launch(
        "swiglu of 40960 to int8", swiglu(40960, 2, "int8"), {"map_long_row_kernel": WIDE_LOADS}
    ),
    Launch("swiglu to bf16", swiglu(18944, 0, None), {"map_tile_kernel": WIDE_LOADS}),
    Launch("input to int8", quantize_input, {"map_row_kernel": WIDE_LOADS}),
    Launch("rope to a bf16 cache", rotate(torch.bfloat16), {"rotate_kernel": ANY}),
    Launch("rope to an fp8 cache", rotate(FP8), {"rotate_kernel": ANY}, targets=(HOPPER,)),
    Launch(
        "attention over a bf16 cache",
        attend(torch.bfloat16, 64, "int8"),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
    ),
    Launch(
        "attention over an fp8 cache",
        attend(FP8, 16, "fp8"),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
        targets=(HOPPER,),
    ),
    Launch("sampling", sample, {"summarise_kernel": WIDE_LOADS, "sample_kernel": ANY}),
    Launch(
        "fp32 weight to int8",
        requantize_from(torch.float32, 18944, "int8"),
        {"requantize_rows_kernel": WIDE_LOADS},
    ),
    Launch(
        "bf16 weight to fp8",
        requantize_from(torch.bfloat16, 3584, "fp8"),
        {"requantize_rows_kernel": WIDE_LOADS},
        targets=(HOPPER,),
    ),
    Launch(
        "long fp32 weight to int8",
        requantize_from(torch.float32, 40960, "int8"),
        {"requantize_long_rows_kernel": WIDE_LOADS},
    ),
    Launch(
        "fp32 weight to fp8 in blocks",
        requantize_from(torch.float32, 3584, "fp8-block"),
        {"requantize_tiles_kernel": WIDE_LOADS},
        targets=(HOPPER,),
    ),
)


class AbsentGPU:
    """A driver that knows which GPU it stands for, and can launch nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # JITFunction keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(target: int) -> Iterator[list[tuple[str, Any]]]:
    """Kernels that are launched meanwhile are compiled instead, and listed."""
    compiled: list[tuple[str, Any]] = []
    run, can_describe = JITFunction.run, gemm._can_describe

    def compile_only(self, *args, warmup, **kwargs):
        kernel = run(self, *args, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    # Launchers ask the device of their tensors what it can do, and a CPU stands for the newest.
    gemm._can_describe = lambda matrix: target >= HOPPER and can_describe(matrix)
    JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentGPU(target))
    try:
        yield compiled
    finally:
        JITFunction.run, gemm._can_describe = run, can_describe


def compile_launch(job: tuple[int, int]) -> list[dict[str, Any]]:
    """Everything that one launch compiles for one GPU, or the error."""
    launch, target = LAUNCHES[job[0]], job[1]
    try:
        with compiling(target) as compiled:
            launch.call(target >= HOPPER)
        return [dataclasses.asdict(inspect(launch, target, *item)) for item in compiled]
    except Exception:
        return [{"launch": launch.name, "target": target, "error": traceback.format_exc()}]


def inspect(launch: Launch, target: int, name: str, kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    instructions = Counter(INSTRUCTION.findall(listing))
    assert instructions["EXIT"], "the disassembler's output is not understood"
    metadata = kernel.metadata
    counts = dict(instructions)
    return Compiled(launch.name, name, target, counts, metadata.num_warps, metadata.shared)


def compile_all(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    chosen = [i for i, launch in enumerate(LAUNCHES) if not names or launch.name in names]
    jobs = [(i, target) for i in chosen for target in LAUNCHES[i].targets]
    # Forked, so that torch and Triton are imported once; nothing here has touched a GPU or threads.
    with multiprocessing.get_context("fork").Pool(NUM_WORKERS) as pool:
        return [entry for entries in pool.imap(compile_launch, jobs) for entry in entries]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    entries = compile_all(options.names)
    if options.json:
        options.json.write_text(json.dumps(entries))
        return
    for entry in entries:
        if "error" in entry:
            print(f"sm_{entry['target']} {entry['launch']}: {entry['error']}", file=sys.stderr)
            continue
        kept = ("GMMA", "MMA", "LDL", "STL", "LDG", "LDGSTS", "UTMALDG")
        counts = {k: n for k, n in entry["instructions"].items() if any(x in k for x in kept)}
        print(
            f"sm_{entry['target']} {entry['launch']}: {entry['kernel']}, "
            f"{entry['num_warps']} warps, {entry['shared_bytes']} B shared, {counts}"
        )


if __name__ == "__main__":
    main()
