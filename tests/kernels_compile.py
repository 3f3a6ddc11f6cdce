"""Compiles the kernels for absent GPUs, exactly as their launchers launch them.

A launcher gets CPU tensors of real sizes. A stand-in for the GPU's driver only names the GPU, and
kernels are compiled and disassembled instead of launched.

    python tests/kernels_compile.py [NAME ...]       a line per kernel (without TRITON_INTERPRET)
    python tests/kernels_compile.py --json OUT       what the test reads
    python tests/kernels_compile.py --all --json OUT     also what `is_repeated` leaves out

Shapes are those of Qwen2.5 7B unless stated otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qurl.ops import coding, flash, gate, rms_norm, rotation
from qurl.ops.target import Target
from qurl.quant import get_format
from qurl.quant.formats import Quantized
from qurl.quant.kernels import gemm, requantize, rows
from qurl.quant.kernels import packed as packed_codes
from qurl.quant.kernels.gemm import Plan
from qurl.quant.kernels.plans import Plans
from qurl.quant.linear import Operand, Partial
from qurl.rollout.local.kernels import attention, flash_pages, rope, sampling, step
from qurl.rollout.local.ops import LayerCache
from qurl.trainer.kernels import adamw8bit, token_scores
from qurl.trainer.moments import Update, make_moments

AMPERE, ADA, HOPPER = 86, 89, 90
TARGETS = {
    AMPERE: Target("NVIDIA GeForce RTX 3090", (8, 6), 82),
    ADA: Target("NVIDIA GeForce RTX 4090", (8, 9), 128),
    HOPPER: Target("NVIDIA H200", (9, 0), 132),
}
HAVE_FP8 = (ADA, HOPPER)
"""GPUs with FP8. The engine, Triton and ptxas refuse it for others."""
VARIANT = (HOPPER,)
"""For a further path through a kernel that another launch compiles for every GPU."""
MAX_SPILLS = {
    (gpu, kernel): most
    for gpu in (AMPERE, ADA)
    for kernel, most in (("add_norm_kernel", 1), ("requantize_rows_kernel", 2))
}
MAX_SPILLS[HOPPER, "flash_key_gradients_kernel"] = 60
MAX_SPILLS[HOPPER, "add_norm_kernel"] = 12  # rows of 8192 only
"""Accesses to local memory that are allowed.

ptxas lacks a register in the longest rows. In the gradient of keys the accesses are around its main
loop, which needs every register.
"""
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
MACHINES = {AMPERE: "SM86", ADA: "SM89", HOPPER: "SM90a"}
"""What the disassembler calls them."""
INSTRUCTION_BYTES = 16
OF_LARGE_TENSORS = re.compile(
    r"requantize_|norm_|gate_|rotate_pairs_|code_|column_|transpose_|dequantize_|decode_|adamw_|flash_"
)
"""Kernels of a sync and of training: they run too long for their launch to matter."""
INSTRUCTION = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
"""Address, name and operands."""
WAIT = "ACQBULK"
"""From here on a kernel may rely on what the kernel before it wrote (`griddepcontrol.wait`)."""
# A prefetch (CCTL) is no load: it changes nothing but the cache.
EARLY = re.compile(r"(LDG|LD|ST|STG|UTMA\w*|UBLKCP|ATOM|ATOMG|RED|REDG|BRA|CALL|RET)(\.|$)")
"""Instructions forbidden before the wait, except loads of data that only a sync writes."""
PRODUCT_FACTOR = re.compile(r"\s*R\d+, R(\d+), gdesc")
"""Operands of a product with a factor in registers, so many of them:"""
FACTOR_REGISTERS = 4
GROUP_END = "gsb0"
WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}
"""Registers that instructions write, by a part of their name; else one."""
NUM_WORKERS = 2


@dataclass(frozen=True)
class Look:
    """What a kernel must look like."""

    has: Mapping[int, str]
    """By GPU, a pattern that the name of an instruction must match."""
    num_early: int = 0
    """Loads before the wait."""

    def with_early(self, num_early: int) -> Look:
        return dataclasses.replace(self, num_early=num_early)


@dataclass(frozen=True)
class Launch:
    """One call of a launcher, and what its kernels must look like."""

    name: str
    call: Callable[[], Any]
    kernels: Mapping[str, Look]
    """Those that it launches."""
    targets: Sequence[int] = tuple(TARGETS)

    def __post_init__(self) -> None:
        for name, look in self.kernels.items():
            assert look.has.keys() >= set(self.targets), f"nothing is asked of {name}"


@dataclass(frozen=True)
class Binary:
    """A kernel as ptxas left it."""

    launch: str
    kernel: str
    target: int
    code: bytes
    num_warps: int
    shared_bytes: int
    overlaps: bool
    """Whether it may start before the kernel before it has ended."""
    early_arguments: Sequence[str]
    """What it reads before the wait."""


@dataclass(frozen=True)
class Failure:
    """A launch that does not compile."""

    launch: str
    target: int
    error: str


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Never read and never filled, so large ones cost nothing."""
    return torch.empty(*shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.float32)


def codes(num_rows: int, columns: int, format: str, *, is_weight: bool = False) -> Quantized:
    f = get_format(format)
    if f.is_weight_only:
        bytes = numbers(num_rows, columns // 2, dtype=torch.uint8)
        scale = numbers(num_rows, columns // 16)
        return Quantized(bytes, scale, f, floats(num_rows, 1))
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


def matrices(kind: str, tokens: int, channels: int, depth: int) -> tuple[Operand, Operand]:
    if kind == "bf16":
        return numbers(tokens, depth), numbers(channels, depth)
    if kind == "nvfp4":
        return numbers(tokens, depth), codes(channels, depth, kind)
    return codes(tokens, depth, kind), codes(channels, depth, kind, is_weight=True)


def planned(kind: str, tokens: int, channels: int, depth: int) -> Plan:
    """The engine's plan; where it would use cuBLAS, the plan of deterministic mode."""
    target = Target.of(torch.device("cpu"))
    modes = (Plans(target, deterministic=is_fixed) for is_fixed in (False, True))
    return next(plan for m in modes if (plan := m.choose(kind, tokens, channels, depth)))


def multiply(kind: str, tokens: int, channels: int, depth: int, plan: Plan | None = None) -> Any:
    chosen = plan or planned(kind, tokens, channels, depth)
    x, w = matrices(kind, tokens, channels, depth)
    return gemm.multiply(x, w, None, torch.bfloat16, chosen)


def multiply_gated(kind: str, tokens: int, channels: int, depth: int) -> Any:
    chosen = dataclasses.replace(planned(kind, tokens, channels, depth), splits=0)
    x, w = matrices(kind, tokens, channels, depth)
    amax = None if kind in ("bf16", "nvfp4") else floats(tokens)
    return gemm.multiply_gated(x, w, None, torch.bfloat16, chosen, amax)


def add_norm(width: int, parts: int, format: str | None, *, clears: bool = False) -> Any:
    delta = product(64, width, parts) if parts else numbers(64, width)
    f = None if format is None else get_format(format)
    clear = floats(64) if clears else None
    x, weight, dtype = floats(64, width), floats(width), torch.bfloat16
    return rows.add_norm(x, delta, weight, 1e-6, f, dtype, clear=clear)


def swiglu(width: int, parts: int, format: str | None, *, is_alternating: bool = False) -> Any:
    gate_up = product(64, 2 * width, parts) if parts else numbers(64, 2 * width)
    f = None if format is None else get_format(format)
    return rows.swiglu(gate_up, f, torch.bfloat16, is_alternating)


@dataclass(frozen=True)
class Heads:
    """The attention of a model."""

    heads: int
    kv_heads: int
    head_dim: int = 128
    has_norms: bool = False
    window: int | None = None


QWEN2_7B = Heads(28, 4)
QWEN2_05B = Heads(14, 2, head_dim=64)
QWEN3_8B = Heads(32, 8, has_norms=True)
MISTRAL_7B = Heads(32, 8, window=4096)


def rotate(
    kv_dtype: torch.dtype, heads: Heads = QWEN2_7B, *, parts: int = 2, keep_kv: bool = False
) -> Any:
    """Without parts the product is finished, like a prompt's."""
    head_dim, kv_heads = heads.head_dim, heads.kv_heads
    width = (heads.heads + 2 * kv_heads) * head_dim
    index = numbers(64, dtype=torch.int64)
    norm = floats(head_dim) if heads.has_norms else None
    has_codes = kv_dtype == FP8
    return rope.rotate_and_store(
        product(64, width, parts) if parts else numbers(64, width),
        index,
        (floats(2048, head_dim // 2), floats(2048, head_dim // 2)),
        None if norm is None else (norm, norm),
        LayerCache(
            numbers(2, 8, 16, kv_heads, head_dim, dtype=kv_dtype),
            floats(2, kv_heads) if has_codes else None,
            floats(kv_heads, head_dim) if has_codes else None,
            index,
        ),
        num_kv_heads=kv_heads,
        eps=1e-6,
        dtype=torch.bfloat16,
        keep_kv=keep_kv,
    )


def attend(
    kv_dtype: torch.dtype, page_size: int, format: str | None, heads: Heads = QWEN2_7B
) -> Any:
    head_dim, kv_heads = heads.head_dim, heads.kv_heads
    return attention.attend_pages(
        numbers(64, heads.heads, head_dim),
        numbers(2, 8, page_size, kv_heads, head_dim, dtype=kv_dtype),
        numbers(64, 2048 // page_size, dtype=torch.int32),
        numbers(64, dtype=torch.int64),
        heads.window,
        floats(2, kv_heads) if kv_dtype == FP8 else None,
        None if format is None else get_format(format),
        num_chunks=attention.chunks_for(2048),
    )


def attend_alike(kv_dtype: torch.dtype, heads: Heads = QWEN2_7B) -> Any:
    head_dim, kv_heads = heads.head_dim, heads.kv_heads
    return flash_pages.attend_pages_alike(
        numbers(64, heads.heads, head_dim),
        numbers(2, 8, 64, kv_heads, head_dim, dtype=kv_dtype),
        numbers(64, 32, dtype=torch.int32),
        numbers(64, dtype=torch.int64),
        heads.window,
        floats(2, kv_heads) if kv_dtype == FP8 else None,
    )


def sample() -> Any:
    index = numbers(64, dtype=torch.int64)
    return sampling.sample_rows(floats(64, 152064), floats(1), index, index)


def begin_step() -> Any:
    index = numbers(64, dtype=torch.int64)
    table = numbers(64, 32, dtype=torch.int32)
    return step.begin_step(numbers(152064, 3584), index, index, table, 64)


def requantize_from(dtype: torch.dtype, columns: int, format: str) -> Any:
    source = numbers(256, columns, dtype=dtype)
    target = codes(256, columns, format, is_weight=True)
    counted = target.scale if target.tensor_scale is None else target.tensor_scale
    flips = numbers(*counted.shape, dtype=torch.int32)
    return requantize.requantize_(source, target, flips, torch.bfloat16)


def decode(columns: int) -> Any:
    return packed_codes.decode(codes(256, columns, "nvfp4"), torch.bfloat16)


def quantize_input() -> Any:
    return rows.quantize_rows(numbers(64, 3584), get_format("int8"))


def quantize_with(format: str) -> Any:
    return rows.quantize_rows(numbers(64, 18944), get_format(format), floats(64))


def score_tokens() -> Any:
    return token_scores.score_rows(floats(64, 152064), numbers(64, dtype=torch.int64), 1.0)


def logit_gradients(dtype: torch.dtype, *, has_entropy: bool) -> Any:
    row = floats(64)
    return token_scores.logit_gradients(
        floats(64, 152064),
        numbers(64, dtype=torch.int64),
        log_z=row,
        grad_logp=row,
        entropy=row if has_entropy else None,
        grad_entropy=row if has_entropy else None,
        factor=1.0,
        dtype=dtype,
    )


def train_norm(dtype: torch.dtype, hidden: int = 896) -> Any:
    return rms_norm.normalize(numbers(64, hidden, dtype=dtype), floats(hidden), 1e-6, BF16)


def train_norm_gradients(dtype: torch.dtype, hidden: int = 896) -> Any:
    x = numbers(64, hidden, dtype=dtype)
    return rms_norm.gradients(numbers(64, hidden), x, floats(hidden), floats(64))


def train_residual_gradients() -> Any:
    """Of a norm, added to the gradient of the residual stream."""
    x, dy = floats(64, 1536), numbers(64, 1536)
    onto, rounded = floats(64, 1536), numbers(64, 1536)
    return rms_norm.gradients(dy, x, floats(1536), floats(64), onto=onto, rounded=rounded)


def train_gate(width: int, format: str | None = None, *, is_alternating: bool = False) -> Any:
    dy, gate_up = numbers(64, width), numbers(64, 2 * width)
    if format is None:
        return gate.gate_gradients(dy, gate_up, is_alternating=is_alternating)
    f = get_format(format)
    scale = floats(64, 1 if f.block is None else -(-width // f.block))
    options = {"is_integer": f.is_integer, "is_alternating": is_alternating}
    return gate.gate_gradients(dy, gate_up, y_scale=scale, **options)


def code_gradient(width: int, format: str, parts: int = 1) -> Any:
    f, g = get_format(format), numbers(64, width)
    codes = numbers(64, width, dtype=f.dtype)
    return coding.code_gradient(g, floats(width), codes, floats(64), f.largest, parts)


def weight_gradient(format: str) -> Any:
    f, g, target = get_format(format), numbers(1000, 1536), codes(1536, 1008, format)
    coding.code_columns(g, floats(1000), target.codes, floats(1536), f.largest)
    return coding.transpose_codes(codes(1000, 1536, format).codes, target.codes)


def dequantize_rows(format: str) -> Any:
    return rows.dequantize_rows(codes(64, 1536, format), BF16)


def train_rotation(*, is_gradient: bool = False, is_rounded: bool = False) -> Any:
    angles, x = floats(64, 64), numbers(64, 14, 64)
    options = {"scale": floats(14), "center": floats(14, 64)} if is_rounded else {}
    target = torch.empty_like(x)
    return rotation.rotate(x, angles, angles, target, is_gradient=is_gradient, **options)


def round_values() -> Any:
    x = numbers(64, 14, 64)
    return rotation.round_values(x, torch.empty_like(x), floats(14))


def update_weights(*, is_coded: bool) -> Any:
    weight = floats(512, 3584)
    moments = make_moments(weight, is_coded=is_coded)
    options = {"betas": (0.9, 0.999), "lr": 1e-6, "weight_decay": 0.1, "eps": 1e-8}
    return adamw8bit.update_(
        weight, floats(512, 3584), **moments, update=Update.of(options, 1, 1.0)
    )


def packed(heads: Heads, dtype: torch.dtype) -> tuple[list[Tensor], flash.Spans]:
    """Queries, keys and values as slices of one product of 1024 tokens."""
    sizes = [heads.heads, heads.kv_heads, heads.kv_heads]
    qkv = numbers(1024, sum(sizes), heads.head_dim, dtype=dtype)
    bounds = numbers(5, dtype=torch.int32)
    return list(qkv.split(sizes, 1)), flash.Spans(bounds, 1024, heads.window)


def train_attention(heads: Heads, dtype: torch.dtype = torch.bfloat16) -> Any:
    qkv, spans = packed(heads, dtype)
    return flash.forward(flash.Inputs(*qkv, spans, 0.1), flash.plan_for(qkv[0]).forward)


def train_attention_gradients(heads: Heads, dtype: torch.dtype = torch.bfloat16) -> Any:
    qkv, spans = packed(heads, dtype)
    plan, out = flash.plan_for(qkv[0]), numbers(*qkv[0].shape, dtype=dtype)
    lse = floats(heads.heads, 1024)
    inputs = flash.Inputs(*qkv, spans, 0.1)
    flash.query_gradients(inputs, out, lse, out, plan.query_gradients)
    return flash.key_gradients(inputs, lse, lse, out, plan.key_gradients)


def everywhere(pattern: str) -> Look:
    return Look(dict.fromkeys(TARGETS, pattern))


BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
DECODE = Plan(tokens=64, channels=128, depth=128, splits=4)
NVFP4_DECODE = dataclasses.replace(DECODE, warps=8, prefetch=2)
INT8_MATRIX = Look({HOPPER: r"IGMMA", ADA: r"IMMA", AMPERE: r"IMMA"})
FP8_MATRIX = Look({HOPPER: r"QGMMA", ADA: r"QMMA"})
BF16_MATRIX = Look({HOPPER: r"HGMMA", ADA: r"HMMA", AMPERE: r"HMMA"})
SMALL_MATRIX = everywhere(r"HMMA")
FLASH = {"flash_forward_kernel": BF16_MATRIX}
FLASH_GRADIENTS = {
    "flash_query_gradients_kernel": BF16_MATRIX,
    "flash_key_gradients_kernel": BF16_MATRIX,
}
WIDE_LOADS = everywhere(r"LDG\.\S*(128|64)")
WIDE_STORES = everywhere(r"STG\.\S*(128|64)")
WIDEST_LOADS = everywhere(r"LDG\.\S*128")
FP64_SUMS = everywhere(r"DADD")

LAUNCHES = (
    Launch(
        "int8 product of 16 tokens, in parts",
        partial(multiply, "int8", 16, 3584, 3584, dataclasses.replace(DECODE, tokens=16)),
        {"gemm_kernel": INT8_MATRIX},
        targets=VARIANT,
    ),
    Launch(
        "int8 product of 64 tokens, in parts",
        partial(multiply, "int8", 64, 3584, 18944, dataclasses.replace(DECODE, prefetch=2)),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "int8 product of 256 tokens, finished",
        partial(multiply, "int8", 256, 4608, 3584, Plan(128, 128, 128, warps=8, stages=3)),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "int8 product of 8192 tokens, as planned",
        partial(multiply, "int8", 8192, 3584, 18944),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "fp8 product of 64 tokens, in parts",
        partial(multiply, "fp8", 64, 3584, 18944, DECODE),
        {"gemm_kernel": FP8_MATRIX},
        targets=HAVE_FP8,
    ),
    Launch(
        "fp8 product of 256 tokens, as planned",
        partial(multiply, "fp8", 256, 3584, 18944),
        {"gemm_kernel": FP8_MATRIX},
        targets=HAVE_FP8,
    ),
    Launch(
        "fp8 product of 64 tokens, in blocks, as planned",
        partial(multiply, "fp8-block", 64, 3584, 18944),
        {"gemm_kernel": FP8_MATRIX},
        targets=HAVE_FP8,
    ),
    Launch(
        "bf16 product of 64 tokens, finished",
        partial(multiply, "bf16", 64, 4608, 3584, Plan(64, 64, 64)),
        {"gemm_kernel": BF16_MATRIX},
    ),
    Launch(
        "int8 gated product of 64 tokens, as planned",
        partial(multiply_gated, "int8", 64, 37888, 3584),
        {"gemm_kernel": INT8_MATRIX},
    ),
    Launch(
        "int8 gated product of 256 tokens, as planned",
        partial(multiply_gated, "int8", 256, 37888, 3584),
        {"gemm_kernel": INT8_MATRIX},
        targets=VARIANT,
    ),
    Launch(
        "fp8 gated product of 64 tokens, as planned",
        partial(multiply_gated, "fp8", 64, 37888, 3584),
        {"gemm_kernel": FP8_MATRIX},
        targets=HAVE_FP8,
    ),
    Launch(
        "bf16 gated product of 64 tokens, as planned",
        partial(multiply_gated, "bf16", 64, 37888, 3584),
        {"gemm_kernel": BF16_MATRIX},
        targets=VARIANT,
    ),
    Launch(
        "nvfp4 product of 16 tokens, as planned",
        partial(multiply, "nvfp4", 16, 3584, 18944),
        {"packed_gemm_kernel": BF16_MATRIX},
    ),
    Launch(
        "nvfp4 product of 16 tokens, by single warps",
        partial(multiply, "nvfp4", 16, 3584, 18944, Plan(16, 64, 256, 7, warps=2)),
        {"packed_gemm_kernel": SMALL_MATRIX},
        targets=VARIANT,
    ),
    Launch(
        "nvfp4 product of 64 tokens, in parts",
        partial(multiply, "nvfp4", 64, 3584, 18944, NVFP4_DECODE),
        {"packed_gemm_kernel": BF16_MATRIX},
        targets=VARIANT,
    ),
    Launch(
        "nvfp4 gated product of 64 tokens, as planned",
        partial(multiply_gated, "nvfp4", 64, 37888, 3584),
        {"packed_gemm_kernel": BF16_MATRIX},
    ),
    Launch("nvfp4 weight to numbers", partial(decode, 18944), {"decode_kernel": WIDE_STORES}),
    Launch("embedding", begin_step, {"begin_kernel": WIDE_LOADS}),
    # Early are the norm's weight, and of a product in parts the channels' scale and bias.
    Launch(
        "norm to int8",
        partial(add_norm, 3584, 4, "int8"),
        {"add_norm_kernel": WIDE_LOADS.with_early(3)},
    ),
    Launch(
        "norm to int8 that clears",
        partial(add_norm, 3584, 2, "int8", clears=True),
        {"add_norm_kernel": WIDE_LOADS.with_early(3)},
        targets=VARIANT,
    ),
    Launch(
        "norm of 8192 to bf16",
        partial(add_norm, 8192, 16, None),
        {"add_norm_kernel": WIDE_LOADS.with_early(5)},
    ),
    Launch(
        "norm to fp8 in blocks",
        partial(add_norm, 3584, 0, "fp8-block"),
        {"add_norm_kernel": WIDE_LOADS.with_early(1)},
        targets=HAVE_FP8,
    ),
    Launch("swiglu to int8", partial(swiglu, 18944, 2, "int8"), {"map_kernel": WIDE_LOADS}),
    Launch(
        "swiglu of 40960 to int8",
        partial(swiglu, 40960, 2, "int8"),
        {"map_kernel": WIDE_LOADS},
        targets=VARIANT,
    ),
    Launch("swiglu to bf16", partial(swiglu, 18944, 0, None), {"map_kernel": WIDE_LOADS}),
    Launch(
        "alternating swiglu to bf16",
        partial(swiglu, 18944, 0, None, is_alternating=True),
        {"map_kernel": WIDE_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "alternating swiglu to fp8",
        partial(swiglu, 18944, 0, "fp8", is_alternating=True),
        {"map_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch("input to int8", quantize_input, {"map_kernel": WIDE_LOADS}, targets=VARIANT),
    Launch("known maxima to int8", partial(quantize_with, "int8"), {"map_kernel": WIDE_LOADS}),
    Launch(
        "known maxima to fp8",
        partial(quantize_with, "fp8"),
        {"map_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    # Early are scale and bias of either half of a head, the heads' norms, and the cache's scale and
    # center.
    Launch(
        "rope to a bf16 cache",
        partial(rotate, torch.bfloat16),
        {"rotate_kernel": WIDE_LOADS.with_early(4)},
    ),
    Launch(
        "rope to an fp8 cache",
        partial(rotate, FP8),
        {"rotate_kernel": WIDE_LOADS.with_early(7)},
        targets=HAVE_FP8,
    ),
    Launch(
        "rope with norms",
        partial(rotate, torch.bfloat16, QWEN3_8B),
        {"rotate_kernel": WIDE_LOADS.with_early(8)},
    ),
    Launch(
        "rope of a prompt with norms",
        partial(rotate, torch.bfloat16, QWEN3_8B, parts=0, keep_kv=True),
        {"rotate_kernel": WIDE_LOADS.with_early(4)},
        targets=VARIANT,
    ),
    Launch(
        "rope of a prompt to an fp8 cache",
        partial(rotate, FP8, QWEN3_8B, parts=0, keep_kv=True),
        {"rotate_kernel": WIDE_LOADS.with_early(7)},
        targets=HAVE_FP8,
    ),
    Launch(
        "rope of small heads",
        partial(rotate, torch.bfloat16, QWEN2_05B),
        {"rotate_kernel": WIDE_LOADS.with_early(4)},
        targets=VARIANT,
    ),
    Launch(
        "attention over a bf16 cache",
        partial(attend, torch.bfloat16, 64, "int8"),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
    ),
    Launch(
        "attention over an fp8 cache",
        partial(attend, FP8, 16, "fp8"),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "attention over a window",
        partial(attend, torch.bfloat16, 64, "int8", MISTRAL_7B),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "attention of small heads over a bf16 cache",
        partial(attend, torch.bfloat16, 64, "int8", QWEN2_05B),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "attention of small heads over an fp8 cache",
        partial(attend, FP8, 64, None, QWEN2_05B),
        {"split_kernel": SMALL_MATRIX, "combine_kernel": WIDE_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "attention alike over a bf16 cache",
        partial(attend_alike, torch.bfloat16),
        {"alike_kernel": BF16_MATRIX},
    ),
    Launch(
        "attention alike of small heads over an fp8 cache",
        partial(attend_alike, FP8, QWEN2_05B),
        {"alike_kernel": BF16_MATRIX},
        targets=HAVE_FP8,
    ),
    Launch("sampling", sample, {"summarise_kernel": WIDE_LOADS, "sample_kernel": WIDE_LOADS}),
    Launch(
        "scores of tokens",
        score_tokens,
        {"score_blocks_kernel": WIDEST_LOADS, "score_rows_kernel": FP64_SUMS},
    ),
    Launch(
        "gradients of logits to bf16",
        partial(logit_gradients, torch.bfloat16, has_entropy=False),
        {"logit_gradients_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "gradients of logits and entropy to bf16",
        partial(logit_gradients, torch.bfloat16, has_entropy=True),
        {"logit_gradients_kernel": WIDEST_LOADS},
    ),
    Launch(
        "gradients of logits and entropy in place",
        partial(logit_gradients, torch.float32, has_entropy=True),
        {"logit_gradients_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch("norm for training", partial(train_norm, torch.float32), {"norm_kernel": WIDEST_LOADS}),
    Launch(
        "long norm for training",
        partial(train_norm, BF16, 8192),
        {"norm_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "gradients of a norm",
        partial(train_norm_gradients, torch.float32),
        {"norm_gradients_kernel": WIDEST_LOADS},
    ),
    Launch(
        "gradients of a long norm",
        partial(train_norm_gradients, torch.float32, 8192),
        {"norm_gradients_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "gradients of a norm of heads",
        partial(train_norm_gradients, BF16, 64),
        {"norm_gradients_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "gradients of the residual stream",
        train_residual_gradients,
        {"norm_gradients_kernel": WIDEST_LOADS},
    ),
    Launch(
        "gradients of a gate", partial(train_gate, 8960), {"gate_gradients_kernel": WIDEST_LOADS}
    ),
    Launch(
        "gradients of a gate whose result was coded",
        partial(train_gate, 8960, "fp8-block"),
        {"gate_gradients_kernel": WIDEST_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "gradients of gates that alternate with ups",
        partial(train_gate, 8960, "int8", is_alternating=True),
        {"gate_gradients_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "codes of a long gradient, of two layers in turn",
        partial(code_gradient, 37888, "fp8", 2),
        {"code_gradient_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "transposed codes of a gradient",
        partial(weight_gradient, "int8"),
        {
            "column_peaks_kernel": WIDE_LOADS,
            "code_columns_kernel": everywhere(r"LDG"),
            "transpose_codes_kernel": everywhere(r"LDG"),
        },
    ),
    Launch(
        "codes of a gradient",
        partial(code_gradient, 1536, "int8"),
        {"code_gradient_kernel": WIDE_LOADS},
    ),
    Launch(
        "FP8 codes of a gradient",
        partial(code_gradient, 3584, "fp8"),
        {"code_gradient_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "values of FP8 codes",
        partial(dequantize_rows, "fp8"),
        {"dequantize_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "values of INT8 codes", partial(dequantize_rows, "int8"), {"dequantize_kernel": WIDE_LOADS}
    ),
    Launch("rotation for training", train_rotation, {"rotate_pairs_kernel": WIDEST_LOADS}),
    Launch(
        "rotation of keys that are rounded",
        partial(train_rotation, is_rounded=True),
        {"rotate_pairs_kernel": WIDEST_LOADS},
    ),
    Launch("rounding of values", round_values, {"rotate_pairs_kernel": WIDEST_LOADS}),
    Launch(
        "gradient of a rotation",
        partial(train_rotation, is_gradient=True),
        {"rotate_pairs_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch("attention for training", partial(train_attention, QWEN2_7B), FLASH),
    Launch("attention of small heads for training", partial(train_attention, QWEN2_05B), FLASH),
    Launch(
        "attention over a window for training",
        partial(train_attention, MISTRAL_7B),
        FLASH,
        targets=VARIANT,
    ),
    Launch(
        "attention for training in fp16",
        partial(train_attention, QWEN2_7B, torch.float16),
        FLASH,
        targets=VARIANT,
    ),
    Launch("gradients of attention", partial(train_attention_gradients, QWEN2_7B), FLASH_GRADIENTS),
    Launch(
        "gradients of attention of small heads",
        partial(train_attention_gradients, QWEN2_05B),
        FLASH_GRADIENTS,
    ),
    Launch(
        "gradients of attention over a window",
        partial(train_attention_gradients, MISTRAL_7B),
        FLASH_GRADIENTS,
        targets=VARIANT,
    ),
    Launch(
        "AdamW with 8-bit moments",
        partial(update_weights, is_coded=True),
        {"adamw_kernel": WIDEST_LOADS},
    ),
    Launch(
        "AdamW with fp32 moments",
        partial(update_weights, is_coded=False),
        {"adamw_kernel": WIDEST_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "fp32 weight to int8",
        partial(requantize_from, torch.float32, 18944, "int8"),
        {"requantize_rows_kernel": WIDE_LOADS},
    ),
    Launch(
        "bf16 weight to fp8",
        partial(requantize_from, torch.bfloat16, 3584, "fp8"),
        {"requantize_rows_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "long fp32 weight to int8",
        partial(requantize_from, torch.float32, 40960, "int8"),
        {"requantize_rows_kernel": WIDE_LOADS},
        targets=VARIANT,
    ),
    Launch(
        "fp32 weight to fp8 in blocks",
        partial(requantize_from, torch.float32, 3584, "fp8-block"),
        {"requantize_tiles_kernel": WIDE_LOADS},
        targets=HAVE_FP8,
    ),
    Launch(
        "fp32 weight to nvfp4",
        partial(requantize_from, torch.float32, 3584, "nvfp4"),
        {"requantize_packed_kernel": WIDE_LOADS},
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
    run = JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        kernel = run(self, *args, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    triton.runtime.driver.set_active(AbsentGPU(target))
    # Launchers ask what the device of their tensors can do.
    known = mock.patch.object(Target, "of", return_value=TARGETS[target])
    with known, mock.patch.object(JITFunction, "run", compile_only):
        yield compiled


def compile_launch(job: tuple[int, int]) -> list[Binary] | list[Failure]:
    """Everything that one launch compiles for one GPU, or the error."""
    launch, target = LAUNCHES[job[0]], job[1]
    try:
        with compiling(target) as compiled:
            launch.call()
        return [binary_of(launch, target, *item) for item in compiled]
    except Exception:
        return [Failure(launch.name, target, traceback.format_exc())]


def binary_of(launch: Launch, target: int, name: str, kernel: Any) -> Binary:
    return Binary(
        launch=launch.name,
        kernel=name,
        target=target,
        code=machine_code(kernel.asm["cubin"]),
        num_warps=kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
        overlaps=kernel.metadata.launch_pdl,
        early_arguments=sorted(arguments_before_wait(kernel.asm["ttir"])),
    )


def machine_code(cubin: bytes) -> bytes:
    """The executable sections of an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    (num_sections,) = struct.unpack_from("<H", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + 64 * i) for i in range(num_sections)]
    return b"".join(
        cubin[offset : offset + size] for _, _, flags, _, offset, size in headers if flags & 4
    )


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def read_listing(listing: str) -> Iterator[Instruction]:
    for address, name, operands in INSTRUCTION.findall(listing):
        yield Instruction(int(address, 16), name, operands)


def disassemble(target: int, codes: Sequence[bytes]) -> Iterator[list[Instruction]]:
    """The instructions of each code. To start the disassembler takes longer than to run it."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [DISASSEMBLER, "--no-dataflow", "--binary", MACHINES[target], file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = read_listing(listing)
    for code in codes:
        found = list(islice(instructions, len(code) // INSTRUCTION_BYTES))
        assert any(i.name == "EXIT" for i in found), "the disassembler's output is not understood"
        yield found
    assert not list(instructions), "the disassembler's output is not understood"


def inspect(binaries: Sequence[Binary]) -> Iterator[dict[str, Any]]:
    """What the test reads of kernels for one GPU: how often each instruction occurs, and so on."""
    if not binaries:
        return
    listings = disassemble(binaries[0].target, [binary.code for binary in binaries])
    for binary, instructions in zip(binaries, listings, strict=True):
        names = [instruction.name for instruction in instructions]
        kept = {name: value for name, value in vars(binary).items() if name != "code"}
        yield kept | {
            "instructions": Counter(names),
            "waits": WAIT in names,
            "early": [i for i in before_wait(names) if EARLY.match(i)],
            "overwritten": [i.operands for i in overwritten_products(instructions)],
        }


def overwritten_products(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Products of Hopper whose factor in registers is rewritten while they may still read it.

    A product runs on while its warps do other work, until they wait for all but the last few groups
    of products (`WARPGROUP.DEPBAR`). Triton may wait too late in a loop, and ptxas believes it.
    """
    for place, product in enumerate(instructions):
        factor = PRODUCT_FACTOR.match(product.operands) if "HGMMA" in product.name else None
        if factor is None:
            continue
        registers = range(int(factor[1]), int(factor[1]) + FACTOR_REGISTERS)
        num_later = 0 if GROUP_END in product.operands else -1
        for later in after(instructions, place):
            if later.name.startswith("WARPGROUP.DEPBAR"):
                if int(later.operands.rpartition("0x")[2], 16) <= num_later:
                    break
            elif "HGMMA" in later.name:
                num_later += GROUP_END in later.operands
            elif writes(later, registers):
                yield product
                break


def after(instructions: Sequence[Instruction], place: int) -> Sequence[Instruction]:
    """What follows an instruction: the rest of its loop and the loop again, or all."""
    first, here = instructions[0].address, instructions[place].address
    for end in range(place, len(instructions)):
        to = re.search(r"0x(\w+)", instructions[end].operands)
        if instructions[end].name == "BRA" and to and first <= int(to[1], 16) <= here:
            start = (int(to[1], 16) - first) // INSTRUCTION_BYTES
            return [*instructions[place + 1 : end + 1], *instructions[start : place + 1]]
    return instructions[place + 1 :]


def writes(instruction: Instruction, registers: range) -> bool:
    found = re.match(r"\s*R(\d+)", instruction.operands)
    if found is None or instruction.name.startswith(("ST", "RED")):
        return False
    width = next((n for part, n in WIDTHS.items() if part in instruction.name), 1)
    return any(int(found[1]) + i in registers for i in range(width))


def before_wait(instructions: Sequence[str]) -> Sequence[str]:
    return instructions[: instructions.index(WAIT)] if WAIT in instructions else ()


def arguments_before_wait(ttir: str) -> set[str]:
    """Arguments of a kernel through which it loads before `griddepcontrol.wait`.

    Follows pointers from the signature through what is calculated from them.
    """
    before, wait, _ = ttir.partition("griddepcontrol.wait")
    if not wait:
        return set()
    names = re.findall(r"%(\w+): !tt\.(?:ptr|tensordesc)", before)
    origins = {name: {name} for name in names}
    loaded: set[str] = set()
    for result, operation, operands in re.findall(r"^ *%(\w+) = ([\w.]+) (.*)", before, re.M):
        found = (origins.get(operand, set()) for operand in re.findall(r"%(\w+)", operands))
        origins[result] = set().union(*found)
        if operation in ("tt.load", "tt.descriptor_load"):
            loaded |= origins[result]
    return loaded


def is_repeated(launch: Launch, target: int) -> bool:
    """Whether another GPU shows what this one would.

    Without FP8, Triton gives 8.6 and 8.9 the same PTX, and both have the same shared memory.
    """
    return target == ADA and AMPERE in launch.targets


def compile_all(names: Sequence[str] = (), *, with_repeated: bool = False) -> list[dict[str, Any]]:
    jobs = [
        (i, target)
        for i, launch in enumerate(LAUNCHES)
        for target in launch.targets
        if not names or launch.name in names
        if with_repeated or not is_repeated(launch, target)
    ]
    # Forked, so that torch and Triton are imported once; nothing here has touched a GPU or threads.
    with multiprocessing.get_context("fork").Pool(NUM_WORKERS) as pool:
        results = [result for some in pool.imap(compile_launch, jobs) for result in some]
    entries = [vars(result) for result in results if isinstance(result, Failure)]
    binaries = [result for result in results if isinstance(result, Binary)]
    for target in TARGETS:
        entries += inspect([binary for binary in binaries if binary.target == target])
    return entries


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    entries = compile_all(options.names, with_repeated=options.all)
    if options.json:
        options.json.write_text(json.dumps(entries))
        return
    for entry in entries:
        if "error" in entry:
            print(f"sm_{entry['target']} {entry['launch']}: {entry['error']}", file=sys.stderr)
            continue
        kept = ("MMA", "LDL", "STL", "LDG", "UTMALDG")
        counts = {k: n for k, n in entry["instructions"].items() if any(x in k for x in kept)}
        print(
            f"sm_{entry['target']} {entry['launch']}: {entry['kernel']}, "
            f"{entry['num_warps']} warps, {entry['shared_bytes']} B shared, {counts}, "
            f"early {entry['early']} of {entry['early_arguments']}"
        )


if __name__ == "__main__":
    main()
