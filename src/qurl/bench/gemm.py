"""`qurl bench gemm`: measures every plan of the linear layers of a model, and writes the table.

A model's products in one format are measured together: kernels are compiled by many processes, then
all plans are timed one after the other, then the best ones again with weights prefetched.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qurl.bench.compilers import Compilers, Deadline
from qurl.bench.limits import Speed, find_speed
from qurl.bench.products import (
    REPEATS,
    Chip,
    Problem,
    Setup,
    Trial,
    candidates,
    measure,
    with_prefetch,
)
from qurl.bench.record import Record, describe_machine, locked, replace_text
from qurl.bench.shapes import get_shape
from qurl.bench.table import Column, head, row, split_list
from qurl.errors import ConfigError, EngineError
from qurl.ops.target import Target
from qurl.quant.kernels.plans import (
    BUCKETS,
    Choice,
    Plans,
    TableKey,
    read_about,
    read_table,
    write_table,
)

KINDS = ("int8", "fp8", "bf16")
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
        if Target.of(session.device).has_pdl:
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
