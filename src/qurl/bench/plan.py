"""A recipe on N GPUs: who trains, who samples, how long a step takes and what it holds.

    driver     all GPUs train, the first one samples: sync + rollout + train + driver
    together   every GPU trains and samples in turn:  the same
    apart      T GPUs train, E sample, in turn:       the same, while the others wait
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

from qurl.bench.arms import Arm
from qurl.bench.cluster import (
    MTBF_HOURS,
    NODE,
    Passes,
    driver_seconds,
    exchange_seconds,
    lost_share,
    shipment_bytes,
    sync_seconds,
)
from qurl.bench.forecast import StepSeconds, Work, step_seconds
from qurl.bench.limits import speed_of
from qurl.bench.shapes import Shape
from qurl.config import Config
from qurl.run.budget import CACHE, GIB, UPDATE, longest_sequence, memory_rows
from qurl.run.cards import Card
from qurl.run.shares import DRIVER, LOADING, follower_rows
from qurl.run.sizes import ModelSize

ENGINE = ("engine weights", "engine of evaluations", "CUDA")


@dataclass(frozen=True)
class Placement:
    """Which GPUs do what."""

    trainers: int
    engines: int
    is_colocated: bool
    ahead: int = 0

    @property
    def num_gpus(self) -> int:
        return self.trainers if self.is_colocated else self.trainers + self.engines

    @property
    def is_driver_alone(self) -> bool:
        """Whether the first of several trainers samples for all."""
        return self.is_colocated and self.engines < self.trainers

    def __str__(self) -> str:
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
    loading_gib: float
    fits: bool
    exchanged_bytes: float
    sync_bytes: float
    driver_bytes: float
    num_tokens: float

    @property
    def train(self) -> float:
        """Products and exchanges overlap."""
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
    size: ModelSize
    shape: Shape
    card: Card
    num_gpus: int

    def splits(self) -> Iterator[Placement]:
        """Training on all GPUs, and up to 32 splits into whole nodes, or GPUs of the only node."""
        total = self.num_gpus
        yield Placement(total, 1, True)
        yield Placement(total, total, True)
        unit = NODE * max(1, total // (32 * NODE)) if total > NODE else 1
        for trainers in range(unit, total, unit):
            yield Placement(trainers, total - trainers, False)

    def notes(self, predictions: Sequence[Prediction], save_every: int) -> list[str]:
        """What stops a run that the table shows: loading, and failures."""
        notes, room = [], self.card.memory / GIB
        if (loading := max(p.loading_gib for p in predictions)) > room:
            notes.append(
                f"does not start today: each rank loads whole models, {loading:.0f} of {room:.0f} "
                "GiB, before it keeps its shard"
            )
        hours, fitting = MTBF_HOURS / self.num_gpus, [p for p in predictions if p.fits]
        if fitting:
            fastest = min(fitting, key=lambda p: p.step)
            lost = lost_share(self.num_gpus, max(1, save_every) * fastest.step)
            notes.append(
                f"extrapolated: a failure every {hours:,.0f} hours, which costs {lost:.1%} of the "
                f"time with save.every = {max(1, save_every)}"
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
        trainer, engine, loading, cache = self.memory(arm, placement)
        seconds = self._step_seconds(arm, work, placement, cache)
        passes = self._passes(work, placement.trainers)
        exchange, exchanged = exchange_seconds(
            self.size, self.card, placement.trainers, passes, is_unified=arm.is_unified
        )
        # The driver's own engine quantizes weights that were gathered whole.
        shipped = 4.0 * self.size.num_parameters
        if not placement.is_driver_alone:
            shipped = shipment_bytes(self.size, arm.quant["format"])
        groups = (placement.trainers, placement.engines)
        tokens = self._sequences * work.new_tokens
        padded = self._sequences * (work.prompt_tokens + work.longest)
        driver, received, sent = driver_seconds(tokens, padded, placement.trainers)
        return Prediction(
            arm=arm.name,
            placement=placement,
            rollout=seconds.rollout,
            compute=seconds.train,
            exchange=exchange,
            sync=sync_seconds(shipped, self.card, *groups, is_colocated=placement.is_colocated),
            driver=driver,
            rest=seconds.rest,
            trainer_gib=trainer / GIB,
            engine_gib=engine / GIB,
            loading_gib=loading / GIB,
            fits=max(trainer, engine) <= self.card.memory and cache >= self._longest_cache(arm),
            exchanged_bytes=exchanged,
            sync_bytes=shipped,
            driver_bytes=received + sent,
            num_tokens=tokens,
        )

    @property
    def _sequences(self) -> int:
        return self.config.batch.problems * self.config.sampling.group_size

    def _step_seconds(
        self, arm: Arm, work: Work, placement: Placement, cache: float
    ) -> StepSeconds:
        """One trainer's and one engine's share, on the hardware of one GPU."""
        speed = speed_of(self.card)
        rows = math.ceil(self._sequences / (self.config.batch.minibatches * placement.trainers))
        rows *= self.config.batch.minibatches
        groups = math.ceil(self.config.batch.problems / placement.engines)
        sampled = groups * self.config.sampling.group_size
        tokens = cache / self._longest_cache(arm) * longest_sequence(self.config)
        capacity = max(1.0, tokens / (work.prompt_tokens + work.new_tokens / 2))
        together = min(sampled, self.config.rollout.max_batch, capacity)
        ranks = placement.trainers
        trained = step_seconds(
            self.shape, arm, speed, replace(work, sequences=rows, num_ranks=ranks)
        )
        asked = step_seconds(
            self.shape, arm, speed, replace(work, sequences=sampled, together=together)
        )
        return replace(trained, rollout=asked.rollout, rest=asked.rest)

    def _longest_cache(self, arm: Arm) -> float:
        """Bytes of the keys of one sequence, without which nothing is sampled."""
        itemsize = 1 if arm.quant.get("kv") == "fp8" else 2
        return itemsize * self.size.kv_numbers_per_token * longest_sequence(self.config)

    def _passes(self, work: Work, trainers: int) -> Passes:
        """All ranks run as many micro-batches as the one with the most."""
        config, length = self.config, work.prompt_tokens + work.new_tokens
        rows = math.ceil(self._sequences / (config.batch.minibatches * trainers))
        per_piece = max(1, config.batch.microbatch_tokens // length)
        pieces = config.batch.minibatches * math.ceil(rows / per_piece)
        forwards = pieces * work.num_forwards
        updates = pieces * work.num_passes * work.num_networks
        return Passes(forwards + 2 * updates, updates)

    def memory(self, arm: Arm, placement: Placement) -> tuple[float, float, float, float]:
        """Bytes at the peak of a trainer's GPU and of an engine's, while loading, of a cache.

        A GPU that does both holds both, but for a cache that is given back (rollout.release_kv).
        """
        problems = math.ceil(self.config.batch.problems / placement.engines)
        parallel = replace(self.config.parallel, trainers=placement.trainers)
        config = replace(arm.apply(self.config), parallel=parallel)
        rows = memory_rows(config, self.size, is_cuda=True)
        asked = replace(config, batch=replace(config.batch, problems=problems))
        wanted = memory_rows(asked, self.size, is_cuda=True)[CACHE]
        if placement.trainers > 1:
            trainer = follower_rows(rows)
            loading = trainer.pop(LOADING)
        else:
            trainer = {name: n for name, n in rows.items() if name not in (*ENGINE[:2], CACHE)}
            loading = rows["policy, FP32"]
        needed, engine = sum(trainer.values()), sum(rows.get(name, 0.0) for name in ENGINE)
        if placement.is_colocated:
            update = sum(trainer.get(name, 0.0) for name in UPDATE)
            engine += needed - update - rows["CUDA"]
            engine += rows.get(DRIVER[0], 0.0) * placement.is_driver_alone
            needed = engine + update
        free = max(0.0, self.card.memory - engine)
        cache = min(wanted, config.rollout.kv_memory_frac * free)
        if placement.is_colocated and not config.rollout.release_kv:
            needed += cache
        return needed, engine + cache, loading, cache


def build_plan_table(predictions: Sequence[Prediction]) -> Table:
    """Seconds of a step by part; `GiB` of trainer and engine, where they are apart."""
    table = Table(box=None, pad_edge=False)
    table.add_column("placement", no_wrap=True)
    for name in ("GPUs", "rollout", "train", "FSDP", "sync", "driver", "step", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in predictions:
        place, parts = p.placement, (p.rollout, p.train, p.exchange, p.sync, p.driver, p.step)
        split = f"{place.trainers}+{place.engines}"
        gib = f"{p.trainer_gib:.0f}" + ("" if place.is_colocated else f"/{p.engine_gib:.0f}")
        table.add_row(
            f"{p.arm} {place}",
            f"{place.trainers}" if place.is_colocated else split,
            *([shorten(seconds) for seconds in parts] if p.fits else "-" * len(parts)),
            gib + ("" if p.fits else "!"),
        )
    return table


def shorten(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"
