"""One matrix product under the clock: which plans are worth a try, are they right, are they fast.

A plan is timed with the kernel that consumes its product behind it, because a cut of K moves work
there; in a CUDA graph, over copies of the weights that exceed the L2 cache together. First it must
be right: of integers to the bit.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

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

from qurl.bench.limits import Speed
from qurl.bench.timing import GraphClock
from qurl.errors import EngineError
from qurl.ops.target import Target
from qurl.quant import FORMATS, Quantized, quantize
from qurl.quant.formats import Format, quantize_activation
from qurl.quant.kernels.gemm import Plan, library_product, multiply, multiply_gated
from qurl.quant.kernels.plans import Choice, TableKey
from qurl.quant.linear import Operand, Product, finish
from qurl.quant.linear import multiply as multiply_by_torch
from qurl.rollout.local.kernels.rows import add_norm, quantize_rows, swiglu

PREFETCHES = (2, 4, 8)
MOST_PARTS = 16
MOST_COPIES = 24
REPEATS = 3
HOPELESS = 1.5
"""A plan whose first replay takes so many times that of the best so far is not timed further."""
TOLERANCE = 3e-3
"""Relative error of floating-point products, all elements together: FP8 sums keep 14 bits."""


@dataclass(frozen=True)
class Problem:
    """One product of one layer."""

    role: str
    kind: str
    N: int
    K: int
    M: int

    @property
    def format(self) -> Format | None:
        return FORMATS.get(self.kind)

    @property
    def itemsize(self) -> int:
        return 1 if self.format else 2

    @property
    def is_gated(self) -> bool:
        """Whether channels are those of gate and up, which a plan of ours goes on to combine."""
        return self.role == "gate_up"

    @property
    def table_key(self) -> TableKey:
        return self.kind, self.N, self.K, self.M

    @property
    def name(self) -> str:
        """Names a result."""
        return f"{self.kind} {self.N}x{self.K} M={self.M}"

    def limit_seconds(self, speed: Speed) -> float:
        """Reading the weights once, or multiplying."""
        flops = speed.flops_narrow if self.format else speed.flops_wide
        num_bytes = self.N * self.K * self.itemsize
        return max(num_bytes / speed.bandwidth, 2 * self.M * self.N * self.K / flops)


@dataclass(frozen=True)
class Chip:
    """What plans must fit."""

    num_sms: int
    shared_bytes: int
    """Of a multiprocessor, for all its programs together."""
    l2_bytes: int

    @staticmethod
    def of(device: torch.device) -> Chip:
        properties = torch.cuda.get_device_properties(device)
        # The rest is the driver's, a KiB for each program, and room for barriers.
        shared_bytes = properties.shared_memory_per_multiprocessor - 3 * 2**10
        return Chip(Target.of(device).num_sms, shared_bytes, properties.L2_cache_size)


@dataclass(frozen=True)
class Trial:
    """Times of one problem's plans."""

    problem: Problem
    microseconds: Mapping[Choice, float]
    """With the consumer; None is the vendor's library. Hopeless plans are not in it."""
    num_plans: int

    @property
    def best(self) -> Choice:
        return min(self.microseconds, key=self.microseconds.__getitem__)

    @property
    def best_own(self) -> Plan | None:
        """The best one that is not the library."""
        own = {plan: us for plan, us in self.microseconds.items() if plan is not None}
        return min(own, key=own.__getitem__) if own else None

    def joined(self, other: Trial) -> Trial:
        assert self.problem == other.problem
        times = {**self.microseconds, **other.microseconds}
        return Trial(self.problem, times, self.num_plans + other.num_plans)


def candidates(problem: Problem, chip: Chip, known: Choice = None) -> list[Plan]:
    """Plans worth measuring, without prefetch; first the known one: others soon look hopeless.

    Stages follow from how many programs are to share a multiprocessor, and the cut of K from how
    many there are to be in all, so that they come in one wave.
    """
    first = []
    if known is not None:
        splits = 0 if problem.is_gated else known.splits
        first = [dataclasses.replace(known, prefetch=0, splits=splits)]
    return list(dict.fromkeys([*first, *_candidates(problem, chip)]))


def _candidates(problem: Problem, chip: Chip) -> Iterator[Plan]:
    M, N, K = problem.M, problem.N, problem.K
    token_tiles = [t for t in (16, 32, 64, 128, 256) if t <= M and (t == M or t >= 64)]
    if M > 256:
        token_tiles = [128, 256]
    for tokens, channels, depth_bytes in itertools.product(token_tiles, (64, 128), (128, 256)):
        depth = depth_bytes // problem.itemsize
        tiles = -(-M // tokens) * -(-N // channels)
        warps = 8 if tokens * channels > 64 * 128 else 4
        for num_programs in (1, 2, 3, 4, 5):
            stage_bytes = (tokens + channels) * depth_bytes
            stages = min(8, chip.shared_bytes // num_programs // stage_bytes)
            if stages < 2 or num_programs * warps > 24:
                continue
            yield Plan(tokens, channels, depth, 0, warps, stages)
            splits = num_programs * chip.num_sms // tiles
            has_work = K // depth >= 2 * splits
            if not problem.is_gated and 1 < splits <= MOST_PARTS and has_work:
                yield Plan(tokens, channels, depth, splits, warps, stages)


def with_prefetch(trial: Trial) -> list[Plan]:
    """The best plan that is not the library, asking for weights ahead."""
    best = trial.best_own
    return [dataclasses.replace(best, prefetch=n) for n in PREFETCHES] if best else []


# Measuring


def measure(setup: Setup, plans: Sequence[Plan], *, has_library: bool = True) -> Trial:
    """Check all plans, then time them; those that the chip has no room for are left out."""
    library: list[Choice] = [None] if has_library and setup.has_library else []
    choices = [choice for choice in [*library, *plans] if setup.check(choice)]
    times: dict[Choice, float] = {}
    shortest = math.inf
    for choice in choices:
        clock = setup.clock(choice)
        first = clock.replay()
        # Like with like: the first replay of any graph also uploads it.
        if first > HOPELESS * shortest:
            continue
        shortest = min(shortest, first)
        times[choice] = setup.microseconds(clock)
    return Trial(setup.problem, times, len(choices))


class Setup:
    """Weights, inputs and the consumer of one problem."""

    def __init__(self, problem: Problem, device: torch.device, l2_bytes: int = 0) -> None:
        """With `l2_bytes` there are as many copies of the weights as exceed it twice."""
        self.problem = problem
        self.device = device
        M, N, K = problem.M, problem.N, problem.K
        first = self._operand(torch.randn(N, K, device=device), is_weight=True)
        copies = num_copies(N * K * problem.itemsize, l2_bytes)
        self.weights = [first, *(_clone(first) for _ in range(copies - 1))]
        self.x = self._operand(torch.randn(M, K, device=device), is_weight=False)
        has_bias = problem.role == "qkv"
        self.bias = torch.randn(N, device=device).bfloat16() if has_bias else None
        self.amax = torch.zeros(M, device=device)

    @functools.cached_property
    def residual(self) -> Tensor:
        return torch.randn(self.problem.M, self.problem.N, device=self.device)

    @functools.cached_property
    def norm(self) -> Tensor:
        return torch.ones(self.problem.N, device=self.device)

    @functools.cached_property
    def has_library(self) -> bool:
        return library_product(self.x, self.weights[0], self.bias, torch.bfloat16) is not None

    @functools.cached_property
    def expected(self) -> Tensor:
        """By torch: integers exactly, all else in FP32."""
        x, weight = self.x, self.weights[0]
        if isinstance(x, Quantized) and isinstance(weight, Quantized):
            y = multiply_by_torch(x, weight, self.bias, torch.bfloat16)
        else:
            assert isinstance(x, Tensor)
            assert isinstance(weight, Tensor)
            y = x.float() @ weight.float().T
            y = (y if self.bias is None else y + self.bias.float()).bfloat16()
        return _gated(y) if self.problem.is_gated else y

    def launch(self, choice: Choice) -> Product | None:
        """Run everything once, which compiles it. None: the chip has no room for the plan."""
        try:
            product = self._multiply(choice, self.weights[0])
            self._consume(product, choice is not None)
        except OutOfResources:
            return None
        return product

    def check(self, choice: Choice) -> bool:
        """Whether there is room for a plan. Raises where its product is wrong."""
        product = self.launch(choice)
        if product is None:
            return False
        y = finish(product)
        y = _gated(y) if self.problem.is_gated and choice is None else y
        if not self._is_right(y):
            error = _relative_error(y, self.expected)
            raise EngineError(f"{self.problem} with {choice} is wrong: relative error {error:.3g}")
        return True

    def clock(self, choice: Choice) -> GraphClock:
        """Of a product and its consumer, for every copy of the weights; launch it before."""
        is_combined = choice is not None
        return self._clock(lambda w: self._consume(self._multiply(choice, w), is_combined))

    def microseconds(self, clock: GraphClock) -> float:
        """Of one copy of the weights."""
        seconds = statistics.median(clock.replay() for _ in range(REPEATS))
        return 1e6 * seconds / len(self.weights)

    def time_alone(self, choice: Choice) -> float:
        """Microseconds of one product without its consumer."""
        self.launch(choice)
        clock = self._clock(lambda w: self._multiply(choice, w))
        clock.replay()
        return self.microseconds(clock)

    def _clock(self, call: Callable[[Operand], object]) -> GraphClock:
        def work() -> None:
            for weight in self.weights:
                call(weight)

        return GraphClock(work, self.device)

    def _multiply(self, choice: Choice, weight: Operand) -> Product:
        """What one launch gives; of gate and up, a plan of ours gives silu(gate) * up."""
        x, bias, dtype = self.x, self.bias, torch.bfloat16
        if choice is None:
            product = library_product(x, weight, bias, dtype)
            assert product is not None
            return product
        if self.problem.is_gated:
            amax = self.amax if self.problem.format else None
            return multiply_gated(x, weight, bias, dtype, choice, amax)
        return multiply(x, weight, bias, dtype, choice)

    def _consume(self, product: Product, is_combined: bool) -> Operand:
        format, dtype = self.problem.format, torch.bfloat16
        if not self.problem.is_gated:
            return add_norm(self.residual, product, self.norm, 1e-6, format, dtype, clear=self.amax)
        if not is_combined:
            return swiglu(product, format, dtype, True)
        assert isinstance(product, Tensor)
        return product if format is None else quantize_rows(product, format, self.amax)

    def _operand(self, x: Tensor, *, is_weight: bool) -> Operand:
        format = self.problem.format
        if format is None:
            return x.bfloat16()
        return quantize(x, format) if is_weight else quantize_activation(x, format)

    def _is_right(self, y: Tensor) -> bool:
        format = self.problem.format
        if format is None or not format.is_integer:
            return _relative_error(y, self.expected) < TOLERANCE
        if not self.problem.is_gated:
            return torch.equal(y, self.expected)
        # Gate and up are exact, but exponentials differ in the last bits of FP32: one of BF16.
        return torch.allclose(y.float(), self.expected.float(), rtol=2**-7, atol=1e-30)


def num_copies(num_bytes: int, l2_bytes: int) -> int:
    """Copies of a weight that are gone from L2 when their turn comes again."""
    return 1 if l2_bytes == 0 else min(MOST_COPIES, max(2, math.ceil(2 * l2_bytes / num_bytes)))


def _gated(y: Tensor) -> Tensor:
    """silu(gate) * up of alternating channels, as a plan of ours rounds it."""
    gate, up = y.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (gate / (1 + (-gate).exp()) * up).bfloat16()


def _relative_error(y: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(y - expected, dtype=torch.float32)
    return (difference / torch.linalg.vector_norm(expected, dtype=torch.float32)).item()


def _clone(operand: Operand) -> Operand:
    if isinstance(operand, Tensor):
        return operand.clone()
    return Quantized(operand.codes.clone(), operand.scale.clone(), operand.format)
