"""`qurl advise`: does quantizing help this recipe on this hardware, and what should it set?

On a GPU the parts of a step are measured (`qurl.bench.probe`), else computed from rates that were
measured on an H200 (`qurl.bench.forecast`, which states its errors). A gain's range is the error of
such forecasts against all measurements in benchmarks/results; it covers nine of ten of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from qurl.bench import probe
from qurl.bench.arms import Arm
from qurl.bench.forecast import StepSeconds, gain_range
from qurl.bench.plan import Prediction, build_plan_table, shorten
from qurl.bench.scenario import (
    BASE,
    Hardware,
    Scenario,
    count_prompt_tokens,
    find_hardware,
    find_shape,
    find_tokens,
    open_task,
)
from qurl.config import Config, check_combinations
from qurl.config.rules import find_mistakes
from qurl.errors import ConfigError
from qurl.objectives import ADVANTAGES
from qurl.ops.device import pick_device
from qurl.run.budget import GIB, find_savings
from qurl.run.shape import Shape
from qurl.tasks.task import Task

ROLLOUT_ARMS = ("int8", "int8+kv", "fp8", "fp8+kv")
UNIFIED_ARMS = ("int8-unified-dgrad", "fp8-unified-dgrad")
SMALL_GAIN = 1.03
"""A step that gains less is not worth a mismatch."""
CACHE_GAIN = 1.03
"""So much faster must a step be with an FP8 cache, which adds to the mismatch."""
KNOWN_GAPS = {"none": 0.004, "int8": 0.028, "int8+kv": 0.033, "fp8": 0.036, "fp8+kv": 0.038}
"""Mean |log-prob gap| of a 0.5B model before RL (benchmarks/results/mismatch.json)."""
SMALL_MODEL = 7e8
"""Most parameters of a model whose mismatch is measured on a CPU."""

Answer = Literal["yes", "perhaps", "no"]


@dataclass(frozen=True)
class Row:
    """One arm."""

    arm: str
    rollout_s: float
    train_s: float
    step_s: float
    gain: tuple[float, float, float]  # at least, expected, at most
    peak_gib: float
    fits: bool
    gap: float | None


@dataclass(frozen=True)
class Advice:
    """The answer and all that it rests on."""

    answer: Answer
    recommended: Mapping[str, Any]
    """Keys of the recipe."""
    verdict: tuple[str, str]
    rows: Sequence[Row]
    setting: str
    notes: Sequence[str]
    plan: Sequence[Prediction] = ()
    """Placements on several GPUs, in BF16 and with the best quantized rollouts."""


def advise(
    config: Config,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    shape: str | None = None,
    tokens: int | None = None,
) -> Advice:
    """Measure or compute every arm and choose; completions have `tokens` tokens on average."""
    check_base(config)
    if config.device == "cpu" and gpu is None:
        return advise_cpu(config)
    if gpus is None and (named := config.parallel.trainers + config.parallel.engines) > 1:
        gpus = named
    hardware = find_hardware(gpu, gpus)
    parallel = replace(config.parallel, trainers=hardware.num_gpus, engines=0)
    config = replace(config, parallel=parallel)
    if hardware.num_gpus > 1:  # what several trainers refuse
        check_combinations(config, f"--gpus {gpus}")
    found = find_shape(config, shape)
    task, notes = open_task(config, shape is not None)
    prompt_tokens = count_prompt_tokens(config, task)
    if tokens is None:
        tokens, note = find_tokens(config)
        notes.append(note)
    arms = [Arm.of(name) for name in (BASE, *ROLLOUT_ARMS, *UNIFIED_ARMS)]
    arms = [arm for arm in arms if hardware.has_fp8 or "fp8" not in arm.quant.values()]
    planned = with_auto(config)
    scenario = Scenario(planned, hardware, found, prompt_tokens, tokens)
    if hardware.is_here:
        seconds = scenario.measure(arms, torch.device("cuda"))
    else:
        seconds = {arm.name: scenario.forecast(arm) for arm in arms}
    gaps, how = find_gaps(config, found, task, hardware, arms)
    rows = [make_row(scenario, arm, seconds, gaps.get(arm.name)) for arm in arms]
    answer, keys, lines = choose(rows, find_savings(config))
    recommended, verdict = with_others(config, planned, keys, lines)
    plan = make_plan(scenario, rows)
    if plan:
        notes += scenario.planner.notes(plan)
    notes = (*hardware.notes, *notes, *scenario.notes(), how)
    return Advice(answer, recommended, verdict, rows, scenario.describe(), notes, plan)


def make_plan(scenario: Scenario, rows: Sequence[Row]) -> list[Prediction]:
    """Who trains and who samples, in BF16 and with the best quantized rollouts."""
    if scenario.hardware.num_gpus == 1:
        return []
    quantized = [row for row in rows[1:] if "unified" not in row.arm]
    best = pick_rollout([row for row in quantized if row.fits] or quantized)
    arms = [Arm.of(name) for name in (BASE, best.arm)]
    return [p for arm in arms for p in scenario.planner.best(arm, scenario.work(arm))]


def check_base(config: Config) -> None:
    """Raise if the frozen weights allow one format only, so that there is nothing to choose."""
    if (base := config.model.base) != "full":
        raise ConfigError(
            f"model.base = {base!r} allows quant.format = {base!r} only, so there is nothing to "
            "compare; add --model.base full to compare formats for this recipe. qurl train RECIPE "
            "--dry-run prints the memory of this base"
        )


def with_auto(config: Config) -> Config:
    """The recipe with `correction.mode = "auto"`, if that spares BF16 arms a prox forward."""
    is_ours = config.algo.advantage in ADVANTAGES  # of others we do not know what they read
    if config.correction.mode != "decoupled" or config.batch.minibatches == 1 or not is_ours:
        return config
    auto = replace(config, correction=replace(config.correction, mode="auto"))
    return config if find_mistakes(auto) else auto


def with_others(
    config: Config, planned: Config, recommended: Mapping[str, Any], verdict: tuple[str, str]
) -> tuple[dict[str, Any], tuple[str, str]]:
    """Recommended keys and the verdict, with the other keys that must change.

    Those of [quant] that do not go with them, and the mode that BF16 rollouts were planned with.
    """
    quant = {key.removeprefix("quant."): v for key, v in recommended.items() if "quant." in key}
    if not quant:
        return dict(recommended), verdict
    wanted, found = vars(Arm("", quant).apply(config).quant), vars(config.quant)
    changed = {f"quant.{key}": value for key, value in wanted.items() if value != found[key]}
    others = {key: value for key, value in changed.items() if key not in recommended}
    if recommended["quant.format"] == BASE and planned is not config:
        others["correction.mode"] = planned.correction.mode
    first, second = verdict
    if others:
        settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in others.items())
        second = f"{second} Also set {settings}."
    return {**recommended, **others}, (first, second)


def advise_cpu(config: Config) -> Advice:
    line = "No: on a CPU codes are multiplied as FP32 numbers, so quantizing saves no time."
    reason = "Set quant.format = 'none', or plan for a GPU with --gpu H100."
    recommended, verdict = with_others(config, config, {"quant.format": BASE}, (line, reason))
    return Advice("no", recommended, verdict, (), "on a CPU", ())


def make_row(
    scenario: Scenario, arm: Arm, seconds: Mapping[str, StepSeconds], gap: float | None
) -> Row:
    found, (peak, _) = seconds[arm.name], scenario.memory(arm)
    gain = gain_range(seconds[BASE], found, is_measured=scenario.hardware.is_here)
    return Row(
        arm.name,
        found.rollout,
        found.train,
        found.total,
        (1.0, 1.0, 1.0) if arm.name == BASE else gain,
        peak / GIB,
        peak <= scenario.hardware.memory,
        gap,
    )


def find_gaps(
    config: Config, shape: Shape, task: Task | None, hardware: Hardware, arms: Sequence[Arm]
) -> tuple[dict[str, float], str]:
    """Mean |log-prob gap| by arm, measured if the model is here and not too large, and how."""
    folder = Path(config.model.path).expanduser()
    has_gpu = torch.cuda.is_available() and shape.num_parameters * 8 < hardware.memory
    if folder.is_dir() and task is not None and (has_gpu or shape.num_parameters <= SMALL_MODEL):
        device = pick_device("auto")
        is_cpu = device.type == "cpu"
        arms = [a for a in arms if not a.is_unified and not (is_cpu and a.kv == "fp8")]
        path, temperature = str(folder), config.sampling.temperature
        gaps = probe.measure_mismatch(path, task, arms, temperature, device)
        how = f"gap: mean |log-prob gap| of this model's own samples, measured on {device}"
        return gaps, how + (", where attention is in FP64" if is_cpu else "")
    how = (
        "gap: mean |log-prob gap| of a 0.5B model before RL, measured on an H200; not this model's"
    )
    return dict(KNOWN_GAPS), how


def choose(
    rows: Sequence[Row], savings: Sequence[str] = ()
) -> tuple[Answer, dict[str, Any], tuple[str, str]]:
    """The answer, the keys to set, and two lines that say so."""
    base = rows[0]
    fitting = [row for row in rows[1:] if row.fits and "unified" not in row.arm]
    if not fitting:
        first = "No: by estimate no arm fits the GPU's memory (GiB with !)."
        return "no", {}, (first, f"{' or '.join(savings)} saves memory.")
    best = pick_rollout(fitting)
    low, gain, high = best.gain
    range_text = f"{gain:.2f}x ({low:.2f} to {high:.2f})"
    keys = Arm.of(best.arm).quant
    settings = ", ".join(f'quant.{key} = "{value}"' for key, value in keys.items())
    if base.fits and gain < SMALL_GAIN:
        first = f"No: the best format, {best.arm}, runs a step {range_text} as fast as BF16."
        second = (
            'Keep quant.format = "none": nothing to correct, and evaluations mean what they say. '
            + describe_unified(rows, base)
        )
        return "no", {"quant.format": BASE}, (first, second)
    recommended = {f"quant.{key}": value for key, value in keys.items()}
    recommended |= {"quant.unified": False, "algo.objective": "acr", "algo.cap": 2.0}
    second = f'Correct with algo.objective = "acr", algo.cap = 2. {describe_unified(rows, best)}'
    if not base.fits:
        return "yes", recommended, (f"Yes: {settings} fits the GPU, BF16 rollouts do not.", second)
    if low > 1:
        first = f"Yes: {settings} runs a step {range_text} as fast as BF16."
        return "yes", recommended, (first, second)
    first = f"Perhaps: {settings} runs a step {range_text} as fast; measure it on the GPU."
    return "perhaps", recommended, (first, second)


def pick_rollout(rows: Sequence[Row]) -> Row:
    """The fastest; INT8 where formats are equally fast, no FP8 cache if it gains little."""
    fastest = max(rows, key=lambda row: row.gain[1])

    def is_as_fast(row: Row) -> bool:
        bound = CACHE_GAIN if "+kv" in fastest.arm and "+kv" not in row.arm else 1.02
        return row.gain[1] * bound >= fastest.gain[1]

    order = sorted(rows, key=lambda row: ("+kv" in row.arm, ROLLOUT_ARMS.index(row.arm)))
    return next(filter(is_as_fast, order))


def describe_unified(rows: Sequence[Row], chosen: Row) -> str:
    """What training in 8 bits would add, which no run on a pretrained model has shown yet."""
    unified = [row for row in rows if "unified" in row.arm and row.fits]
    fastest = min(unified, key=lambda row: row.step_s, default=chosen)
    gain = chosen.step_s / fastest.step_s
    if gain < SMALL_GAIN:
        return "Train in BF16."
    proof = "and is unproven on pretrained models"
    return f"Train in BF16: {fastest.arm} would add {gain:.2f}x, {proof}."


def print_advice(advice: Advice, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(advice), indent=1))
        return
    console = Console(highlight=False)
    console.print(advice.setting)
    if advice.rows:
        console.print(build_table(advice.rows))
    if advice.plan:
        console.print("\nseconds of a step, by placement (docs/scale.md):")
        console.print(build_plan_table(advice.plan))
    for note in advice.notes:
        console.print(f"- {note}", style="dim")
    console.print(*advice.verdict, sep="\n", style="bold", soft_wrap=True)


def build_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    for name in ("rollout s", "train s", "step s", "gain", "range", "GiB", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        low, gain, high = row.gain
        times = [shorten(seconds) for seconds in (row.rollout_s, row.train_s, row.step_s)]
        gains = [f"{gain:.2f}", "" if row.arm == BASE else f"{low:.2f}-{high:.2f}"]
        if not rows[0].fits:  # nothing to compare with
            gains = ["-", "-"]
        table.add_row(
            row.arm,
            *([*times, *gains] if row.fits else ["-"] * 5),  # an arm that cannot run takes no time
            f"{row.peak_gib:.1f}" + ("" if row.fits else "!"),
            "-" if row.gap is None else f"{row.gap:.3f}",
        )
    return table
