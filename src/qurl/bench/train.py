"""`qurl bench train`: the trainer alone, on a batch of full length with random weights.

Timed are `Learner.recompute`, the forward for logp_prox, and `Learner.update`, all forwards,
backwards and optimizer updates of a step. Speeds are those of the update (`TrainBench`); its limit
is that of `qurl.bench.limits`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from qurl.advantages import ESTIMATORS
from qurl.bench.arms import Arm, BatchBench
from qurl.bench.limits import Products, Speed, find_speed
from qurl.bench.profile import summarize_kernels, trace_kernels
from qurl.bench.record import Record, free_memory, paused_gc, time_call
from qurl.bench.shapes import SHAPES, build_model, split_list
from qurl.config import Config
from qurl.errors import ConfigError, TrainingError
from qurl.losses import SURROGATES
from qurl.objectives import ADVANTAGES
from qurl.ops.device import peak_memory, pick_device
from qurl.run.shape import Shape
from qurl.trainer.learner import Learner
from qurl.trainer.policy import Policy
from qurl.types import Batch, Scored, Trainable

GRADIENT_RATIO = 1.5
"""Largest factor between the gradient norms of two arms: 8 bits change it by a few per cent, a
wrong backward by more."""

HEAD = (
    "model  arm                 batch           tokens/s  update s    prox s       6ND  TFLOP/s  "
    "of limit  peak GiB"
)
ROW = (
    "{model:5}  {arm:18}  {batch:13}  {tokens_per_s:9,.0f}  {update_s:8.3f}  {prox_s:8.3f}  "
    "{tflops_6nd:8.4g}  {tflops:7.4g}  {limit_share:8.1%}  {peak:>8}"
)


@dataclass(frozen=True)
class TrainBench(BatchBench):
    """Tokens per second of the trainer on a batch of full length, prompts included.

    6ND counts all parameters, a tied head once, for every token; TFLOP/s counts the products that
    an update needs, and "of limit" is their share of what the hardware multiplies in that time.
    """

    arms: str = "none"
    """A format (none, int8, fp8, ...), then -unified, -unified-dgrad or -unified-all, without which
    it trains in BF16, then +kv for an FP8 cache; several with commas."""
    profile: int = 0
    """Print and save this many of the kernels with most time, of one more update; needs a GPU."""


@dataclass(frozen=True)
class TrainFigures:
    """The measurements of one arm."""

    update_seconds: tuple[float, ...]
    prox_seconds: tuple[float, ...]
    update_s: float
    prox_s: float
    tokens_per_s: float
    tflops_6nd: float
    tflops: float
    limit_s: float  # of the update
    limit_share: float
    peak_gib: float | None  # of the GPU
    grad_norm: float  # mean over the updates of the first step


def run_train(bench: TrainBench) -> None:
    """Measure every arm in turn; print a row for each and save it at once."""
    device = pick_device(bench.device)
    arms = plan_arms(bench, device)
    shapes = [SHAPES[name] for name in split_list("model", bench.model)]
    record, speed = Record("train", bench.out, device), find_speed(device)
    print(HEAD)
    for shape in shapes:
        expected = None
        for arm, config in arms:
            trial = Trial(bench, config, shape, device)
            trial.run(expected)  # compiles and allocates
            expected = expected or trial.grad_norm
            figures = measure_train(trial, arm, speed)
            save_figures(record, trial, arm, speed, figures)
            del trial
            free_memory()
    print(f"saved to {record.path}")


def plan_arms(bench: TrainBench, device: torch.device) -> list[tuple[Arm, Config]]:
    """The arms, those that train in BF16 first; raises if one cannot be measured."""
    bench.check()
    if bench.profile and device.type != "cuda":
        raise ConfigError("--profile needs a GPU")
    arms = sorted(Arm.list_of(bench.arms), key=lambda arm: arm.is_unified)
    return [(arm, bench.config(arm)) for arm in arms]


class Trial:
    """A learner and a batch that it can be given again and again."""

    def __init__(
        self, bench: TrainBench, config: Config, shape: Shape, device: torch.device
    ) -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.bench, self.shape, self.device = bench, shape, device
        self.learner = build_learner(config, shape, device, bench.seed)
        self.batch = build_batch(bench, self.learner.policy, shape.vocabulary)
        self.grad_norm = math.nan

    def run(self, expected_grad_norm: float | None = None) -> tuple[float, float]:
        """Seconds of the update and of the prox forward of one step; raises if it went wrong."""
        learner = self.learner
        prox_s, scored = time_call(lambda: learner.recompute(self.batch, step=0), self.device)
        trainable = prepare(learner, scored)
        update_s, (_, metrics) = time_call(lambda: learner.update(trainable, step=0), self.device)
        check_update(metrics, expected_grad_norm)
        self.grad_norm = metrics["actor/grad_norm"]
        return update_s, prox_s


def build_learner(config: Config, shape: Shape, device: torch.device, seed: int) -> Learner:
    """A learner without a reference; every call gives the same weights."""
    model = build_model(shape, device, torch.float32, seed=seed).requires_grad_(True)
    policy = Policy(model, None, config.model, device, config.quant)
    objective = SURROGATES[config.algo.objective]
    advantage = ADVANTAGES[config.algo.advantage]
    learner = Learner(policy, config, objective=objective, advantage=advantage)
    learner.narrow_masters_()
    return learner


def build_batch(bench: BatchBench, policy: Policy, vocabulary: int) -> Batch:
    """Random tokens as if the policy itself had sampled them; every second one is rewarded."""
    size = (bench.sequences, bench.prompt_tokens + bench.tokens)
    rows, device = torch.arange(bench.sequences, device=policy.device), policy.device
    generator = torch.Generator().manual_seed(bench.seed)
    mask = torch.ones(size, device=device)
    mask[:, : bench.prompt_tokens] = 0
    batch = Batch(
        token_ids=torch.randint(vocabulary, size, generator=generator).to(device),
        lengths=torch.full_like(rows, size[1]),
        mask=mask,
        logp_behav=torch.zeros_like(mask),
        rewards=(rows % 2).float(),
        accuracies=(rows % 2).float(),
        group=rows // bench.group,
        problem_ids=[f"prompt-{row // bench.group}" for row in range(bench.sequences)],
        temperature=1.0,
    )
    pieces = rows.split(max(1, bench.microbatch_tokens // size[1]))
    with torch.no_grad():
        scores = [policy.score(batch.select(piece)).logp for piece in pieces]
    return batch.replace(logp_behav=torch.cat(scores))


def prepare(learner: Learner, scored: Scored) -> Trainable:
    """What the loop does between the two calls that are timed."""
    return learner.compare(learner.correct(scored), ESTIMATORS[learner.config.algo.advantage])


def check_update(metrics: Mapping[str, float], expected_grad_norm: float | None = None) -> None:
    """Raise unless all metrics are finite and the gradients about as large as expected."""
    if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise TrainingError(f"{', '.join(broken)} of the update is not finite; it is not measured")
    norm, expected = metrics["actor/grad_norm"], expected_grad_norm or metrics["actor/grad_norm"]
    if not 0 < expected / GRADIENT_RATIO <= norm <= expected * GRADIENT_RATIO:
        raise TrainingError(
            f"the gradient norm is {norm:.4g} where the first arm has {expected:.4g}, more than a "
            f"factor of {GRADIENT_RATIO} apart; updates with wrong gradients are not timed"
        )


def measure_train(trial: Trial, arm: Arm, speed: Speed) -> TrainFigures:
    """Repeat a step that has run before."""
    bench, grad_norm = trial.bench, trial.grad_norm
    with paused_gc():
        runs = [trial.run() for _ in range(bench.repeats)]
    updates, proxes = zip(*runs, strict=True)
    seconds = statistics.median(updates)
    products = Products.of(trial.shape, bench.sequences, bench.prompt_tokens, bench.tokens)
    limit = products.update_limit(speed, arm.num_narrow)
    return TrainFigures(
        update_seconds=updates,
        prox_seconds=proxes,
        update_s=seconds,
        prox_s=statistics.median(proxes),
        tokens_per_s=bench.num_tokens / seconds,
        tflops_6nd=6 * trial.shape.num_parameters * bench.num_tokens / seconds / 1e12,
        tflops=products.flops_of_update / seconds / 1e12,
        limit_s=limit,
        limit_share=limit / seconds,
        peak_gib=peak_memory(trial.device).get("perf/max_memory_allocated_gb"),
        grad_norm=grad_norm,
    )


def save_figures(
    record: Record, trial: Trial, arm: Arm, speed: Speed, figures: TrainFigures
) -> None:
    """Print the row of an arm, and its profile if asked for; add both to the record."""
    bench, profile = trial.bench, {}
    settings = bench.settings(trial.shape, arm.name)
    peak = "-" if figures.peak_gib is None else f"{figures.peak_gib:.1f}"
    print(ROW.format(**settings, **asdict(figures), peak=peak), flush=True)
    if bench.profile:
        learner = trial.learner
        trainable = prepare(learner, learner.recompute(trial.batch, step=0))
        kernels = trace_kernels(lambda: learner.update(trainable, step=0))
        found = summarize_kernels(kernels, bench.profile)
        print(found, flush=True)
        profile = {"profile": asdict(found)}
    record.add(
        f"{trial.shape.name} {arm.name} {bench.batch}",
        settings=settings,
        speed=asdict(speed),
        figures=asdict(figures),
        **profile,
    )
