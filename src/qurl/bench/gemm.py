"""`qurl bench gemm`: measures every plan of the linear layers of a model, and writes the table.

A plan is timed with the kernel that consumes its product behind it, because a cut of K moves work
there; in a CUDA graph, over copies of the weights that exceed the L2 cache together. Every plan is
checked against float64 first, and for integers to the bit.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from qurl.bench.record import describe_machine
from qurl.bench.timing import measure_graph
from qurl.errors import EngineError
from qurl.quant import FORMATS, Quantized, quantize
from qurl.quant.formats import Format, quantize_activation
from qurl.quant.kernels.gemm import Plan, library_product, multiply, multiply_gated
from qurl.quant.kernels.plans import BUCKETS, Choice, read_table, write_table
from qurl.quant.kernels.target import Target
from qurl.quant.linear import Operand, Product, finish
from qurl.rollout.local.kernels.rows import add_norm, quantize_with, swiglu

LAYERS = {
    "0.5B": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)),
    "3B": ((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)),
    "7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "14B": ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
}
"""(N, K) of qkv, o, gate_up and down of Qwen2.5."""
_BEYOND_L2 = 120 * 2**20
_MOST_COPIES = 24
_SHARED_MEMORY = 225 * 2**10
_NUM_SMS = 132


@dataclass(frozen=True)
class GemmBench:
    """Which products are measured."""

    models: tuple[str, ...] = ("1.5B", "7B")
    """Shapes: 0.5B, 1.5B, 3B, 7B, 14B."""
    kinds: tuple[str, ...] = ("int8", "fp8", "bf16")
    """What is multiplied."""
    tokens: tuple[int, ...] = BUCKETS
    """Numbers of tokens M."""
    out: str = "plans.json"
    """The table; entries of other products in it are kept."""
    processes: int = 12
    """Compiling kernels at a time."""


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
    def limit_us(self) -> float:
        """Reading the weights once at 4.3 TB/s, or multiplying at the dense rate of an H200."""
        is_wide = self.kind == "bf16"
        seconds = self.N * self.K * (2 if is_wide else 1) / 4.3e12
        return 1e6 * max(seconds, 2 * self.M * self.N * self.K / (790e12 if is_wide else 1580e12))


def run_gemm(bench: GemmBench) -> dict:
    """Measure, print and write the table; returns all that was measured."""
    device = torch.device("cuda")
    problems = [
        Problem(role, kind, N, K, M)
        for model, kind in itertools.product(bench.models, bench.kinds)
        for role, (N, K) in zip(("qkv", "o", "gate_up", "down"), LAYERS[model], strict=True)
        for M in bench.tokens
    ]
    compile_all({(p.kind, plan) for p in problems for plan in candidates(p)}, bench.processes)
    out = Path(bench.out)
    plans = dict(read_table(out.read_text())) if out.exists() else {}
    rows = []
    for problem in problems:
        setup = Setup(problem, device)
        best = measure(setup)
        plans[problem.kind, problem.N, problem.K, problem.M] = best[0][1]
        rows.append(_row(problem, best) | {"alone_us": setup.time_alone(best[0][1])})
        print(_line(rows[-1]), flush=True)
        about = {key: str(value) for key, value in describe_machine(device).items()}
        out.write_text(write_table(plans, about))
    return {"machine": describe_machine(device), "rows": rows}


def candidates(problem: Problem) -> Iterator[Plan]:
    """Plans worth measuring, without prefetch.

    Stages follow from how many programs are to share a multiprocessor, and the cut of K from how
    many there are to be in all, so that they come in one wave.
    """
    M, N, K = problem.M, problem.N, problem.K
    itemsize = 2 if problem.kind == "bf16" else 1
    token_tiles = {t for t in (16, 32, 64, 128, 256) if t <= M and (t == M or t >= 64)}
    if M > 256:
        token_tiles = {128, 256}
    for tokens, channels, depth_bytes in itertools.product(token_tiles, (64, 128), (128, 256)):
        depth = depth_bytes // itemsize
        tiles = -(-M // tokens) * -(-N // channels)
        warps = 8 if tokens * channels > 64 * 128 else 4
        for num_programs in (1, 2, 3, 4, 5):
            stages = min(8, _SHARED_MEMORY // num_programs // ((tokens + channels) * depth_bytes))
            if stages < 2 or num_programs * warps > 24:
                continue
            splits = num_programs * _NUM_SMS // tiles
            yield Plan(tokens, channels, depth, 0, warps, stages)
            if problem.role != "gate_up" and splits > 1 and K // depth >= 2 * splits:
                yield Plan(tokens, channels, depth, splits, warps, stages)


def measure(setup: Setup) -> list[tuple[float, Choice]]:
    """(microseconds with the consumer, plan), best first; None is the vendor's library."""
    timed: list[tuple[float, Choice]] = []
    plans: list[Choice] = list(dict.fromkeys(candidates(setup.problem)))
    for plan in [None, *plans] if setup.library is not None else plans:
        timed.append((setup.time(plan), plan))
    timed.sort(key=lambda pair: pair[0])
    best = next((plan for _, plan in timed if plan is not None), None)
    if best is not None and setup.pdl:
        for prefetch in (2, 4, 8):
            plan = Plan(**{**asdict(best), "prefetch": prefetch})
            timed.append((setup.time(plan), plan))
    return sorted(timed, key=lambda pair: pair[0])


class Setup:
    """Weights, inputs and the consumer of one problem."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.pdl = Target.of(device).has_pdl
        size = problem.N * problem.K * (2 if problem.kind == "bf16" else 1)
        copies = min(_MOST_COPIES, max(3, math.ceil(_BEYOND_L2 / size)))
        first = self._operand(torch.randn(problem.N, problem.K, device=device), is_weight=True)
        self.weights = [first, *(_clone(first) for _ in range(copies - 1))]
        self.x = self._operand(torch.randn(problem.M, problem.K, device=device), is_weight=False)
        self.bias = (
            torch.randn(problem.N, device=device).bfloat16() if problem.role == "qkv" else None
        )
        self.residual = torch.randn(problem.M, problem.N, device=device)
        self.norm = torch.ones(problem.N, device=device)
        self.amax = torch.zeros(problem.M, device=device)
        self.expected = self._reference(first)
        self.library = library_product(self.x, first, self.bias, torch.bfloat16)

    def time(self, plan: Choice) -> float:
        """Microseconds of one product and its consumer."""
        self._check(plan)
        return self._time(lambda weight: self._consume(plan, weight))

    def time_alone(self, plan: Choice) -> float:
        """Microseconds of one product."""
        return self._time(lambda weight: self._multiply(plan, weight))

    def _time(self, call: Callable[[Operand], object]) -> float:
        def work() -> None:
            for weight in self.weights:
                call(weight)

        timing = measure_graph(work, self.residual.device, calls=1, repeats=3)
        return timing.median * 1e6 / len(self.weights)

    def _consume(self, plan: Choice, weight: Operand) -> Operand:
        format, dtype, pdl = self.problem.format, torch.bfloat16, self.pdl
        if self.problem.role != "gate_up":
            product = self._multiply(plan, weight)
            clear = self.amax
            return add_norm(
                self.residual, product, self.norm, 1e-6, format, dtype, clear=clear, pdl=pdl
            )
        if plan is None:
            return swiglu(self._multiply(None, weight), format, dtype, True, pdl=pdl)
        if format is None:
            return multiply_gated(self.x, weight, None, dtype, plan, pdl=pdl)
        y = multiply_gated(self.x, weight, None, dtype, plan, self.amax, pdl=pdl)
        return quantize_with(y, self.amax, format, pdl=pdl)

    def _multiply(self, plan: Choice, weight: Operand) -> Product:
        if plan is not None:
            return multiply(self.x, weight, self.bias, torch.bfloat16, plan, pdl=self.pdl)
        product = library_product(self.x, weight, self.bias, torch.bfloat16)
        assert product is not None
        return product

    def _operand(self, x: Tensor, *, is_weight: bool) -> Operand:
        format = self.problem.format
        if format is None:
            return x.bfloat16()
        return quantize(x, format) if is_weight else quantize_activation(x, format)

    def _reference(self, weight: Operand) -> Tensor:
        codes = [t.codes if isinstance(t, Quantized) else t for t in (self.x, weight)]
        y = (codes[0].double() @ codes[1].double().T).float()
        if isinstance(self.x, Quantized) and isinstance(weight, Quantized):
            y = y * self.x.scale * weight.scale.T
        return (y if self.bias is None else y + self.bias.float()).bfloat16()

    def _check(self, plan: Choice) -> None:
        y = finish(self._multiply(plan, self.weights[0]))
        error = ((y - self.expected).float().norm() / self.expected.float().norm()).item()
        is_exact = self.problem.kind != "int8" or torch.equal(y, self.expected)
        if not (is_exact and error < 3e-3):
            raise EngineError(f"{self.problem} with {plan} is wrong: relative error {error:.3g}")


def compile_all(plans: set[tuple[str, Plan]], processes: int) -> None:
    """Fill Triton's cache: one core compiles a kernel in half a second, and there are hundreds."""
    kernels = {(k, Plan(**{**asdict(p), "splits": min(p.splits, 2)})) for k, p in plans}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, sorted(kernels, key=str), chunksize=4)


def _compile(item: tuple[str, Plan]) -> None:
    kind, plan = item
    device = torch.device("cuda")
    x, weight = (_zeros(kind, rows, device) for rows in (plan.tokens, 256))
    for has_bias in (False, True) if plan.splits == 0 else (False,):
        bias = torch.zeros(256, device=device).bfloat16() if has_bias else None
        multiply(x, weight, bias, torch.bfloat16, plan, pdl=Target.of(device).has_pdl)
    torch.cuda.synchronize()


def _zeros(kind: str, rows: int, device: torch.device) -> Operand:
    zeros, format = torch.zeros(rows, 1024, device=device), FORMATS.get(kind)
    if format is None:
        return zeros.bfloat16()
    return Quantized(zeros.to(format.dtype), torch.ones(rows, 1, device=device), format)


def _clone(operand: Operand) -> Operand:
    if isinstance(operand, Tensor):
        return operand.clone()
    return Quantized(operand.codes.clone(), operand.scale.clone(), operand.format)


def _row(problem: Problem, timed: Sequence[tuple[float, Choice]]) -> dict:
    library = next((us for us, plan in timed if plan is None), None)
    us, plan = timed[0]
    return {
        **asdict(problem),
        "us": us,
        "library_us": library,
        "limit_us": problem.limit_us,
        "plan": None if plan is None else asdict(plan),
        "all": [
            (round(us, 2), None if p is None else list(asdict(p).values())) for us, p in timed[:12]
        ],
    }


def _line(row: dict) -> str:
    plan = "library" if row["plan"] is None else " ".join(map(str, row["plan"].values()))
    library = f"{row['library_us']:7.1f}" if row["library_us"] else "      -"
    return (
        f"{row['kind']:5} {row['role']:8} {row['N']:6} {row['K']:6} M={row['M']:<5}"
        f"{row['us']:8.1f} us  alone {row['alone_us']:6.1f}"
        f"  library {library}  limit {row['limit_us']:6.1f}  {plan}"
    )
