"""The loop, nothing else: QuRL's Figure 1 from top to bottom.

     tasks ─Problem─▶ engine ─Rollout─▶ rewards ─Graded─▶ batch ─▶ advantages ─▶ losses ─▶ optimizer
                        ▲  theta_hat (quantized)                                    theta │
                        └───────────────── sync: quantize in place, verify ◀──────────────┘

Row `step` of metrics.jsonl speaks of the weights after `step` updates: they are synchronised,
evaluated where due, sampled from, and then trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qurl.advantages import estimate
from qurl.config import Config, check_combinations
from qurl.correction import correct
from qurl.errors import QurlError
from qurl.losses import OBJECTIVES
from qurl.ops.device import peak_memory
from qurl.run.assembly import Parts, assemble
from qurl.run.crash import keep_evidence
from qurl.run.directory import Run, Stopwatch
from qurl.run.evaluation import evaluate
from qurl.run.interrupt import Interrupt
from qurl.run.report import write_report
from qurl.run.trackers import Tracker
from qurl.sampling import Sampler, collect
from qurl.trainer.batches import pack, sample_records
from qurl.types import Batch


def train(config: Config, *, trackers: Sequence[Tracker] = ()) -> Path:
    """Train to `config.steps`, resuming where the run directory allows; returns that directory.

    Make the config with `load_config`, which adds all that `algo.name` sets; `Config(...)` has the
    plain defaults. `trackers` are called besides those that the recipe asks for.
    """
    check_combinations(config)
    algo, objective = config.algo, OBJECTIVES[config.algo.objective]
    # Uncorrected objectives ignore it; their metrics tell what truncation at C would do.
    cap = algo.cap if objective.is_truncated or not objective.is_weighted else None
    opened = Run.open(config, trackers=trackers)
    with opened as run, assemble(config, run) as parts, Interrupt() as interrupt:
        learner, timer = parts.learner, run.timer
        for step in range(parts.first_step, config.steps):
            with keep_evidence(config, parts, run, step):
                metrics = sync(parts, run, step) | parts.known(step)
                if is_due(step, config.eval.every) and not parts.known(step):
                    metrics |= evaluate_policy(config, parts, run, step)

                sampler = Sampler(config, parts.stream, parts.engine, parts.pool, timer, step)
                collected = collect(sampler, config.batch.problems, algo)
                metrics |= sampler.metrics() | collected.metrics()

                batch = pack(collected.graded).to(learner.policy.device)
                with timer("prox"):
                    batch, scores = learner.recompute(batch)
                batch, mismatch = correct(
                    batch, config.correction, cap=cap, is_weighted=objective.is_weighted
                )
                batch = estimate(batch, algo)
                with timer("update"):
                    metrics |= scores | mismatch | learner.update(batch, step)
                metrics |= performance(config, batch, timer)

            for record in sample_records(collected.graded, batch, config.track.samples):
                run.sample(step, record)
            # Logged before it is saved: a kill in between repeats the step and loses no row.
            run.log(step, metrics | timer.lap())
            warn(run, step, metrics)
            is_stopping = interrupt.is_requested
            is_last = step + 1 == config.steps or is_stopping
            if config.save.keep and (is_due(step + 1, config.save.every) or is_last):
                with timer("save"):
                    parts.save(config, run, step + 1)
            if is_stopping:
                raise KeyboardInterrupt

        with keep_evidence(config, parts, run, config.steps):
            metrics = sync(parts, run, config.steps) | parts.known(config.steps)
            if config.eval.every and not parts.known(config.steps):
                metrics |= evaluate_policy(config, parts, run, config.steps)
        run.log(config.steps, metrics | timer.lap())
        report(run)
        return run.path


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def sync(parts: Parts, run: Run, step: int) -> dict[str, float]:
    """Quantize the weights into the engine, and see how much of the last update arrived."""
    model = parts.learner.policy.model
    with run.timer("sync"):
        report = parts.engine.sync(model, version=step)
    # Not report.code_flip_frac: a resumed engine has no codes to compare with. The tracker does.
    metrics = {"sync/canary_gap": report.canary_gap, "sync/bytes": float(report.bytes)}
    if parts.tracker is not None:
        with run.timer("track"):
            metrics |= parts.tracker.measure(model)
    return metrics | {"sync/seconds": report.seconds}


def evaluate_policy(config: Config, parts: Parts, run: Run, step: int) -> dict[str, float]:
    """Held-out accuracy in each precision that the recipe asks for."""
    metrics: dict[str, float] = {}
    with run.timer("eval"):
        for precision in config.eval_precisions:
            engine = parts.engine
            if precision == "full" and parts.full_engine is not None:
                engine = parts.full_engine
                engine.sync(parts.learner.policy.model, version=step)
            result = evaluate(config, engine, parts.held_out, parts.pool, precision)
            run.evaluation(step, precision, result.outcomes)
            metrics |= result.metrics()
    return metrics


def performance(config: Config, batch: Batch, timer: Stopwatch) -> dict[str, float]:
    tokens = batch.num_tokens * config.batch.epochs
    speed = {"perf/train_tokens_per_s": tokens / timer.seconds("update")}
    return speed | peak_memory(batch.mask.device)


def warn(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    if killed := metrics["reward/timeouts"]:
        run.event("warning", f"step {step}: {killed:g} graders were killed at task.grade_timeout")
    if skipped := metrics["actor/skipped_updates"]:
        run.event("warning", f"step {step}: {skipped:g} updates had no token left")


def report(run: Run) -> None:
    try:
        path = write_report(run.path)
        run.progress.print(f"report: {path}")
    except (QurlError, OSError) as error:  # what was trained is saved, whatever comes of this
        run.event("warning", f"no report.html: {error}")
