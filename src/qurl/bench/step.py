"""`qurl bench step`: whole GRPO steps of `train()` with random weights, and where their time goes.

All arms start from one model folder and run one after the other. A step lasts from one row of
metrics to the next, so nothing of the loop is left out. Rewards are 0 and 1 in turn: with equal
rewards all gradients would be zero, and a GPU multiplies zeros faster.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from qurl.bench.arms import Arm, BatchBench
from qurl.bench.record import Record, free_memory
from qurl.bench.shapes import SHAPES, Shape, build_model, split_list
from qurl.config import Config
from qurl.errors import ConfigError, EngineError, TrainingError
from qurl.ops.device import pick_device
from qurl.tasks.tokenizer import build_tokenizer
from qurl.train import train
from qurl.types import Problem

WARM_UP = 2
"""Steps that compile, capture and allocate."""
LENGTHS = ("equal", "mixed")
PARTS = ("rollout", "prox", "update", "sync")
TRL_SETTINGS = {
    "none": (),
    "trl": ("tuned", "defaults"),
    "trl-tuned": ("tuned",),
    "trl-defaults": ("defaults",),
}
"""Settings of TRL to measure, by --against."""

HEAD = (
    "model  arm                 batch          lengths    step s  rollout     prox   update     "
    "sync     rest   tokens/s  peak GiB"
)
ROW = (
    "{model:5}  {arm:18}  {batch:13}  {lengths:7}  {step_s:8.3f}  {rollout:>7}  {prox:>7}  "
    "{update:>7}  {sync:>7}  {rest:>7}  {tokens_per_s:9,.0f}  {peak:>8}"
)


@dataclass(frozen=True)
class StepBench(BatchBench):
    """Seconds of whole GRPO steps without KL, and of their parts; "rest" is all else."""

    arms: str = "none,int8"
    """A format (none, int8, fp8, ...), then -unified, -unified-dgrad or -unified-all, then +kv;
    several with commas."""
    lengths: str = "equal"
    """equal: completions have --tokens; mixed: each token ends its completion with probability
    2 / --tokens, unless they reach that length; several with commas."""
    against: Literal["none", "trl", "trl-tuned", "trl-defaults"] = "none"
    """Measure TRL's GRPOTrainer too, in one setting or in both: with vLLM in its process; on a CPU,
    with transformers."""


@dataclass(frozen=True)
class StepFigures:
    """The measurements of one arm; seconds are medians over steps."""

    seconds: tuple[float, ...]
    step_s: float
    parts: Mapping[str, float]  # of a step: rollout, prox, update, sync, rest
    tokens_per_s: float  # prompts included
    peak_gib: float | None  # of the GPU


def run_step(bench: StepBench) -> None:
    """Measure every arm in turn; print a row for each and save it at once."""
    device = pick_device(bench.device)
    shapes, arms, lengths = plan_step(bench)
    record = Record("step", bench.out, device)
    print(HEAD)
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="qurl-step-") as work:
            folder = save_model(shape, Path(work, "model"), device, bench.seed)
            for kind in lengths:
                set_ends(folder, end_ids(shape, bench.tokens, kind))
                for arm in arms:
                    config = step_config(bench, arm, Path(work, f"{kind}-{arm.name}"), folder)
                    figures = measure_step(bench, config, device, kind)
                    save_figures(record, bench, shape, arm.name, kind, figures)
                for setting in TRL_SETTINGS[bench.against]:
                    run_trl(bench, shape, folder, kind, setting, record.path)
    print(f"saved to {record.path}")


def plan_step(bench: StepBench) -> tuple[list[Shape], list[Arm], list[str]]:
    """Shapes, arms and kinds of lengths; raises if one cannot be measured."""
    bench.check()
    shapes = [SHAPES[name] for name in split_list("model", bench.model)]
    arms = Arm.list_of(bench.arms)
    for arm in arms:
        step_config(bench, arm, Path("run"), Path("model"))
    lengths = split_list("lengths", bench.lengths, LENGTHS)
    if TRL_SETTINGS[bench.against]:
        is_cpu = pick_device(bench.device).type == "cpu"
        needed = ("trl",) if is_cpu else ("trl", "vllm")
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"--against {bench.against}: {' and '.join(missing)} cannot be found; run "
                f"pip install '{'trl' if is_cpu else 'trl[vllm,liger]'}'"
            )
        if not Path("benchmarks", "trl_step.py").exists():
            raise ConfigError(
                "--against trl runs benchmarks/trl_step.py; call it in a checkout of the repository"
            )
    return shapes, arms, lengths


def step_config(bench: StepBench, arm: Arm, run_dir: Path, folder: Path) -> Config:
    """A run without saves, evaluations and samples."""
    return bench.config(
        arm,
        steps=WARM_UP + bench.repeats,
        run_dir=str(run_dir),
        model={"path": str(folder)},
        task={"reward": "exact"},
        rollout={"max_batch": bench.sequences},
        save={"keep": 0},
        track={"samples": 0},
    )


def save_model(shape: Shape, folder: Path, device: torch.device, seed: int) -> Path:
    """A folder with random BF16 weights, and a tokenizer that ends nothing."""
    model = build_model(shape, device, torch.bfloat16, seed=seed)
    model.save_pretrained(folder)
    tokenizer: Any = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    del model
    free_memory()
    return folder


def end_ids(shape: Shape, num_tokens: int, lengths: str) -> list[int]:
    """Tokens that end a completion: none, or 2 / num_tokens of the vocabulary.

    Random weights sample each token about equally often.
    """
    num_ends = math.ceil(2 * shape.vocabulary / num_tokens) if lengths == "mixed" else 0
    return list(range(shape.vocabulary - num_ends, shape.vocabulary))


def set_ends(folder: Path, ids: Sequence[int]) -> None:
    """Make these the model's only end-of-sequence tokens."""
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        content["eos_token_id"] = list(ids) or None
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class LetterTask:
    """Prompts of random letters, one token each."""

    tokenizer: Any
    num_tokens: int
    seed: int
    name: str = "letters"
    reward: str = "exact"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 100_000

    def text(self, index: int) -> str:
        letters = Random(f"{self.seed}-{index}").choices(string.ascii_letters, k=self.num_tokens)
        return "".join(letters)

    def __getitem__(self, index: int) -> Problem:
        return Problem(f"letters-{index}", self.tokenizer(self.text(index)).input_ids)


def alternate(completions: Sequence[Any]) -> list[float]:
    """Rewards 0 and 1 in turn."""
    return [float(i % 2) for i in range(len(completions))]


class StepClock:
    """A tracker that keeps the rows of metrics and when they came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rows: list[Mapping[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        del step
        self.times.append(time.perf_counter())
        self.rows.append(dict(metrics))

    def close(self) -> None:
        pass


def measure_step(
    bench: StepBench, config: Config, device: torch.device, lengths: str
) -> StepFigures:
    """Train for a few steps; what the run prints goes to standard error."""
    clock = StepClock()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with redirect_stdout(sys.stderr):
        train(
            config,
            task=LetterTask(build_tokenizer(), bench.prompt_tokens, bench.seed),
            reward=lambda texts, answer, extra: alternate(texts),  # type: ignore[arg-type]
            trackers=[clock],
        )
    free_memory()  # this arm's models are gone before the next one's are built
    for row in clock.rows:
        check_row(row, bench.sequences * bench.tokens if lengths == "equal" else None)
    return summarize_steps(clock.times, clock.rows, bench.sequences * bench.prompt_tokens)


def check_row(row: Mapping[str, float], num_new_tokens: int | None) -> None:
    """Raise unless a step learned something from as many tokens as expected."""
    loss, norm, num_sampled = (
        row[name] for name in ("actor/pg_loss", "actor/grad_norm", "perf/rollout_tokens")
    )
    if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
        raise TrainingError(f"the loss is {loss} and its gradient {norm}; a step must learn")
    if num_new_tokens not in (None, num_sampled):
        raise EngineError(f"{num_sampled:g} tokens were sampled instead of {num_new_tokens}")


def summarize_steps(
    times: Sequence[float], rows: Sequence[Mapping[str, float]], num_prompt_tokens: int
) -> StepFigures:
    """Figures of the steps after the warm-up; `times` are those of their ends."""
    seconds = tuple(times[i] - times[i - 1] for i in range(WARM_UP, len(rows)))
    rows = rows[WARM_UP:]
    columns = {part: [row[f"timing_s/{part}"] for row in rows] for part in PARTS}
    named = [sum(values) for values in zip(*columns.values(), strict=True)]
    columns["rest"] = [whole - part for whole, part in zip(seconds, named, strict=True)]
    num_tokens = sum(row["perf/rollout_tokens"] + num_prompt_tokens for row in rows)
    return StepFigures(
        seconds=seconds,
        step_s=statistics.median(seconds),
        parts={part: statistics.median(values) for part, values in columns.items()},
        tokens_per_s=num_tokens / sum(seconds),
        peak_gib=rows[-1].get("perf/max_memory_allocated_gb"),
    )


def save_figures(
    record: Record, bench: StepBench, shape: Shape, arm: str, lengths: str, figures: StepFigures
) -> None:
    """Print the row of an arm and add it to the record."""
    settings = bench.settings(shape, arm) | {"lengths": lengths}
    parts = {
        part: f"{figures.parts[part]:.3f}" if part in figures.parts else "-"
        for part in (*PARTS, "rest")
    }
    peak = "-" if figures.peak_gib is None else f"{figures.peak_gib:.1f}"
    print(ROW.format(**settings, **parts, **asdict(figures), peak=peak), flush=True)
    key = f"{shape.name} {arm} {bench.batch} {lengths}"
    record.add(key, settings=settings, figures=asdict(figures))


def run_trl(
    bench: StepBench, shape: Shape, folder: Path, lengths: str, setting: str, out: Path
) -> None:
    """Measure TRL in a process of its own: vLLM keeps its memory until the process ends."""
    given = {**{f.name: getattr(bench, f.name) for f in fields(bench)}, "model": shape.name}
    given |= {"lengths": lengths, "out": out, "folder": folder, "setting": setting}
    flags = [w for name, x in given.items() for w in (f"--{name.replace('_', '-')}", str(x))]
    command = [sys.executable, "-m", "benchmarks.trl_step", *flags]
    if subprocess.run(command, check=False).returncode:
        print(f"trl-{setting} failed; see above", file=sys.stderr)
