"""The loop, nothing else: Figure 1 of the paper from top to bottom.

     tasks ─Problem─▶ engine ─Rollout─▶ rewards ─Graded─▶ batch ─▶ advantages ─▶ losses ─▶ optimizer
                        ▲  theta_hat (quantized)                                    theta │
                        └───────────────── sync: quantize in place, verify ◀──────────────┘

Row `step` of metrics.jsonl describes one step: the sync before it, its rollouts, its updates and,
when due, the evaluation of the weights that it leaves. Row -1 evaluates the untrained model.

With `rollout.ahead = 1` a step trains on what the weights before the last update have sampled, and
the next step's rollouts are sampled meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from qurl.advantages import Estimator
from qurl.config import Config
from qurl.errors import QurlError
from qurl.losses import Surrogate
from qurl.ops.device import peak_memory
from qurl.rewards import Reward
from qurl.rollout.canary import check_copy
from qurl.rollout.episode import Episode
from qurl.run.assembly import Parts, assemble, follow_driver
from qurl.run.choices import Choices, EngineFactory
from qurl.run.crash import keep_evidence
from qurl.run.directory import Run
from qurl.run.engines import add_noise
from qurl.run.evaluation import evaluate
from qurl.run.interrupt import Interrupt
from qurl.run.machine import settled_heap
from qurl.run.monitor import FALLEN_BACK, Monitor
from qurl.run.report import write_report
from qurl.run.trackers import Tracker
from qurl.sampling import Sampled, Selector, narrow
from qurl.sampling.age import NUM_ROWS, Rescored, age_metrics, rescore
from qurl.sampling.parts import Budget, Replay, SubSelect, Thermostat
from qurl.seeds import derive_seed
from qurl.tasks import Draw, Task
from qurl.trainer.batches import sample_records, spread
from qurl.types import Batch


def train(
    config: Config,
    *,
    objective: Surrogate | None = None,
    advantage: Estimator | None = None,
    engine: EngineFactory | None = None,
    task: Task | Draw | None = None,
    reward: Reward | None = None,
    select: Selector | type | None = None,
    episode: Episode | None = None,
    budget: Budget | type | None = None,
    thermostat: Thermostat | type | None = None,
    replay: Replay | type | None = None,
    subselect: SubSelect | type | None = None,
    trackers: Sequence[Tracker] = (),
) -> Path:
    """Train to `config.steps`, resuming where the run directory allows; returns that directory.

    Make the config with `load_config`, which adds all that `algo.name` sets; `Config(...)` has the
    plain defaults. Parts given here take the place of those that the recipe names; they have the
    same form (docs/extending.md). `trackers` are called besides those that the recipe asks for.
    Under torchrun, rank 0 trains, and the other ranks do what it says until it is done.
    """
    if follow_driver(config):
        return Path(config.run_dir).expanduser()
    parts_of_sampling = (budget, thermostat, replay, subselect)
    choices = Choices.of(
        config, objective, advantage, engine, task, reward, select, episode, *parts_of_sampling
    )
    config = choices.record_in(config)
    opened, settled = Run.open(config, trackers=trackers), settled_heap()
    with opened as run, assemble(config, run, choices) as parts, settled, Interrupt() as interrupt:
        last = parts.first_step - 1
        row = reopen_row(config, run, last)
        monitor = Monitor(config, parts, run)
        run.timer.lap()  # what came before belongs to no step
        if row is not None:
            finish_step(config, parts, run, monitor, last, row)
        for step in range(parts.first_step, config.steps):
            if monitor.reason_to_stop is not None:
                break
            with keep_evidence(config, parts, run, step):
                metrics = run_step(config, parts, run, step)
            finish_step(config, parts, run, monitor, step, metrics)
            is_stopping = interrupt.is_requested or monitor.reason_to_stop is not None
            if config.save.keep and (is_due(step, config.save.every, config.steps) or is_stopping):
                with run.timer("save"):
                    parts.save(config, run, step + 1)
            if interrupt.is_requested:
                raise KeyboardInterrupt
        report(run)
        monitor.stop()
        return run.path


def run_step(config: Config, parts: Parts, run: Run, step: int) -> dict[str, float]:
    """One step of the figure above, from the sync to the update; returns what it measured."""
    learner, hooks, timer = parts.learner, parts.hooks, run.timer
    metrics = sync(config, parts, run, step)
    sampled = take_rollouts(config, parts, run, step)
    metrics |= sampled.metrics
    seed = derive_seed(config.seed, "replay", step)
    graded = hooks.merge(sampled.graded, config.batch.problems, seed)
    seed = derive_seed(config.seed, "subselect", step)
    rows, bundle, advantage = narrow(graded, hooks.subselect, parts.advantage, seed)
    batch = learner.deal(graded, rows, bundle, step)
    rescored, begun = begin_next(config, parts, run, step, batch)
    with timer("prox"):
        scored = learner.recompute(batch, step)
    corrected = learner.correct(scored)
    trainable = learner.compare(corrected, advantage)
    with timer("update"):
        trained, update_metrics = learner.update(trainable, step)
    metrics |= update_metrics | learner.describe(trained, batch)
    num_tokens = trained.num_tokens * config.batch.epochs
    metrics["perf/train_tokens_per_s"] = num_tokens / timer.seconds("update")
    if config.rollout.ahead:
        again = learner.fetch(trained, spread(NUM_ROWS, len(batch)))
        metrics |= age_metrics(sampled.graded, step, rescored, again)
    parts.pending = finish_next(begun, run)
    hooks.observe(step, sampled.everything, metrics)
    shown = spread(config.track.samples, len(batch))
    records = (graded, rows[shown], learner.fetch(trained, shown), learner.policy.tokenizer)
    for record in sample_records(*records):
        run.sample(step, record)
    metrics |= hooks.metrics(lambda: learner.whole(trained))
    return metrics | parts.driver_bytes() | peak_memory(learner.device)


def finish_step(
    config: Config, parts: Parts, run: Run, monitor: Monitor, step: int, metrics: dict[str, float]
) -> None:
    """Evaluate the weights that a step leaves if that is due, and log the row of the step."""
    with keep_evidence(config, parts, run, step + 1), monitor.logging(step, metrics):
        if is_evaluated(config, step):
            metrics |= evaluate_policy(config, parts, run, num_updates=step + 1)


def reopen_row(config: Config, run: Run, step: int) -> dict[str, float] | None:
    """The row of the step before the first one, if it lacks an evaluation that is due, else None.

    The evaluation failed, or the recipe did not ask for it then. Row -1 is empty.
    """
    if not is_evaluated(config, step):
        return None
    row = run.find_row(step)
    if any(name.startswith("eval/") for name in row):
        return None
    if row:
        run.reopen(step)
    return row


def is_evaluated(config: Config, step: int) -> bool:
    return config.eval.every > 0 and is_due(step, config.eval.every, config.steps)


def take_rollouts(config: Config, parts: Parts, run: Run, step: int) -> Sampled:
    """The rollouts of a step: those begun beside the last update, or new ones."""
    if parts.pending is not None:
        return parts.pending
    sampler = parts.sampler(config, step)
    if not config.rollout.ahead:
        return sampler.collect()
    with run.timer("rollout"):
        return sampler.begin().result()


def begin_next(
    config: Config, parts: Parts, run: Run, step: int, batch: Batch
) -> tuple[Rescored | None, Future[Sampled] | None]:
    """With rollout.ahead, begin the next step's rollouts with the weights that were just synced.

    Before that, the engine scores some rows of this step's batch, which older weights sampled.
    """
    if not config.rollout.ahead:
        return None, None
    with run.timer("track"):
        few = parts.learner.fetch(batch, spread(NUM_ROWS, len(batch)))
        rescored = rescore(parts.actor, few, config.model.logits_chunk)
    if step + 1 == config.steps:
        return rescored, None
    with run.timer("rollout"):
        return rescored, parts.sampler(config, step + 1).begin()


def finish_next(begun: Future[Sampled] | None, run: Run) -> Sampled | None:
    """Wait for the next step's rollouts, as evaluations, checkpoints and the parts of sampling
    must find an idle engine and a settled history."""
    if begun is None:
        return None
    with run.timer("rollout"):
        return begun.result()


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether something done every `every` steps is due after this step; always after the last."""
    return step + 1 == num_steps or (every > 0 and (step + 1) % every == 0)


def sync(config: Config, parts: Parts, run: Run, step: int) -> dict[str, float]:
    """Quantize the weights into the engine, and see how much of the last update arrived."""
    quant = "none" if parts.is_full else config.quant.format
    with run.timer("sync"):
        source = parts.learner.source(parts.actor)
        synced = parts.actor.sync(source, version=step)
        gap = synced.canary_gap
        if not synced.verified:
            gap = check_copy(parts.actor, source, quant, step)
        if synced.kv_scales is not None:
            parts.learner.round_kv_(synced.kv_scales)
        noise = add_noise(config, parts.actor, step)
    # Not synced.code_flip_frac: a resumed engine has no codes to compare with. The tracker does.
    metrics = {"sync/canary_gap": gap, "sync/bytes": float(synced.bytes)}
    metrics |= noise | ({FALLEN_BACK: 1.0} if parts.is_full else {})
    if parts.tracker is not None:
        with run.timer("track"):
            metrics |= parts.tracker.measure(parts.learner.policy.model)
    return metrics | {"sync/seconds": synced.seconds}


def evaluate_policy(
    config: Config, parts: Parts, run: Run, *, num_updates: int
) -> dict[str, float]:
    """Held-out accuracy of the present weights, in each precision that the recipe asks for."""
    metrics: dict[str, float] = {}
    with run.timer("eval"):
        for precision in config.eval_precisions:
            engine = parts.full_engine if precision == "full" else parts.engine
            engine.sync(parts.learner.source(engine), version=num_updates)
            result = evaluate(config, engine, parts.held_out, parts.pool, precision)
            run.evaluation(num_updates, precision, result.outcomes)
            metrics |= result.metrics()
    return metrics


def report(run: Run) -> None:
    try:
        path = write_report(run.path)
        run.progress.print(f"report: {path}")
    except (QurlError, OSError) as error:  # the trained model is saved, whatever comes of this
        run.event("warning", f"no report.html: {error}")
