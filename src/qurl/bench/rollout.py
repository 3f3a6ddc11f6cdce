"""`qurl bench rollout`: tokens per second of whole generate calls, against the hardware's limit.

Each configuration is checked on a short run, then measured, then checked on what was measured.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from qurl.bench.contenders import Contender, EngineContender, Setup
from qurl.bench.judge import Judge, check_completions
from qurl.bench.limits import Speed, Storage, find_speed, rollout_limit
from qurl.bench.profile import describe_profile, profile_decode
from qurl.bench.record import Record
from qurl.bench.shapes import Shape, build_model, get_shape
from qurl.bench.table import Column, head, row, split_list
from qurl.bench.timing import paused_gc, time_call
from qurl.bench.workload import Workload, get_workload, make_problems, sampling_params
from qurl.errors import ConfigError
from qurl.ops.device import pick_device
from qurl.ops.target import Target
from qurl.quant.formats import FORMATS

SHORT = 64
"""New tokens of the run that is checked first."""

WARM_UP = 8
"""New tokens of each warm-up."""

COLUMNS = (
    Column("engine", "engine"),
    Column("model", "model"),
    Column("quant", "quant", width=9),
    Column("kv", "kv", width=4),
    Column("workload", "workload", width=12),
    Column("tokens_per_s", "tokens/s", ",.0f", width=9),
    Column("ms_per_step", "ms/step", ".3f", width=9),
    Column("limit_tokens_per_s", "limit", ",.0f", width=9),
    Column("limit_share", "of limit", ".1%"),
    Column("logprob_gap", "|dlogp|", ".4f"),
)


@dataclass(frozen=True)
class RolloutBench:
    """Tokens per second of the local engine, and of another one for comparison."""

    model: str = "1.5B"
    """Shapes of Qwen2.5 with random weights: tiny, 0.5B, 1.5B, 3B, 7B, 14B; several with commas."""
    quant: str = "none,int8"
    """Formats: none, int8, fp8, fp8-block, int6, int4; several with commas."""
    kv: str = "none"
    """Formats of the KV cache: none, fp8; several with commas."""
    workload: str = "A"
    """A (256 sequences, 512 + 1024 tokens), B (64), C (64, 512 + 8192), Cp (64, 512 + 4096);
    several with commas."""
    prompts: int | None = None
    """Prompts, instead of the workload's."""
    group: int | None = None
    """Completions per prompt, instead of the workload's."""
    prompt_tokens: int | None = None
    """Tokens of a prompt, instead of the workload's."""
    new_tokens: int | None = None
    """Tokens of a completion, instead of the workload's."""
    against: Literal["none", "hf"] = "none"
    """Also measure this engine: hf is transformers, which is slow, so shorten the workload."""
    repeats: int = 3
    """Measured runs; the median counts."""
    warm_up: Literal["lengths", "full"] = "lengths"
    """Warm up with a few steps at each length that uses another CUDA graph, or with a full run."""
    profile: bool = False
    """Add the GPU's busy time of a decode step, by kind of kernel."""
    bandwidth: float | Literal["table", "measured"] = "table"
    """Memory bandwidth of the limit: in TB/s, from the table of devices, or measured by a copy."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU if there is one."""
    seed: int = 0
    """Seed of weights, prompts and samples."""
    out: Path | None = None
    """JSON file to add results to; by default benchmarks/results/rollout.json."""


@dataclass(frozen=True)
class Figures:
    """The measurements of one configuration."""

    seconds: tuple[float, ...]
    """Time of each generate call, prefill included."""
    tokens_per_s: float
    ms_per_step: float
    limit_tokens_per_s: float
    limit_share: float
    logprob_gap: float | None
    """Mean |difference| of full-length completions to the trainer's forward; None for an engine
    with weights of its own."""
    logprob_gap_short: float | None
    """The same for the short run."""


@dataclass(frozen=True)
class Session:
    """What all configurations of a command share."""

    bench: RolloutBench
    device: torch.device
    speed: Speed
    record: Record
    plans: str | None = None
    """Source of the local engine's plans; None on a CPU."""


def run_rollout(bench: RolloutBench) -> list[Figures]:
    """Measure every configuration in turn; print a row for each and save it at once."""
    device = pick_device(bench.device)
    setups, workloads = plan(bench, device)
    record = Record("rollout", bench.out)
    session = Session(
        bench, device, find_speed(device, bench.bandwidth), record, find_plans(device)
    )
    print(head(COLUMNS))
    results = []
    for shape, group in itertools.groupby(setups, key=lambda setup: setup.shape):
        results += _measure_shape(session, shape, list(group), workloads)
    print(f"saved to {session.record.path}")
    return results


def find_plans(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    from qurl.quant.kernels.plans import Plans  # needs Triton

    source = Plans(Target.of(device)).source
    print(f"plans of products: {source}")
    return source


def plan(bench: RolloutBench, device: torch.device) -> tuple[list[Setup], list[Workload]]:
    """The engines to build and the workloads for each; raises if one cannot be measured."""
    if bench.repeats < 1:
        raise ConfigError(f"--repeats {bench.repeats} must be at least 1")
    if bench.profile and device.type != "cuda":
        raise ConfigError("--profile traces a GPU, and this runs on a CPU")
    workloads = [
        get_workload(
            name,
            num_prompts=bench.prompts,
            group_size=bench.group,
            prompt_tokens=bench.prompt_tokens,
            new_tokens=bench.new_tokens,
        )
        for name in split_list("workload", bench.workload)
    ]
    setups = [
        Setup(engine, get_shape(model), quant, kv)
        for model in split_list("model", bench.model)
        for quant in split_list("quant", bench.quant, ("none", *FORMATS))
        for kv in split_list("kv", bench.kv, ("none", "fp8"))
        for engine in (("local",) if bench.against == "none" else ("local", bench.against))
    ]
    if any(setup.engine == "hf" and setup.kv != "none" for setup in setups):
        raise ConfigError("--against hf keeps keys and values in full precision: use --kv none")
    return setups, workloads


def _measure_shape(
    session: Session, shape: Shape, setups: Sequence[Setup], workloads: Sequence[Workload]
) -> list[Figures]:
    model = build_model(shape, session.device, seed=session.bench.seed)
    results = []
    for setup in setups:
        contender = EngineContender(setup, model, max(w.num_sequences for w in workloads))
        judge = Judge(model, setup)
        results += [measure_setup(session, contender, setup, w, judge) for w in workloads]
        del contender
        gc.collect()  # engine n is gone before engine n + 1 is built
        if session.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def measure_setup(
    session: Session, contender: Contender, setup: Setup, workload: Workload, judge: Judge | None
) -> Figures:
    """Measure one workload, print its row and save it."""
    figures = measure_rollout(session, contender, setup, workload, judge)
    bench = session.bench
    settings = {
        **{"engine": setup.engine, "model": setup.shape.name, "quant": setup.quant, "kv": setup.kv},
        **{"workload": workload.name, **workload.sizes},
        **{"repeats": bench.repeats, "warm_up": bench.warm_up, "seed": bench.seed},
        "garbage_collection": "off",
    }
    print(row(COLUMNS, settings | asdict(figures)), flush=True)
    facts = contender.facts()
    if setup.engine == "local" and session.plans:
        facts["plans"] = session.plans
    more: dict[str, Any] = {"engine": facts}
    try:
        if bench.profile:
            more["profile"] = _profile(contender, setup, workload, bench.seed)
    finally:  # a failed profile must not lose the measurement
        session.record.add(
            setup.key(workload),
            session.device,
            settings=settings,
            speed=asdict(session.speed),
            figures=asdict(figures),
            **more,
        )
    return figures


def measure_rollout(
    session: Session, contender: Contender, setup: Setup, workload: Workload, judge: Judge | None
) -> Figures:
    """Check on a short run, warm up, measure, and check what was measured."""
    bench, device = session.bench, session.device
    short = replace(workload, new_tokens=min(SHORT, workload.new_tokens))
    _, gap_short = _run(contender, setup, short, bench.seed, device, judge)
    for run in [workload] if bench.warm_up == "full" else warm_ups(workload):
        _run(contender, setup, run, bench.seed + 1, device)
    runs = [
        _run(contender, setup, workload, bench.seed + 2 + i, device, judge if i == 0 else None)
        for i in range(bench.repeats)
    ]
    seconds = tuple(seconds for seconds, _ in runs)
    median = statistics.median(seconds)
    storage = Storage.of(setup.quant, setup.kv, device.type)
    limit = rollout_limit(setup.shape, storage, session.speed, workload)
    return Figures(
        seconds=seconds,
        tokens_per_s=workload.num_new_tokens / median,
        ms_per_step=1e3 * median / workload.new_tokens,
        limit_tokens_per_s=workload.num_new_tokens / limit,
        limit_share=limit / median,
        logprob_gap=runs[0][1],
        logprob_gap_short=gap_short,
    )


def warm_ups(workload: Workload) -> list[Workload]:
    """Short runs that end where the workload does and where its contexts reach a power of two.

    The longest comes first, so that the engine allocates what the others need.
    """
    first, last = workload.prompt_tokens, workload.prompt_tokens + workload.new_tokens
    powers = (1 << n for n in range(last.bit_length()))
    ends = [last, *(end for end in powers if first + WARM_UP <= end < last)]
    steps = min(WARM_UP, workload.new_tokens)
    return [replace(workload, prompt_tokens=end - steps, new_tokens=steps) for end in ends]


def _run(
    contender: Contender,
    setup: Setup,
    workload: Workload,
    seed: int,
    device: torch.device,
    judge: Judge | None = None,
) -> tuple[float, float | None]:
    """Seconds of one generate call, and the log-prob gap if there is a judge."""
    problems = make_problems(workload, setup.shape.vocabulary, seed)
    params = sampling_params(workload, seed)
    with paused_gc():
        seconds, result = time_call(lambda: contender.generate(problems, params), device)
    groups = contender.read(result)
    check_completions(groups, workload)
    return seconds, judge.gap(problems, groups) if judge else None


def _profile(contender: Contender, setup: Setup, workload: Workload, seed: int) -> dict[str, Any]:
    def generate(new_tokens: int) -> Any:
        run = replace(workload, new_tokens=new_tokens)
        problems = make_problems(run, setup.shape.vocabulary, seed)
        return contender.generate(problems, sampling_params(run, seed))

    profile = profile_decode(generate)
    print(describe_profile(profile), flush=True)
    return asdict(profile)
