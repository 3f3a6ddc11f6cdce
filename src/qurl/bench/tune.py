"""`qurl tune`: measures plans for the matrix products of a model and writes the best to a table.

The products of one model in one format form a group: many processes compile its kernels, then we
time all plans one after the other, then the best ones again with weights prefetched. Plans are
saved at once, so a command that is killed loses little.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qurl.bench import products
from qurl.bench.products import Chip, Gemm, Plan, Times
from qurl.bench.record import replace_text
from qurl.bench.shapes import SHAPES, split_list
from qurl.errors import ConfigError, EngineError
from qurl.ops.target import Target
from qurl.quant.kernels.plans import (
    BUCKETS,
    Choice,
    Plans,
    TableKey,
    library_agrees,
    open_table,
    user_table,
    whole_kind,
    write_table,
)
from qurl.run.machine import describe_machine

KINDS = ("int8", "fp8", whole_kind("fp8"), "nvfp4", "bf16")
MOST_COMPILERS = 12
HEAD = "kind         role          N       K      M       us  library  plan"
ROW = "{kind:11}  {role:7}  {N:6}  {K:6}  {M:5}  {us:7.1f}  {library:>7}  {plan}"


@dataclass(frozen=True)
class Tune:
    """The fastest plan of each matrix product of a model's layers, on this GPU."""

    model: str = "1.5B,7B"
    """Shapes of Qwen2.5: tiny, 0.5B, 1.5B, 3B, 7B, 14B; several with commas."""
    kind: str = ",".join(KINDS)
    """Numbers to multiply: int8, fp8, fp8-unified (where trainer and engine share their products),
    nvfp4, bf16; several with commas."""
    tokens: str = ",".join(map(str, BUCKETS))
    """Numbers of tokens: 16, 32, 64, 128, 256, 512, 1024, 8192; several with commas."""
    table: Path | None = None
    """Table to add the plans to. By default the one in the user's cache that engines read:
    $XDG_CACHE_HOME or ~/.cache, then qurl/plans/<GPU name>.json."""


@dataclass(frozen=True)
class Tuning:
    """What all products of a command share."""

    device: torch.device
    chip: Chip
    known: Mapping[TableKey, Choice]  # the best plans so far
    table: Path
    machine: Mapping[str, Any]
    compile: Callable[[Iterable[tuple[Gemm, Plan]]], Any]

    def measure(self, problem: Gemm, choices: Sequence[Choice]) -> Times:
        setup = products.GemmRun(problem, self.device, self.chip.l2_bytes)
        return products.measure(setup, choices)

    def save(self, problem: Gemm, times: Times) -> None:
        """Add the best plan to the table, and keep those of other products."""
        best = products.best_of(times)
        plans = {**known_plans(self.table, self.machine), problem.table_key: best}
        replace_text(self.table, write_table(plans, self.machine))


def run_tune(options: Tune) -> None:
    """Measure every product, print a row for each and save its plan."""
    groups = list_problems(options)
    device = find_gpu(any(p.kind.startswith("fp8") for group in groups for p in group))
    machine = describe_machine(device)
    table = options.table or user_table(machine["device"])
    known = {**Plans(Target.of(device)).table, **known_plans(table, machine)}
    processes = min(MOST_COMPILERS, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:

        def compile(pairs: Iterable[tuple[Gemm, Plan]]) -> None:
            # One job for all M and K, which share their kernels.
            jobs = {(p.role, p.kind, p.N, plan): (p, plan, device) for p, plan in pairs}
            pool.starmap(products.compile_plan, jobs.values(), chunksize=1)

        session = Tuning(device, Chip.of(device), known, table, machine, compile)
        print(HEAD)
        for group in groups:
            measure_group(session, group)
    print(f"saved to {table}")


def list_problems(options: Tune) -> list[list[Gemm]]:
    """The products to measure, one group for each model and format."""
    shapes = [SHAPES[model] for model in split_list("model", options.model)]
    kinds = split_list("kind", options.kind, KINDS)
    tokens = [int(m) for m in split_list("tokens", options.tokens, tuple(map(str, BUCKETS)))]
    return [
        [Gemm(role, kind, N, K, M) for role, (N, K) in shape.products.items() for M in tokens]
        for shape, kind in itertools.product(shapes, kinds)
    ]


def find_gpu(needs_fp8: bool) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("qurl tune measures kernels of a GPU, and there is none here")
    device = torch.device("cuda")
    target = Target.of(device)
    if needs_fp8 and not target.has_fp8:
        raise ConfigError(
            f"--kind fp8: {target.name} has no FP8 matrix instructions; use --kind int8,nvfp4,bf16"
        )
    return device


def known_plans(path: Path, machine: Mapping[str, Any]) -> Mapping[TableKey, Choice]:
    """The plans of a table that may not exist yet; raises if ours cannot be added to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--table {path} cannot be written: {error}") from error
    if not path.exists():
        return {}
    plans = open_table(path)
    device = json.loads(path.read_text(encoding="utf-8")).get("about", {}).get("device")
    if device != machine["device"]:
        raise ConfigError(
            f"--table {path} holds plans of {device}, and this is {machine['device']}; "
            "give another file"
        )
    return plans


def measure_group(session: Tuning, problems: Sequence[Gemm]) -> None:
    chip, known = session.chip, session.known
    plans = {p: products.candidates(p, chip, known.get(p.table_key)) for p in problems}
    session.compile((p, plan) for p in problems for plan in plans[p])
    measured: dict[Gemm, Times] = {}
    has_unified_library = library_agrees("fp8", Target.of(session.device))
    for problem in problems:
        library = [None] if has_unified_library or not problem.is_unified else []
        measured[problem] = times = session.measure(problem, [*library, *plans[problem]])
        if not times:
            raise EngineError(f"none of {len(plans[problem])} plans of {problem} fits the GPU")
        session.save(problem, times)
    has_pdl = Target.of(session.device).has_pdl
    ahead = {p: products.with_prefetch(times) if has_pdl else [] for p, times in measured.items()}
    session.compile((p, plan) for p in ahead for plan in ahead[p])
    for problem, times in measured.items():
        if ahead[problem]:
            times = {**times, **session.measure(problem, ahead[problem])}
            session.save(problem, times)
        best, library_us = products.best_of(times), times.get(None)
        figures = {
            "us": times[best],
            "library": "-" if library_us is None else f"{library_us:.1f}",
            "plan": "library" if best is None else " ".join(map(str, asdict(best).values())),
        }
        print(ROW.format(**asdict(problem), **figures), flush=True)
