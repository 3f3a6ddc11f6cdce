"""`qurl bench gemm`: measures every plan of the linear layers of a model, and writes the table.

A plan is timed with the kernel that consumes its product behind it, because a cut of K moves work
there; in a CUDA graph, over copies of the weights that exceed the L2 cache together. First it must
be right: of integers to the bit.

A model's products in one format are measured together: kernels are compiled by many processes, then
all plans are timed one after the other, then the best ones again with weights prefetched.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from qurl.bench.limits import Speed, find_speed
from qurl.bench.record import Record, describe_machine, locked, replace_text
from qurl.bench.shapes import get_shape
from qurl.bench.table import Column, head, row, split_list
from qurl.bench.timing import GraphClock
from qurl.errors import ConfigError, EngineError
from qurl.quant import FORMATS, Quantized, quantize
from qurl.quant.formats import Format, quantize_activation
from qurl.quant.kernels.gemm import Plan, library_product, multiply, multiply_gated
from qurl.quant.kernels.plans import (
    BUCKETS,
    Choice,
    Plans,
    read_about,
    read_table,
    write_table,
)
from qurl.quant.kernels.target import Target
from qurl.quant.linear import Operand, Product, finish
from qurl.quant.linear import multiply as multiply_by_torch
from qurl.rollout.local.kernels.rows import add_norm, quantize_with, swiglu

KINDS = ("int8", "fp8", "bf16")
PREFETCHES = (2, 4, 8)
MOST_PARTS = 16
MOST_COPIES = 24
REPEATS = 3
HOPELESS = 1.5
"""A plan whose first replay takes so many times that of the best so far is not timed further."""
TOLERANCE = 3e-3
"""Relative error of floating-point products, all elements together: FP8 sums keep 14 bits."""
NUM_KEPT = 5
"""Plans whose times are saved."""

COLUMNS = (
    Column("kind", "kind"),
    Column("role", "role", width=7),
    Column("N", "N", "d", width=6),
    Column("K", "K", "d", width=6),
    Column("M", "M", "d", width=5),
    Column("us", "us", ".1f", width=7),
    Column("alone_us", "alone", ".1f", width=7),
    Column("library_us", "library", ".1f"),
    Column("limit_us", "limit", ".1f", width=7),
    Column("limit_share", "of limit", ".1%"),
    Column("plan", "plan", width=20),
)

TableKey = tuple[str, int, int, int]
"""What is multiplied, N, K, M."""


@dataclass(frozen=True)
class GemmBench:
    """The best plan of each matrix product of a model's layers."""

    model: str = "1.5B,7B"
    """Shapes of Qwen2.5: tiny, 0.5B, 1.5B, 3B, 7B, 14B; several with commas."""
    kind: str = ",".join(KINDS)
    """What is multiplied: int8, fp8, bf16; several with commas."""
    tokens: str = ",".join(map(str, BUCKETS))
    """Numbers of tokens: 16, 32, 64, 128, 256, 512, 1024, 8192; several with commas."""
    table: Path = Path("plans.json")
    """The table of plans; those of other products in it are kept."""
    processes: int = 12
    """That compile kernels at a time."""
    limit_s: float | None = None
    """Stop after so many seconds; what was measured until then is saved."""
    out: Path | None = None
    """JSON file that results are added to; benchmarks/results/gemm.json without it."""


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


@dataclass(frozen=True)
class GemmFigures:
    """What was measured of one product."""

    us: float
    """Of the best plan, with its consumer."""
    alone_us: float | None
    """Without it; None where no time was left for this."""
    library_us: float | None
    """With its consumer; None where the vendor's library has no such product."""
    limit_us: float
    limit_share: float
    plan: str
    """The fields of `qurl.quant.kernels.gemm.Plan` in order, or "library"."""
    num_plans: int
    """That were tried."""
    fastest: dict[str, float]
    """Microseconds of the best ones."""


class Deadline:
    """Seconds that are left, from now on."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end


@dataclass(frozen=True)
class Session:
    """What all products of a command share."""

    device: torch.device
    chip: Chip
    speed: Speed
    known: Mapping[TableKey, Choice]
    """What was best before."""
    record: Record
    table: Path
    machine: Mapping[str, Any]
    deadline: Deadline


def run_gemm(bench: GemmBench) -> list[GemmFigures]:
    """Measure every product; print a row for each, save it, and write its plan into the table."""
    deadline = Deadline(bench.limit_s)
    groups = list_problems(bench)
    device = find_gpu(any(problem.kind == "fp8" for group in groups for problem in group))
    machine = describe_machine(device)
    session = Session(
        device=device,
        chip=Chip.of(device),
        speed=find_speed(device, "table"),
        known={**Plans(Target.of(device)).table, **open_table(bench.table, machine)},
        record=Record("gemm", bench.out),
        table=bench.table,
        machine=machine,
        deadline=deadline,
    )
    print(head(COLUMNS))
    results = []
    with Compilers(bench.processes, device) as compilers:
        for group in groups:
            results += measure_group(session, group, compilers)
    num_problems = sum(map(len, groups))
    if len(results) < num_problems:
        print(f"{len(results)} of {num_problems} products were measured in {bench.limit_s:g} s")
    print(f"saved to {bench.table} and {session.record.path}")
    return results


def list_problems(bench: GemmBench) -> list[list[Problem]]:
    """The products to measure, of each model in each format; refuses what cannot be measured."""
    if bench.processes < 1:
        raise ConfigError(f"--processes {bench.processes} must be at least 1")
    if bench.limit_s is not None and not bench.limit_s > 0:
        raise ConfigError(f"--limit-s {bench.limit_s:g} must be above 0")
    if "fp8-block" in bench.kind.split(","):
        raise ConfigError(
            "--kind fp8-block is not measured, its plans follow a rule of thumb; there are "
            + ", ".join(KINDS)
        )
    shapes = [get_shape(model) for model in split_list("model", bench.model)]
    kinds = split_list("kind", bench.kind, KINDS)
    tokens = [int(m) for m in split_list("tokens", bench.tokens, tuple(map(str, BUCKETS)))]
    return [
        [Problem(role, kind, N, K, M) for role, (N, K) in shape.products.items() for M in tokens]
        for shape, kind in itertools.product(shapes, kinds)
    ]


def find_gpu(needs_fp8: bool) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("qurl bench gemm measures kernels of a GPU, and there is none here")
    device = torch.device("cuda")
    target = Target.of(device)
    if needs_fp8 and not target.has_fp8:
        raise ConfigError(
            f"--kind fp8: {target.name} has no FP8 matrix instructions; use --kind int8,bf16"
        )
    return device


# The table


def open_table(path: Path, machine: Mapping[str, Any]) -> Mapping[TableKey, Choice]:
    """The plans of a table, if there is one; refuses a file that ours cannot be added to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--table {path} cannot be written: {error}") from error
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        plans = read_table(text)
        device = read_about(text)["device"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--table {path} is no table of plans: {error!r}") from error
    if device != machine["device"]:
        raise ConfigError(
            f"--table {path} holds plans of {device}, and this is {machine['device']}; "
            "give another file"
        )
    return plans


def merge_into_table(
    path: Path, plans: Mapping[TableKey, Choice], machine: Mapping[str, Any]
) -> None:
    """Write plans; those of other products stay, whoever wrote them."""
    with locked(path):
        known = read_table(path.read_text(encoding="utf-8")) if path.exists() else {}
        replace_text(path, write_table({**known, **plans}, machine))


# Plans


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


def measure_group(
    session: Session, problems: Sequence[Problem], compilers: Compilers
) -> list[GemmFigures]:
    """Measure until the deadline; what it cuts off is missing from the list."""
    known = session.known
    plans = {p: candidates(p, session.chip, known.get(p.table_key)) for p in problems}
    pairs = [(problem, plan) for problem in problems for plan in plans[problem]]
    compilers.run(pairs, session.deadline)
    trials = []
    for problem in problems:
        if session.deadline.has_passed:
            break
        setup = Setup(problem, session.device, session.chip.l2_bytes)
        trial = measure(setup, plans[problem])
        if not trial.microseconds:
            raise EngineError(f"{problem.name}: none of {len(plans[problem])} plans fits the GPU")
        trials.append(trial)
        _save_plan(session, trial)  # should the command be killed
    if Target.of(session.device).has_pdl:
        pairs = [(trial.problem, plan) for trial in trials for plan in with_prefetch(trial)]
        compilers.run(pairs, session.deadline)
    return [_finish_trial(session, trial) for trial in trials]


def _finish_trial(session: Session, trial: Trial) -> GemmFigures:
    """Try prefetching if there is time, and save what is best."""
    alone_us = None
    if not session.deadline.has_passed:
        setup = Setup(trial.problem, session.device, session.chip.l2_bytes)
        if setup.pdl:
            trial = trial.joined(measure(setup, with_prefetch(trial), has_library=False))
        alone_us = setup.time_alone(trial.best)
    figures = _figures(trial, alone_us, session.speed)
    _save_plan(session, trial)
    settings = {**asdict(trial.problem), "repeats": REPEATS}
    print(row(COLUMNS, settings | asdict(figures)), flush=True)
    session.record.add(
        trial.problem.name,
        session.device,
        settings=settings,
        speed=asdict(session.speed),
        figures=asdict(figures),
    )
    return figures


def _save_plan(session: Session, trial: Trial) -> None:
    merge_into_table(session.table, {trial.problem.table_key: trial.best}, session.machine)


def _figures(trial: Trial, alone_us: float | None, speed: Speed) -> GemmFigures:
    ranked = sorted(trial.microseconds.items(), key=lambda item: item[1])
    us, limit_us = ranked[0][1], 1e6 * trial.problem.limit_seconds(speed)
    return GemmFigures(
        us=us,
        alone_us=alone_us,
        library_us=trial.microseconds.get(None),
        limit_us=limit_us,
        limit_share=limit_us / us,
        plan=describe_plan(trial.best),
        num_plans=trial.num_plans,
        fastest={describe_plan(plan): round(us, 2) for plan, us in ranked[:NUM_KEPT]},
    )


def describe_plan(plan: Choice) -> str:
    return "library" if plan is None else " ".join(map(str, asdict(plan).values()))


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
        self.pdl = Target.of(device).has_pdl
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
            return multiply_gated(x, weight, bias, dtype, choice, amax, pdl=self.pdl)
        return multiply(x, weight, bias, dtype, choice, pdl=self.pdl)

    def _consume(self, product: Product, is_combined: bool) -> Operand:
        format, dtype, pdl = self.problem.format, torch.bfloat16, self.pdl
        if not self.problem.is_gated:
            return add_norm(
                self.residual, product, self.norm, 1e-6, format, dtype, clear=self.amax, pdl=pdl
            )
        if not is_combined:
            return swiglu(product, format, dtype, True, pdl=pdl)
        assert isinstance(product, Tensor)
        return product if format is None else quantize_with(product, self.amax, format, pdl=pdl)

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


# Compiling

Pair = tuple[Problem, Plan]


class Compilers:
    """Processes that fill Triton's cache on disk: a kernel takes a core about a second."""

    def __init__(self, processes: int, device: torch.device) -> None:
        self._compile = functools.partial(_compile, device=device)
        self._pool = multiprocessing.get_context("spawn").Pool(processes)
        self._compiled: set[tuple] = set()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def run(self, pairs: Iterable[Pair], deadline: Deadline) -> None:
        """Compile what the pairs launch, until the deadline."""
        if deadline.has_passed:
            return
        jobs = [shrunk(pair) for pair in covering(pairs, self._compiled)]
        for _ in self._pool.imap_unordered(self._compile, jobs):
            if deadline.has_passed:
                return


def covering(pairs: Iterable[Pair], compiled: set[tuple]) -> Iterator[Pair]:
    """Those that launch a kernel that none before them does, nor is in `compiled`; adds to it."""
    for pair in pairs:
        kernels = kernels_of(*pair)
        if not kernels <= compiled:
            compiled |= kernels
            yield pair


def kernels_of(problem: Problem, plan: Plan) -> set[tuple]:
    """Names of the kernels that a plan launches: all that they are specialized for.

    The product knows whether K is cut, its consumer into how many parts.
    """
    same_cut = dataclasses.replace(plan, splits=min(plan.splits, 1))
    return {
        ("product", problem.kind, problem.is_gated, problem.role == "qkv", same_cut),
        ("consumer", problem.kind, problem.role, problem.N, plan.splits),
    }


def shrunk(pair: Pair) -> Pair:
    """A smaller problem with the same kernels, which know neither M nor K."""
    problem, plan = pair
    return dataclasses.replace(problem, M=plan.tokens, K=1024), plan


def _compile(pair: Pair, device: torch.device) -> None:
    problem, plan = pair
    Setup(problem, device).launch(plan)
