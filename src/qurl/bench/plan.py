"""A recipe on N GPUs: who trains, who samples, how long a step takes and what it holds.

    driver     all GPUs train, the first one samples: sync + rollout + train + driver
               (parallel.colocate = false)
    together   every GPU trains and samples in turn:  the same (parallel.trainers)
    replicas   the same with a whole trainer on each GPU, which adds up gradients after a mini-batch
               (parallel.shard = false)
    apart      T GPUs train, E sample, in turn:       the same, while the others wait
               (parallel.trainers and parallel.engines)
    ahead      apart, with rollout.ahead = 1:         sync + max(rollout, train + driver)

A rank trains on whole sequences, an engine samples whole groups, so more GPUs than sequences or
groups are of no use. Rollouts last as long as their longest completion, on any number of engines.
No line of this was run on more than one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from qurl.bench import cluster
from qurl.bench.arms import Arm
from qurl.bench.forecast import StepSeconds, Work, kv_bytes, step_seconds
from qurl.bench.limits import speed_of
from qurl.config import Config
from qurl.config.rules import find_unsharded
from qurl.run import budget
from qurl.run.budget import GIB, longest_sequence
from qurl.run.cards import Card
from qurl.run.shape import Shape
from qurl.run.shares import CACHE


@dataclass(frozen=True)
class Placement:
    """Which GPUs do what."""

    trainers: int
    engines: int
    is_colocated: bool
    ahead: int = 0
    is_sharded: bool = True

    @property
    def num_gpus(self) -> int:
        return self.trainers if self.is_colocated else self.trainers + self.engines

    @property
    def is_driver_alone(self) -> bool:
        """Whether the first of several trainers samples for all."""
        return self.is_colocated and self.engines < self.trainers

    def __str__(self) -> str:
        if not self.is_sharded:
            return "replicas"
        if self.is_colocated:
            return "driver" if self.is_driver_alone else "together"
        return "ahead" if self.ahead else "apart"


@dataclass(frozen=True)
class Prediction:
    """A step of one arm on one placement; seconds, bytes, GiB."""

    arm: str
    placement: Placement
    rollout: float
    compute: float
    exchange: float
    sync: float
    driver: float
    rest: float
    trainer_gib: float
    engine_gib: float
    fits: bool
    exchanged_bytes: float
    sync_bytes: float
    driver_bytes: float
    num_tokens: float

    @property
    def train(self) -> float:
        """Products and exchanges of shards overlap; gradients are added up after all products."""
        if not self.placement.is_sharded:
            return self.compute + self.exchange
        return max(self.compute, self.exchange)

    @property
    def step(self) -> float:
        train = self.train + self.driver + self.rest
        if self.placement.ahead:
            return self.sync + max(self.rollout, train)
        return self.sync + self.rollout + train


@dataclass(frozen=True)
class Planner:
    """A recipe and its model on GPUs of one kind."""

    config: Config
    shape: Shape
    card: Card
    num_gpus: int

    def splits(self) -> Iterator[Placement]:
        """Training on all GPUs, and up to 32 splits into whole nodes, or GPUs of the only node.

        Which there are depends on the engine (`qurl.run.engines`).
        """
        total, engine = self.num_gpus, self.config.rollout.engine
        if find_unsharded(self.config):
            yield Placement(total, total if engine == "local" else 1, True, is_sharded=False)
            return
        yield Placement(total, 1, True)
        if engine == "local":
            yield Placement(total, total, True)
            yield Placement(total, total, True, is_sharded=False)
        if engine not in ("local", "vllm"):
            return
        node = cluster.NODE
        unit = node * max(1, total // (32 * node)) if total > node else 1
        for trainers in range(unit, total, unit):
            yield Placement(trainers, total - trainers, False)

    def notes(self, predictions: Sequence[Prediction]) -> list[str]:
        """What a run needs beside the table: main memory to start, and time lost to failures."""
        loaded = budget.loaded_bytes(self.config, self.shape) / GIB
        notes = [f"the driver needs {loaded:.0f} GiB of main memory to load the models"]
        if steps := [p.step for p in predictions if p.fits]:
            hours, every = cluster.MTBF_HOURS / self.num_gpus, max(1, self.config.save.every)
            lost = cluster.lost_share(self.num_gpus, every * min(steps))
            notes.append(
                f"extrapolated: a failure every {hours:,.0f} hours, which costs {lost:.1%} of the "
                f"time with save.every = {every}"
            )
        return notes

    def best(self, arm: Arm, work: Work) -> list[Prediction]:
        """The fastest of each kind, of those that fit if one does.

        `work` says what a sequence needs; how many a GPU has, is decided here.
        """
        found: dict[str, Prediction] = {}
        for split in self.splits():
            first = self.predict(arm, work, split)
            for ahead in (0,) if split.is_colocated else (0, 1):
                new = replace(first, placement=replace(split, ahead=ahead))
                old = found.get(str(new.placement))
                if old is None or (not new.fits, new.step) < (not old.fits, old.step):
                    found[str(new.placement)] = new
        return list(found.values())

    def predict(self, arm: Arm, work: Work, placement: Placement) -> Prediction:
        trainer, engine, cache = self.memory(arm, placement)
        seconds = self._step_seconds(arm, work, placement, cache)
        trainers = placement.trainers
        exchange, exchanged = self._exchange(arm, work, placement)
        sync, shipped = self._sync(arm, placement)
        is_shelved = trainers > 1 and not placement.is_driver_alone
        lengths = (work.prompt_tokens, work.new_tokens)
        driver, received, sent = cluster.driver_seconds(
            self.config.sequences_per_step, *lengths, trainers, is_shelved=is_shelved
        )
        return Prediction(
            arm=arm.name,
            placement=placement,
            rollout=seconds.rollout,
            compute=seconds.train,
            exchange=exchange,
            sync=sync,
            driver=driver,
            rest=seconds.rest,
            trainer_gib=trainer / GIB,
            engine_gib=engine / GIB,
            fits=max(trainer, engine) <= self.card.memory and cache >= self._longest_cache(arm),
            exchanged_bytes=exchanged,
            sync_bytes=shipped,
            driver_bytes=received + sent,
            num_tokens=self.config.sequences_per_step * work.new_tokens,
        )

    def _exchange(self, arm: Arm, work: Work, placement: Placement) -> tuple[float, float]:
        """Seconds of the trainers' exchanges, and bytes that each receives."""
        ranks = (self.shape, self.card, placement.trainers)
        if placement.is_sharded:
            passes = self._passes(work, placement.trainers)
            return cluster.exchange_seconds(*ranks, *passes, is_unified=arm.is_unified)
        num_updates = self.config.updates_per_step * work.num_networks
        return cluster.addition_seconds(
            *ranks, budget.num_trained(self.config, self.shape), num_updates
        )

    def _sync(self, arm: Arm, placement: Placement) -> tuple[float, float]:
        """Seconds of a sync, and its bytes. A replica codes its own weights for its engine."""
        if not placement.is_sharded:
            return cluster.VERIFY_SECONDS, 0.0
        weights, is_colocated = (self.shape, arm.format), placement.is_colocated
        places = (placement.trainers, placement.engines)
        seconds = cluster.sync_seconds(*weights, self.card, *places, is_colocated=is_colocated)
        shipped = cluster.collected_bytes if is_colocated else cluster.shipment_bytes
        return seconds, shipped(*weights)

    def _step_seconds(
        self, arm: Arm, work: Work, placement: Placement, cache: float
    ) -> StepSeconds:
        """One trainer's and one engine's share, on the hardware of one GPU."""
        speed = speed_of(self.card)
        rows = self._minibatch_rows(placement.trainers) * self.config.batch.minibatches
        groups = math.ceil(self.config.batch.problems / placement.engines)
        sampled = groups * self.config.sampling.group_size
        tokens = cache / self._longest_cache(arm) * longest_sequence(self.config)
        capacity = max(1.0, tokens / (work.prompt_tokens + work.new_tokens / 2))
        together = min(sampled, self.config.rollout.max_batch, capacity)
        num_ranks = placement.trainers if placement.is_sharded else 1
        training = replace(work, sequences=rows, num_ranks=num_ranks)
        sampling = replace(work, sequences=sampled, together=together)
        trained, asked = (step_seconds(self.shape, arm, speed, x) for x in (training, sampling))
        return replace(trained, rollout=asked.rollout, rest=asked.rest)

    def _minibatch_rows(self, trainers: int) -> int:
        """Most sequences of a mini-batch that one rank has."""
        parts = self.config.batch.minibatches * trainers
        return math.ceil(self.config.sequences_per_step / parts)

    def _longest_cache(self, arm: Arm) -> float:
        """Bytes of the keys of one sequence, without which nothing is sampled."""
        return kv_bytes(self.shape, arm) * longest_sequence(self.config)

    def _passes(self, work: Work, trainers: int) -> tuple[float, float]:
        """How often a rank gathers all weights and reduces all gradients in a step.

        All ranks run as many micro-batches as the one with the most.
        """
        config, length = self.config, work.prompt_tokens + work.new_tokens
        rows = self._minibatch_rows(trainers)
        per_piece = max(1, config.batch.microbatch_tokens // length)
        pieces = config.batch.minibatches * math.ceil(rows / per_piece)
        forwards = pieces * work.num_forwards
        updates = pieces * work.num_passes * work.num_networks
        return forwards + 2 * updates, updates

    def memory(self, arm: Arm, placement: Placement) -> tuple[float, float, float]:
        """Bytes at the peak of a trainer's GPU and of an engine's, and of a cache."""
        parallel = replace(
            self.config.parallel,
            trainers=placement.trainers,
            shard=placement.is_sharded,
            engines=0 if placement.is_colocated else placement.engines,
            colocate=not placement.is_driver_alone,
            min_engines=1,
        )
        config = replace(arm.apply(self.config), parallel=parallel)
        rows = budget.memory_rows(config, self.shape, self.card.memory, is_cuda=True)
        trainer = budget.peak_memory(config, rows)
        if placement.is_colocated:
            return trainer, trainer, rows.get(CACHE, 0.0)
        engine = budget.engine_rows(config, self.shape, self.card.memory, is_cuda=True)
        return trainer, sum(engine.values()), engine.get(CACHE, 0.0)


def build_plan_table(predictions: Sequence[Prediction]) -> Table:
    """Seconds of a step by part; `GiB` of trainer and engine, where they are apart."""
    table = Table(box=None, pad_edge=False)
    table.add_column("placement", no_wrap=True)
    for name in ("GPUs", "rollout", "train", "exchange", "sync", "driver", "step", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in predictions:
        place, parts = p.placement, (p.rollout, p.train, p.exchange, p.sync, p.driver, p.step)
        split = f"{place.trainers}+{place.engines}"
        gib = f"{p.trainer_gib:.0f}" + ("" if place.is_colocated else f"/{p.engine_gib:.0f}")
        table.add_row(
            f"{p.arm} {place}",
            f"{place.trainers}" if place.is_colocated else split,
            *([shorten(seconds) for seconds in parts] if p.fits else ["-"] * len(parts)),
            gib + ("" if p.fits else "!"),
        )
    return table


def shorten(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"
