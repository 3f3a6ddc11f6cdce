"""`qurl bench rollout`: tokens per second of whole generate calls, against the hardware's limit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from qurl.bench.judge import as_sampled, check_completions, logprob_gap
from qurl.bench.limits import Speed, Storage, find_speed, rollout_limit
from qurl.bench.record import Record, free_memory, paused_gc, time_call
from qurl.bench.shapes import SHAPES, Bench, build_model, split_list
from qurl.bench.workload import WORKLOADS, Contender, EngineContender, Setup, Workload
from qurl.ops.device import pick_device
from qurl.ops.target import Target
from qurl.quant.formats import FORMATS

SHORT = 64  # new tokens of the run that is checked first
WARM_UP = 8  # new tokens of each warm-up

HEAD = (
    "engine  model  quant      kv    workload       tokens/s    ms/step      limit  of limit  "
    "|dlogp|"
)
ROW = (
    "{engine:6}  {model:5}  {quant:9}  {kv:4}  {workload:12}  {tokens_per_s:9,.0f}  "
    "{ms_per_step:9.3f}  {limit_tokens_per_s:9,.0f}  {limit_share:8.1%}  {gap:>7}"
)
SMALL = "--model tiny --prompts 2 --group 4 --prompt-tokens 32 --new-tokens 32"
"""Sizes that a laptop samples in seconds."""


@dataclass(frozen=True)
class RolloutBench(Bench):
    """Tokens per second of the local engine."""

    quant: str = "none,int8"
    """Formats: none, int8, fp8, fp8-block, int6, int4, nvfp4; several with commas."""
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
    repeats: int = 3
    """Measured runs; the median counts."""

    def settings(self, setup: Setup, workload: Workload) -> dict[str, Any]:
        """What is saved with the figures of a workload."""
        sizes = asdict(workload)
        return {
            "engine": setup.engine,
            "model": setup.shape.name,
            "quant": setup.quant,
            "kv": setup.kv,
            "workload": sizes.pop("name"),
            **sizes,
            "repeats": self.repeats,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Figures:
    """The measurements of one configuration."""

    seconds: tuple[float, ...]  # of each generate call, prefill included
    tokens_per_s: float
    ms_per_step: float
    limit_tokens_per_s: float
    limit_share: float
    logprob_gap: float | None  # see `judge`; None for an engine with weights of its own


More = Callable[[Contender, Workload], Mapping[str, Any]]
"""Measures something else to save with the figures of a workload."""


@dataclass(frozen=True)
class Session:
    """What all configurations of a command share."""

    bench: RolloutBench
    device: torch.device
    speed: Speed
    record: Record
    more: More = lambda *_: {}
    plans: str | None = None  # source of the local engine's plans; None on a CPU

    def run(
        self, contender: Contender, workload: Workload, seed: int, judge: Any = None
    ) -> tuple[float, float | None]:
        """Seconds of one generate call, and its log-prob gap if a model judges it."""
        seed += self.bench.seed
        problems = workload.problems(contender.setup.shape.vocabulary, seed)
        params = workload.params(seed)
        with paused_gc():
            seconds, result = time_call(lambda: contender.generate(problems, params), self.device)
        groups = contender.read(result)
        check_completions(groups, workload)
        if judge is None:
            return seconds, None
        return seconds, logprob_gap(judge, contender.setup, problems, groups)


def run_rollout(bench: RolloutBench, more: More = lambda *_: {}) -> None:
    """Measure every configuration in turn; print a row for each and save it at once."""
    device = pick_device(bench.device)
    models, workloads = plan(bench)
    record, plans = Record("rollout", bench.out, device), None
    if device.type == "cuda":
        from qurl.quant.kernels.plans import Plans  # needs Triton

        plans = Plans(Target.of(device)).source
        print(f"plans of products: {plans}")
    elif any(name != "tiny" for name in models):
        print(f"note: these sizes are meant for a GPU; on a CPU try {SMALL}")
    session = Session(bench, device, find_speed(device), record, more, plans)
    print(HEAD)
    for name, setups in models.items():
        model = build_model(SHAPES[name], device, seed=bench.seed)
        for setup in setups:
            contender = EngineContender(setup, model, max(w.num_sequences for w in workloads))
            with as_sampled(model, setup.quant):
                for workload in workloads:
                    measure(session, contender, workload, model)
            del contender
            free_memory()  # engine n is gone before engine n + 1 is built
        del model
    print(f"saved to {record.path}")


def plan(bench: RolloutBench) -> tuple[dict[str, list[Setup]], list[Workload]]:
    """The engines to build for each model, and the workloads; raises if one cannot be measured."""
    bench.check()
    sizes = {
        "num_prompts": bench.prompts,
        "group_size": bench.group,
        "prompt_tokens": bench.prompt_tokens,
        "new_tokens": bench.new_tokens,
    }
    names = split_list("workload", bench.workload, WORKLOADS)
    workloads = [WORKLOADS[name].resized(**sizes) for name in names]
    quants = split_list("quant", bench.quant, ("none", *FORMATS))
    kvs = split_list("kv", bench.kv, ("none", "fp8"))
    models = {
        name: [Setup("local", SHAPES[name], quant, kv) for quant in quants for kv in kvs]
        for name in split_list("model", bench.model)
    }
    return models, workloads


def measure(session: Session, contender: Contender, workload: Workload, judge: Any) -> Figures:
    """Check a short run, warm up, measure, check what was measured, print its row and save it.

    `judge` is the model that the engine has a copy of; None if its weights are its own.
    """
    setup, bench = contender.setup, session.bench
    short = replace(workload, new_tokens=min(SHORT, workload.new_tokens))
    session.run(contender, short, 0, judge)
    for run in warm_ups(workload):
        session.run(contender, run, 1)
    repeats = range(bench.repeats)
    runs = [session.run(contender, workload, 2 + i, None if i else judge) for i in repeats]
    seconds = tuple(seconds for seconds, _ in runs)
    median = statistics.median(seconds)
    storage = Storage.of(setup.quant, setup.kv, session.device.type)
    limit = rollout_limit(setup.shape, storage, session.speed, workload)
    figures = Figures(
        seconds=seconds,
        tokens_per_s=workload.num_new_tokens / median,
        ms_per_step=1e3 * median / workload.new_tokens,
        limit_tokens_per_s=workload.num_new_tokens / limit,
        limit_share=limit / median,
        logprob_gap=runs[0][1],
    )
    settings = bench.settings(setup, workload)
    gap = "-" if figures.logprob_gap is None else f"{figures.logprob_gap:.4f}"
    print(ROW.format(**settings, **asdict(figures), gap=gap), flush=True)
    session.record.add(
        f"{setup} {workload.name}",
        settings=settings,
        speed=asdict(session.speed),
        figures=asdict(figures),
        plans=session.plans,
        **session.more(contender, workload),
    )
    return figures


def warm_ups(workload: Workload) -> list[Workload]:
    """Short runs that end where the workload does and where its contexts reach a power of two.

    The longest comes first, so that the engine allocates what the others need.
    """
    first, last = workload.prompt_tokens, workload.prompt_tokens + workload.new_tokens
    powers = (1 << n for n in range(last.bit_length()))
    ends = [last, *(end for end in powers if first + WARM_UP <= end < last)]
    steps = min(WARM_UP, workload.new_tokens)
    return [replace(workload, prompt_tokens=end - steps, new_tokens=steps) for end in ends]
