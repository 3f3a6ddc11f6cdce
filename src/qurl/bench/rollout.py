"""`qurl bench rollout`: tokens per second of whole generate calls, against the hardware's limit.

Each configuration is checked on a short run, then measured, then checked on what was measured.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qurl.bench.contenders import Contender, Setup, build_contender, check_setup
from qurl.bench.judge import Judge, check_completions
from qurl.bench.limits import Speed, Storage, find_speed, rollout_limit
from qurl.bench.profile import describe_profile, profile_decode
from qurl.bench.record import Record
from qurl.bench.shapes import Shape, build_model, get_shape
from qurl.bench.table import Column, head, row, split_list
from qurl.bench.timing import Timing, paused_gc, time_call
from qurl.bench.workload import Workload, get_workload, make_problems, sampling_params
from qurl.errors import ConfigError
from qurl.ops.device import pick_device
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
    against: Literal["none", "vllm", "hf"] = "none"
    """Measure this engine too: vllm (installed apart) or hf (transformers; slow, so shorten)."""
    repeats: int = 3
    """Measured runs; the median counts."""
    warm_up: Literal["lengths", "full"] = "lengths"
    """What comes before the measured runs: a few steps at each length from which on engines use
    another CUDA graph, or a whole run."""
    profile: bool = False
    """Add the GPU's busy time of a decode step, by kind of kernel."""
    bandwidth: float | Literal["table", "measured"] = "table"
    """Of the limit: TB/s, or from the table of devices, or measured now by a copy."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU where there is one."""
    seed: int = 0
    """Of weights, prompts and samples."""
    out: Path | None = None
    """JSON file that results are added to; benchmarks/results/rollout.json without it."""


@dataclass(frozen=True)
class Figures:
    """What was measured of one configuration."""

    seconds: tuple[float, ...]
    """Of each generate call, prefill included."""
    tokens_per_s: float
    ms_per_step: float
    limit_tokens_per_s: float
    limit_share: float
    logprob_gap: float | None
    """Mean |difference| of full-length completions to the trainer's forward; None for an engine
    that has weights of its own."""
    logprob_gap_short: float | None
    """The same of the short run."""


@dataclass(frozen=True)
class Session:
    """What all configurations of a command share."""

    bench: RolloutBench
    device: torch.device
    speed: Speed
    record: Record


def run_rollout(bench: RolloutBench) -> list[Figures]:
    """Measure every configuration in turn; print a row for each and save it at once."""
    device = pick_device(bench.device)
    setups, workloads = plan(bench, device)
    record = Record("rollout", bench.out)
    session = Session(bench, device, find_speed(device, bench.bandwidth), record)
    print(head(COLUMNS))
    results = []
    for shape, group in itertools.groupby(setups, key=lambda setup: setup.shape):
        results += _measure_shape(session, shape, list(group), workloads)
    print(f"saved to {record.path}")
    return results


def plan(bench: RolloutBench, device: torch.device) -> tuple[list[Setup], list[Workload]]:
    """Every engine to build and every workload for each; refuses what cannot be measured."""
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
    engines = ("local",) if bench.against == "none" else ("local", bench.against)
    setups = [
        Setup(engine, get_shape(model), quant, kv)
        for model in split_list("model", bench.model)
        for quant in split_list("quant", bench.quant, ("none", *FORMATS))
        for kv in split_list("kv", bench.kv, ("none", "fp8"))
        for engine in engines
    ]
    if bench.against == "vllm" and len(setups) > len(engines):
        raise ConfigError(
            "--against vllm takes one model, one quant and one kv per command: vLLM does not give "
            "its memory back before the process ends"
        )
    for setup in setups:
        check_setup(setup)
    return setups, workloads


def _measure_shape(
    session: Session, shape: Shape, setups: Sequence[Setup], workloads: Sequence[Workload]
) -> list[Figures]:
    model = build_model(shape, session.device, seed=session.bench.seed)
    results = []
    for setup in setups:
        results += _measure_setup(session, setup, model, workloads)
        gc.collect()  # engine n is gone before engine n + 1 is built
        if session.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def _measure_setup(
    session: Session, setup: Setup, model: Any, workloads: Sequence[Workload]
) -> list[Figures]:
    contender = build_contender(setup, model, workloads)
    judge = None if setup.engine == "vllm" else Judge(model, setup)
    results = []
    for workload in workloads:
        figures = measure_rollout(session, contender, setup, workload, judge)
        settings = _settings(setup, workload, session.bench)
        print(row(COLUMNS, settings | dataclasses.asdict(figures)), flush=True)
        more: dict[str, Any] = {"engine": contender.facts()}
        try:
            if session.bench.profile:
                more["profile"] = _profile(contender, setup, workload, session.bench.seed)
        finally:  # a profile that fails must not take along what was measured
            session.record.add(
                setup.key(workload),
                session.device,
                settings=settings,
                speed=dataclasses.asdict(session.speed),
                figures=dataclasses.asdict(figures),
                **more,
            )
        results.append(figures)
    return results


def measure_rollout(
    session: Session,
    contender: Contender,
    setup: Setup,
    workload: Workload,
    judge: Judge | None,
) -> Figures:
    """Check on a short run, warm up, measure, and check what was measured."""
    bench, device = session.bench, session.device
    short = workload.shortened(SHORT)
    _, gap_short = _run(contender, setup, short, bench.seed, device, judge)
    for run in [workload] if bench.warm_up == "full" else warm_ups(workload):
        _run(contender, setup, run, bench.seed + 1, device)
    runs = [
        _run(contender, setup, workload, bench.seed + 2 + i, device, judge if i == 0 else None)
        for i in range(bench.repeats)
    ]
    timing = Timing(tuple(seconds for seconds, _ in runs))
    storage = Storage.of(setup.quant, setup.kv, device.type)
    limit = rollout_limit(setup.shape, storage, session.speed, workload)
    return Figures(
        seconds=timing.seconds,
        tokens_per_s=workload.num_new_tokens / timing.median,
        ms_per_step=1e3 * timing.median / workload.new_tokens,
        limit_tokens_per_s=workload.num_new_tokens / limit,
        limit_share=limit / timing.median,
        logprob_gap=runs[0][1],
        logprob_gap_short=gap_short,
    )


def warm_ups(workload: Workload) -> list[Workload]:
    """Short runs that end where the workload does and where its contexts reach a power of two.

    The longest comes first: it makes the engine allocate what the others then find.
    """
    first, last = workload.prompt_tokens, workload.prompt_tokens + workload.new_tokens
    powers = (1 << n for n in range(last.bit_length()))
    ends = [last, *(end for end in powers if first + WARM_UP <= end < last)]
    steps = min(WARM_UP, workload.new_tokens)
    return [
        dataclasses.replace(workload, prompt_tokens=end - steps, new_tokens=steps) for end in ends
    ]


def _run(
    contender: Contender,
    setup: Setup,
    workload: Workload,
    seed: int,
    device: torch.device,
    judge: Judge | None = None,
) -> tuple[float, float | None]:
    """Seconds of one generate call, and the gap where there is somebody to judge it."""
    problems = make_problems(workload, setup.shape.vocabulary, seed)
    params = sampling_params(workload, seed)
    with paused_gc():
        seconds, result = time_call(lambda: contender.generate(problems, params), device)
    groups = contender.read(result)
    check_completions(groups, workload)
    return seconds, judge.gap(problems, groups) if judge else None


def _profile(contender: Contender, setup: Setup, workload: Workload, seed: int) -> dict[str, Any]:
    def generate(new_tokens: int) -> Any:
        run = dataclasses.replace(workload, new_tokens=new_tokens)
        problems = make_problems(run, setup.shape.vocabulary, seed)
        return contender.generate(problems, sampling_params(run, seed))

    profile = profile_decode(generate)
    print(describe_profile(profile), flush=True)
    return dataclasses.asdict(profile)


def _settings(setup: Setup, workload: Workload, bench: RolloutBench) -> dict[str, Any]:
    return {
        "engine": setup.engine,
        "model": setup.shape.name,
        "quant": setup.quant,
        "kv": setup.kv,
        "workload": workload.name,
        "num_prompts": workload.num_prompts,
        "group_size": workload.group_size,
        "prompt_tokens": workload.prompt_tokens,
        "new_tokens": workload.new_tokens,
        "repeats": bench.repeats,
        "warm_up": bench.warm_up,
        "seed": bench.seed,
        "garbage_collection": "off",
    }
