"""`qurl tune`: measures plans for the matrix products of a model and writes the best to a table.

The products of one model in one format form a group: many processes compile its kernels, then we
time all plans one after the other, then the best ones again with weights prefetched.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qurl.bench.products import (
    Chip,
    Compilers,
    Problem,
    Setup,
    Times,
    best_of,
    candidates,
    measure,
    with_prefetch,
)
from qurl.bench.record import describe_machine, locked, replace_text
from qurl.bench.shapes import get_shape
from qurl.bench.table import Column, head, row, split_list
from qurl.errors import ConfigError, EngineError
from qurl.ops.target import Target
from qurl.quant.kernels.plans import (
    BUCKETS,
    Choice,
    Plans,
    TableKey,
    open_table,
    user_table,
    write_table,
)

KINDS = ("int8", "fp8", "bf16")
COLUMNS = (
    Column("kind", "kind"),
    Column("role", "role", width=7),
    Column("N", "N", "d", width=6),
    Column("K", "K", "d", width=6),
    Column("M", "M", "d", width=5),
    Column("us", "us", ".1f", width=7),
    Column("library_us", "library", ".1f"),
    Column("plan", "plan", width=20),
)


@dataclass(frozen=True)
class Tune:
    """The fastest plan of each matrix product of a model's layers, on this GPU."""

    model: str = "1.5B,7B"
    """Shapes of Qwen2.5: tiny, 0.5B, 1.5B, 3B, 7B, 14B; several with commas."""
    kind: str = ",".join(KINDS)
    """Numbers to multiply: int8, fp8, bf16; several with commas."""
    tokens: str = ",".join(map(str, BUCKETS))
    """Numbers of tokens: 16, 32, 64, 128, 256, 512, 1024, 8192; several with commas."""
    table: Path | None = None
    """Table to add the plans to. By default the one in the user's cache that engines read:
    $XDG_CACHE_HOME or ~/.cache, then qurl/plans/<GPU name>.json."""
    processes: int = 12
    """Kernels to compile at a time."""
    limit_s: float = math.inf
    """Stop after this many seconds and keep what was measured."""


@dataclass(frozen=True)
class Session:
    """What all products of a command share."""

    device: torch.device
    chip: Chip
    known: Mapping[TableKey, Choice]
    """The best plans so far."""
    table: Path
    machine: Mapping[str, Any]
    deadline: float

    def setup(self, problem: Problem) -> Setup:
        return Setup(problem, self.device, self.chip.l2_bytes)


def run_tune(options: Tune) -> int:
    """Measure every product, print a row for each and save its plan; returns how many."""
    deadline = time.monotonic() + options.limit_s
    groups = list_problems(options)
    device = find_gpu(any(problem.kind == "fp8" for group in groups for problem in group))
    machine = describe_machine(device)
    table = options.table or user_table(machine["device"])
    session = Session(
        device=device,
        chip=Chip.of(device),
        known={**Plans(Target.of(device)).table, **known_plans(table, machine)},
        table=table,
        machine=machine,
        deadline=deadline,
    )
    print(head(COLUMNS))
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        compilers = Compilers(pool, device)
        num_measured = sum(measure_group(session, group, compilers) for group in groups)
    num_problems = sum(map(len, groups))
    if num_measured < num_problems:
        print(f"{num_measured} of {num_problems} products were measured in {options.limit_s:g} s")
    print(f"saved to {table}")
    return num_measured


def list_problems(options: Tune) -> list[list[Problem]]:
    """The products to measure, one group for each model and format."""
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes} must be at least 1")
    shapes = [get_shape(model) for model in split_list("model", options.model)]
    kinds = split_list("kind", options.kind, KINDS)
    tokens = [int(m) for m in split_list("tokens", options.tokens, tuple(map(str, BUCKETS)))]
    return [
        [Problem(role, kind, N, K, M) for role, (N, K) in shape.products.items() for M in tokens]
        for shape, kind in itertools.product(shapes, kinds)
    ]


def find_gpu(needs_fp8: bool) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("qurl tune measures kernels of a GPU, and there is none here")
    device = torch.device("cuda")
    target = Target.of(device)
    if needs_fp8 and not target.has_fp8:
        raise ConfigError(
            f"--kind fp8: {target.name} has no FP8 matrix instructions; use --kind int8,bf16"
        )
    return device


# The table


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


def save_plan(session: Session, problem: Problem, times: Times) -> None:
    """Add the best plan to the table, and keep those of other products."""
    with locked(session.table):
        known = known_plans(session.table, session.machine)
        plans = {**known, problem.table_key: best_of(times)}
        replace_text(session.table, write_table(plans, session.machine))


# Measuring


def measure_group(session: Session, problems: Sequence[Problem], compilers: Compilers) -> int:
    """Measure until the deadline; returns the number of products measured."""
    known, deadline = session.known, session.deadline
    plans = {p: candidates(p, session.chip, known.get(p.table_key)) for p in problems}
    compilers.run([(p, plan) for p in problems for plan in plans[p]], deadline)
    measured: dict[Problem, Times] = {}
    for problem in problems:
        if time.monotonic() >= deadline:
            break
        times = measure(session.setup(problem), plans[problem])
        if not times:
            raise EngineError(f"none of {len(plans[problem])} plans of {problem} fits the GPU")
        measured[problem] = times
        save_plan(session, problem, times)  # in case the command is killed
    has_pdl = Target.of(session.device).has_pdl
    ahead = {p: with_prefetch(times) if has_pdl else [] for p, times in measured.items()}
    compilers.run([(p, plan) for p in ahead for plan in ahead[p]], deadline)
    for problem, times in measured.items():
        if ahead[problem] and time.monotonic() < deadline:
            more = measure(session.setup(problem), ahead[problem], has_library=False)
            times = {**times, **more}
            save_plan(session, problem, times)
        best = best_of(times)
        plan = "library" if best is None else " ".join(map(str, asdict(best).values()))
        figures = {"us": times[best], "library_us": times.get(None), "plan": plan}
        print(row(COLUMNS, asdict(problem) | figures), flush=True)
    return len(measured)
