"""One matrix product: which plans are worth trying, whether they are right, how fast they are.

A plan is timed together with the kernel that consumes its product, because a cut of K moves work
there, in a CUDA graph, over enough copies of the weights to exceed the L2 cache. It must be right
first: integer products to the bit. Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from qurl.bench.record import time_call
from qurl.errors import EngineError
from qurl.ops.target import Target
from qurl.quant import FORMATS, Quantized, dequantize, quantize
from qurl.quant.formats import Format, quantize_activation
from qurl.quant.kernels.gemm import Plan, library_product, multiply, multiply_gated
from qurl.quant.kernels.plans import Choice, TableKey, whole_kind
from qurl.quant.kernels.rows import add_norm, quantize_rows, swiglu
from qurl.quant.linear import Operand, Product, finish
from qurl.quant.linear import multiply as multiply_by_torch

PREFETCHES = (2, 4, 8)
MOST_PARTS = 16
MOST_COPIES = 24
REPEATS = 3
LAUNCHES = 8  # that must all be right
HOPELESS = 1.5  # times the best first replay; a slower plan is not timed further
TOLERANCE = 5e-3  # relative error of a floating-point product: fast FP8 sums keep 14 bits

Times = Mapping[Choice, float]
"""Microseconds of plans with their consumer; None is the vendor's library. Hopeless plans are not
in it."""


@dataclass(frozen=True)
class Gemm:
    """One product of one layer."""

    role: str
    kind: str
    N: int
    K: int
    M: int

    @property
    def format(self) -> Format | None:
        return FORMATS["fp8"] if self.is_unified else FORMATS.get(self.kind)

    @property
    def is_unified(self) -> bool:
        """Whether K must not be cut, and FP8 sums are fast."""
        return self.kind == whole_kind("fp8")

    @property
    def act_format(self) -> Format | None:
        """Format of the activations; None is BF16."""
        return None if self.format is None or self.format.is_weight_only else self.format

    def tile_bytes(self, tokens: int, channels: int) -> float:
        """Bytes of one input channel of both factors of a tile."""
        weight = self.format.weight_bytes if self.format else 2
        return tokens * (1 if self.act_format else 2) + channels * weight

    @property
    def is_gated(self) -> bool:
        """Whether channels are gate and up, which our plans also combine."""
        return self.role == "gate_up"

    @property
    def table_key(self) -> TableKey:
        return self.kind, self.N, self.K, self.M


@dataclass(frozen=True)
class Chip:
    """The sizes that plans must fit."""

    num_sms: int
    shared_bytes: int  # per multiprocessor, for all its programs together
    l2_bytes: int

    @staticmethod
    def of(device: torch.device) -> Chip:
        properties = torch.cuda.get_device_properties(device)
        # 3 KiB stay free: the driver takes one per program, barriers take some.
        shared_bytes = properties.shared_memory_per_multiprocessor - 3 * 2**10
        return Chip(Target.of(device).num_sms, shared_bytes, properties.L2_cache_size)


def candidates(problem: Gemm, chip: Chip, known: Choice = None) -> list[Plan]:
    """Plans to measure, without prefetch; the known one first, so that bad ones end early.

    The number of programs per multiprocessor sets the stages, and the cut of K so that all programs
    run in one wave.
    """
    plans = list(_candidates(problem, chip))
    if known is not None:
        splits = 0 if problem.is_gated else known.splits
        changes = {"prefetch": 0, "splits": splits, "is_fast": problem.is_unified}
        plans.insert(0, dataclasses.replace(known, **changes))
    return list(dict.fromkeys(plans))


def _candidates(problem: Gemm, chip: Chip) -> Iterator[Plan]:
    M, N, K = problem.M, problem.N, problem.K
    # Where K is not cut, only small tiles are enough for all multiprocessors.
    smallest, few_tokens = (min(32, M // 4), 1024) if problem.is_unified else (64, 256)
    small_tiles = [t for t in (16, 32, 64, 128, 256) if t <= M and (t == M or t >= smallest)]
    token_tiles = small_tiles if few_tokens >= M else [128, 256]
    is_packed = problem.kind == "nvfp4"
    depths = (128, 256) if problem.act_format or is_packed else (64, 128)
    for tokens, channels, depth in itertools.product(token_tiles, (64, 128), depths):
        tiles = -(-M // tokens) * -(-N // channels)
        num_warps = (8,) if tokens * channels > 64 * 128 else (4,)
        if is_packed and num_warps == (4,) and channels == 128:
            # NVFP4 weights are small, so reading tokens counts; wide tiles read them less often.
            # Eight warps unpack such a tile with half the registers each.
            num_warps = (4, 8)
        for num_programs, warps in itertools.product((1, 2, 3, 4, 5), num_warps):
            stage_bytes = problem.tile_bytes(tokens, channels) * depth
            stages = min(8, int(chip.shared_bytes / num_programs / stage_bytes))
            if stages < 2 or num_programs * warps > 24:
                continue
            yield Plan(tokens, channels, depth, 0, warps, stages, is_fast=problem.is_unified)
            splits = num_programs * chip.num_sms // tiles
            has_work = K // depth >= 2 * splits
            may_cut = not problem.is_gated and not problem.is_unified
            if may_cut and 1 < splits <= MOST_PARTS and has_work:
                yield Plan(tokens, channels, depth, splits, warps, stages)


def best_of(times: Times) -> Choice:
    return min(times, key=times.__getitem__)


def with_prefetch(times: Times) -> list[Plan]:
    """Our best plan with weights prefetched."""
    own: dict[Plan, float] = {plan: us for plan, us in times.items() if plan is not None}
    best = min(own, key=own.__getitem__, default=None)
    return [dataclasses.replace(best, prefetch=n) for n in PREFETCHES] if best else []


def measure(setup: GemmRun, choices: Sequence[Choice]) -> Times:
    """Check all plans and time those that fit the chip, unless another one is much faster."""
    times: dict[Choice, float] = {}
    shortest = math.inf
    for choice in [choice for choice in choices if setup.check(choice)]:
        replay = setup.clock(choice)
        first = replay()
        # Compare first replays with each other: they also upload the graph.
        if first > HOPELESS * shortest:
            continue
        if choice is not None:
            shortest = min(shortest, first)
        times[choice] = statistics.median(replay() for _ in range(REPEATS))
    return times


class GemmRun:
    """Weights, inputs and the consumer of one problem."""

    def __init__(self, problem: Gemm, device: torch.device, l2_bytes: int = 0) -> None:
        """`l2_bytes` asks for copies of the weights that together exceed twice this size."""
        self.problem, self.device = problem, device
        M, N, K, format = problem.M, problem.N, problem.K, problem.format
        weight = torch.randn(N, K, device=device)
        first = quantize(weight, format) if format else weight.bfloat16()
        num_bytes = first.num_bytes if isinstance(first, Quantized) else first.nbytes
        copies = num_copies(num_bytes, l2_bytes)
        self.weights = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]
        x = torch.randn(M, K, device=device)
        coded = problem.act_format
        self.x = quantize_activation(x, coded) if coded else x.bfloat16()
        has_bias = problem.role == "qkv"
        self.bias = torch.randn(N, device=device).bfloat16() if has_bias else None
        self.amax = torch.zeros(M, device=device)
        if not problem.is_gated:
            self.residual = torch.randn(M, N, device=device)
            self.norm = torch.ones(N, device=device)

    @functools.cached_property
    def expected(self) -> Tensor:
        """torch's result: exact for integers, else in FP32."""
        x, weight = self.x, self.weights[0]
        if isinstance(x, Quantized) and isinstance(weight, Quantized):
            y = multiply_by_torch(x, weight, self.bias, torch.bfloat16)
        else:
            assert isinstance(x, Tensor)
            numbers = dequantize(weight) if isinstance(weight, Quantized) else weight.float()
            y = x.float() @ numbers.T
            y = (y if self.bias is None else y + self.bias.float()).bfloat16()
        return _gated(y) if self.problem.is_gated else y

    def launch(self, choice: Choice) -> Product | None:
        """Compile everything and run it once; None if the chip or the library cannot do it."""
        try:
            return self._run(choice, self.weights[0])
        except OutOfResources:
            return None

    def check(self, choice: Choice) -> bool:
        """Whether a plan can run here; raises if its product is wrong.

        Several launches: a kernel that overwrites what it still reads is right most of the time.
        """
        for _ in range(LAUNCHES):
            product = self.launch(choice)
            if product is None:
                return False
            self._check(product, choice)
        return True

    def _check(self, product: Product, choice: Choice) -> None:
        y = finish(product)
        y = _gated(y) if self.problem.is_gated and choice is None else y
        format, expected = self.problem.format, self.expected
        difference, norm = (
            torch.linalg.vector_norm(x, dtype=torch.float32) for x in (y - expected, expected)
        )
        error = (difference / norm).item()
        if format is None or not format.is_integer:
            is_right = error < TOLERANCE
        elif self.problem.is_gated:
            # Gate and up are exact, but exponentials differ by FP32 rounding: one bit of BF16.
            is_right = torch.allclose(y.float(), expected.float(), rtol=2**-7, atol=1e-30)
        else:
            is_right = torch.equal(y, expected)
        if not is_right:
            raise EngineError(f"{self.problem} with {choice} is wrong: relative error {error:.3g}")

    def clock(self, choice: Choice) -> Callable[[], float]:
        """Times the product and its consumer, as a mean in microseconds; launch it before."""

        def work() -> None:
            for weight in self.weights:
                self._run(choice, weight)

        if self.device.type != "cuda":
            return lambda: 1e6 * time_call(work, self.device)[0] / len(self.weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return 1e3 * start.elapsed_time(end) / len(self.weights)

        return replay

    def _run(self, choice: Choice, weight: Operand) -> Product | None:
        """Multiply and consume; None if the library cannot. Our plans give silu(gate) * up."""
        format, dtype = self.problem.act_format, torch.bfloat16
        operands = (self.x, weight, self.bias)
        if choice is not None and self.problem.is_gated:
            gated = multiply_gated(*operands, dtype, choice, self.amax if format else None)
            if format:
                quantize_rows(gated, format, self.amax)
            return gated
        if choice is None:
            product = library_product(*operands, dtype, is_fast=self.problem.is_unified)
        else:
            product = multiply(*operands, dtype, choice)
        if product is not None and self.problem.is_gated:
            swiglu(product, format, dtype, True)
        elif product is not None:
            add_norm(self.residual, product, self.norm, 1e-6, format, dtype, clear=self.amax)
        return product


def num_copies(num_bytes: int, l2_bytes: int) -> int:
    """Enough copies of a weight that L2 has evicted each one before it is read again."""
    return 1 if l2_bytes == 0 else min(MOST_COPIES, max(2, math.ceil(2 * l2_bytes / num_bytes)))


def _gated(y: Tensor) -> Tensor:
    """silu(gate) * up of alternating channels, rounded as our plans do."""
    gate, up = y.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (gate / (1 + (-gate).exp()) * up).bfloat16()


def compile_plan(problem: Gemm, plan: Plan, device: torch.device) -> None:
    """Put a plan's kernels into Triton's disk cache. They depend on neither M nor a whole K.

    Those of NVFP4 depend on whether K is a multiple of 128, as it is in all shapes.
    """
    GemmRun(dataclasses.replace(problem, M=plan.tokens, K=1024), device).launch(plan)
