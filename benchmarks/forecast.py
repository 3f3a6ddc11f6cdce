"""The rates of `qurl.bench.forecast`, fitted to benchmarks/results, and its errors.

    python -m benchmarks.forecast

A rate cannot be negative. The fit weighs relative errors of seconds, and twice those of gains over
BF16. Errors are those of shapes whose own rollouts were left out.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qurl.bench.arms import Arm
from qurl.bench.forecast import (
    DECODE_RATES,
    StepSeconds,
    Work,
    decode_terms,
    skips_prox,
    step_seconds,
)
from qurl.bench.limits import SPEEDS
from qurl.bench.shapes import SHAPES
from qurl.run.shape import Shape

RESULTS = Path(__file__).parent / "results"
H200 = SPEEDS["NVIDIA H200"]
GAIN_WEIGHT = 2.0
WARM_UP = 2
GSM8K_PROMPT = 110
"""Mean tokens of a GSM8K prompt, about."""
STEP_PAIRS = (("fp8", "int8"), ("grpo-int8", "grpo-bf16"))
"""Whole steps of one build. PPO in BF16 was timed with an earlier one, whose updates took longer:
against it, errors are 0.10 (int8) and 0.04 (fp8)."""

SUPERSEDED = (
    "1.5B fp8-unified-dgrad+kv 256x16+1024 equal",
    "7B fp8-unified-dgrad 128x16+1024 equal",
)
"""Steps with other FP8 products than today's."""


@dataclass(frozen=True)
class Measured:
    """One rollout of benchmarks/results/rollout.json."""

    shape: Shape
    arm: Arm
    work: Work
    seconds: float

    @property
    def terms(self) -> np.ndarray:
        """What the rates multiply, as shares of the measured seconds."""
        work = self.work
        context = work.prompt_tokens + (work.new_tokens - 1) / 2
        terms = decode_terms(self.shape, self.arm, H200, work.sequences, context)
        return work.new_tokens * np.array(terms) / self.seconds


def read_rollouts() -> list[Measured]:
    """The newest of each key. NVFP4 is left out: its products are slower than their reads."""
    results = json.loads((RESULTS / "rollout.json").read_text())["results"]
    rollouts = [_read(entries[-1]) for entries in results.values()]
    return [r for r in rollouts if r.arm.format != "nvfp4"]


def _read(entry: dict[str, Any]) -> Measured:
    settings = entry["settings"]
    sequences = settings["num_prompts"] * settings["group_size"]
    work = Work(sequences, settings["prompt_tokens"], settings["new_tokens"], sequences)
    arm = Arm.of(settings["quant"] + ("+kv" if settings["kv"] == "fp8" else ""))
    seconds = statistics.median(entry["figures"]["seconds"])
    return Measured(SHAPES[settings["model"]], arm, work, seconds)


def pair_up(rollouts: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Each quantized rollout, and the same in BF16."""
    bases = {(r.shape, r.work): r for r in rollouts if r.arm.name == "none"}
    return [
        (r, bases[r.shape, r.work])
        for r in rollouts
        if r.arm.name != "none" and (r.shape, r.work) in bases
    ]


def fit(rollouts: Sequence[Measured]) -> np.ndarray:
    """Rates by least squares; one that would be negative is left out."""
    gains = [GAIN_WEIGHT * (r.terms - base.terms) for r, base in pair_up(rollouts)]
    matrix = np.array([*(r.terms for r in rollouts), *gains])
    target = np.array([1.0] * len(rollouts) + [0.0] * len(gains))
    rates, active = np.zeros(matrix.shape[1]), np.arange(matrix.shape[1])
    while True:
        found = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if (found >= 0).all():
            rates[active] = found
            return rates
        active = active[found > 0]


def rollout_errors(rollouts: Sequence[Measured]) -> tuple[list[float], list[float]]:
    """log(forecast / measured) of seconds and of gains, each shape left out of its own fit."""
    seconds, gains = [], []
    for shape in dict.fromkeys(r.shape for r in rollouts):
        rates = fit([r for r in rollouts if r.shape != shape])
        own = [r for r in rollouts if r.shape == shape]
        seconds += [math.log(r.terms @ rates) for r in own]
        gains += [
            math.log(base.terms @ rates) - math.log(r.terms @ rates) for r, base in pair_up(own)
        ]
    return seconds, gains


def read_step(arm: str) -> tuple[float, Work, float, float]:
    """Seconds of a 0.5B step on GSM8K, its work, and how long rollouts and training took."""
    curves = json.loads((RESULTS / "paper" / "speed" / f"{arm}-seed0.json").read_text())["curves"]
    parts = {
        part: _median(curves[f"timing_s/{part}"])
        for part in ("sync", "rollout", "grade", "prox", "update")
    }
    tokens = _median(curves["response_length/mean"])
    is_ppo = "grpo" not in arm
    work = Work(
        sequences=256,
        prompt_tokens=GSM8K_PROMPT,
        new_tokens=round(tokens),
        together=256,
        longest=512,
        num_forwards=2.0,  # prox, and the reference (GRPO) or the values (PPO)
        num_networks=1 + is_ppo,
    )
    return sum(parts.values()), work, parts["rollout"], parts["prox"] + parts["update"]


def _median(curve: Sequence[float | None]) -> float:
    return statistics.median(value for value in curve[WARM_UP:] if value is not None)


def step_errors() -> dict[str, float]:
    """log(forecast / measured) of how much faster one whole step is than another."""
    errors = {f"{arm} against {base}": _step_error(arm, base) for arm, base in STEP_PAIRS}
    steps = read_bench_steps(is_newest=False)  # of each arm and batch, the last with a base counts
    for (model, arm, batch, settings), (measured, forecast) in steps.items():
        if arm != "none" and (base := steps.get((model, "none", batch, settings))):
            gains = base[0].total / measured.total, base[1].total / forecast.total
            errors[f"{model} {arm} {batch} gain"] = math.log(gains[1] / gains[0])
    return errors


def read_bench_steps(
    *, is_newest: bool = True
) -> dict[tuple[str, ...], tuple[StepSeconds, StepSeconds]]:
    """Steps of `qurl bench step` of equal lengths, measured and forecast, by model, arm, batch and
    settings; the newest of each arm and batch, or of each of their settings."""
    found = {}
    for key, entries in json.loads((RESULTS / "step.json").read_text())["results"].items():
        model, arm, batch, lengths = key.split()
        if lengths != "equal" or key in SUPERSEDED or arm.startswith("trl"):
            continue
        for entry in entries[-1:] if is_newest else entries:
            settings = f"{entry['settings']['keys']} {entry['settings']['microbatch_tokens']}"
            found[model, arm, batch, settings] = _read_step(model, arm, batch, entry)
    return found


def _read_step(
    model: str, arm: str, batch: str, entry: dict[str, Any]
) -> tuple[StepSeconds, StepSeconds]:
    sequences, prompt, tokens = map(int, re.split(r"[x+]", batch))
    keys, parts = entry["settings"]["keys"], entry["figures"]["parts"]
    rest = parts["sync"] + parts["rest"]
    measured = StepSeconds(parts["rollout"], parts["prox"], parts["update"], rest)
    is_skipped = "correction.mode=auto" in keys and skips_prox(Arm.of(arm))
    work = Work(
        *(sequences, prompt, tokens, sequences),
        num_forwards=0.0 if is_skipped else 0.75,
        has_lora="model.lora_rank" in keys,
        microbatch_tokens=entry["settings"]["microbatch_tokens"],
    )
    return measured, step_seconds(SHAPES[model], Arm.of(arm), H200, work)


def _step_error(*arms: str) -> float:
    measured, forecast = [], []
    for arm in arms:
        seconds, work, *_ = read_step(arm)
        format = arm.removeprefix("grpo-").replace("bf16", "none")
        measured.append(seconds)
        forecast.append(step_seconds(SHAPES["0.5B"], Arm.of(format), H200, work).total)
    return math.log(forecast[1] / forecast[0]) - math.log(measured[1] / measured[0])


def train_errors() -> dict[str, float]:
    """log(forecast / measured) of updates, prox forwards and parts of whole steps."""
    errors = {}
    for key, entries in json.loads((RESULTS / "train.json").read_text())["results"].items():
        model, arm, batch = key.split()
        if key in SUPERSEDED:
            continue
        newest = entries[-1]["machine"]["commit"]  # may have several sizes of micro-batches
        for entry in (e for e in entries if e["machine"]["commit"] == newest):
            microbatch, figures = entry["settings"]["microbatch_tokens"], entry["figures"]
            sequences, prompt, tokens = map(int, re.split(r"[x+]", batch))
            work = Work(sequences, prompt, tokens, sequences, microbatch_tokens=microbatch)
            forecast = step_seconds(SHAPES[model], Arm.of(arm), H200, work)
            name = f"{model} {arm} {microbatch}"
            errors[f"{name} update"] = math.log(forecast.update / figures["update_s"])
            errors[f"{name} prox"] = math.log(forecast.forwards / figures["prox_s"])
    work = Work(256, 16, 1024, 256)
    for run in json.loads((RESULTS / "update.json").read_text())["runs"]:
        if run["shape"] == "3B":
            forecast = step_seconds(SHAPES["3B"], Arm.of("none"), H200, work)
            update = statistics.median(run["update_s"][1:])
            errors["3B none update"] = math.log(forecast.update / update)
    for key, (measured, forecast) in read_bench_steps().items():
        name = " ".join(key[:3])
        # Where correction.mode = "auto" falls back, the update includes the prox forward.
        errors[f"{name} training"] = math.log(forecast.train / measured.train)
        errors[f"{name} step"] = math.log(forecast.total / measured.total)
    for arm in ("grpo-bf16", "bf16"):
        whole, work, _, seconds = read_step(arm)
        forecast = step_seconds(SHAPES["0.5B"], Arm.of("none"), H200, work)
        errors[f"0.5B {arm} training"] = math.log(forecast.train / seconds)
        errors[f"0.5B {arm} step"] = math.log(forecast.total / whole)
    return errors


def summarize(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    root = math.sqrt((sizes**2).mean())
    return f"{root:.3f} root mean square, {np.quantile(sizes, 0.9):.3f} 90 %, {sizes.max():.3f} max"


def main() -> None:
    rollouts = read_rollouts()
    print("rates of a decode step, fitted:", *(f"{rate:.3g}" for rate in fit(rollouts)))
    print("                          used:", *(f"{rate:.3g}" for rate in DECODE_RATES))
    seconds, gains = rollout_errors(rollouts)
    print(f"seconds of {len(seconds)} rollouts:", summarize(seconds))
    print(f"gains of {len(gains)} rollouts:", summarize(gains))
    for name, error in (train_errors() | step_errors()).items():
        print(f"{name:32} {error:+.3f}")


if __name__ == "__main__":
    main()
