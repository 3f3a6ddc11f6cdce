"""Which problems are asked, and which groups are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from qurl.config import AlgoConfig, Config
from qurl.errors import DataError, TrainingError
from qurl.rewards import grade_rollouts, reward_metrics
from qurl.rewards.pool import GradingPool
from qurl.rewards.shaping import overlong_cache
from qurl.rollout import Engine
from qurl.run.directory import Stopwatch
from qurl.seeds import derive_seed, generator
from qurl.tasks.task import Task
from qurl.types import Graded, Problem, SamplingParams


class ProblemStream:
    """The task's problems in a new random order each epoch; `position` is all of its state."""

    def __init__(self, task: Task, seed: int) -> None:
        if len(task) == 0:
            raise DataError(f"task {task.name!r} has no problems")
        self.task = task
        self.seed = seed
        self.position = 0
        self._epoch, self._order = -1, torch.empty(0)

    def take(self, count: int) -> list[Problem]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Problem:
        epoch, offset = divmod(self.position, len(self.task))
        if epoch != self._epoch:
            order = torch.randperm(len(self.task), generator=generator(self.seed, "epoch", epoch))
            self._epoch, self._order = epoch, order
        self.position += 1
        problem = self.task[int(self._order[offset])]
        # Engines key their randomness by id: asked twice in a step, it must not be answered alike.
        return dataclasses.replace(problem, id=f"{problem.id}@{epoch}") if epoch else problem


class Sampler:
    """Takes problems, generates and grades, as often as `collect` asks within one step."""

    def __init__(
        self,
        config: Config,
        stream: ProblemStream,
        engine: Engine,
        pool: GradingPool,
        timer: Stopwatch,
        step: int,
    ) -> None:
        self.config, self.stream, self.engine, self.pool = config, stream, engine, pool
        self.timer, self.step = timer, step
        self.graded: list[Graded] = []

    def __call__(self, round: int, count: int) -> list[Graded]:
        sampling, max_tokens = self.config.sampling, self.config.sampling.max_tokens
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            stop=sampling.stop,
            group_size=sampling.group_size,
            seed=derive_seed(self.config.seed, "rollout", self.step, round),
        )
        problems = self.stream.take(count)
        with self.timer("rollout"):
            rollouts = self.engine.generate(problems, params)
        with self.timer("grade"):
            graded = grade_rollouts(
                rollouts, self.pool, overlong_cache=self.overlong_cache, max_tokens=max_tokens
            )
        self.graded += graded
        return graded

    def metrics(self) -> dict[str, float]:
        """Of all that was sampled, before any group was dropped."""
        lengths = [len(c.token_ids) for g in self.graded for c in g.rollout.completions]
        metrics = reward_metrics(self.graded) | {
            "perf/rollout_tokens": float(sum(lengths)),
            "perf/rollout_tokens_per_s": sum(lengths) / self.timer.seconds("rollout"),
        }
        if self.overlong_cache:
            allowed = self.config.sampling.max_tokens - self.overlong_cache
            metrics["reward/overlong"] = fmean(length > allowed for length in lengths)
        return metrics

    @property
    def overlong_cache(self) -> int:
        """The last tokens of a completion that are punished."""
        return overlong_cache(self.config.algo.overlong_frac, self.config.sampling.max_tokens)


@dataclass(frozen=True)
class Collected:
    """The groups of a step and how they were come by."""

    graded: list[Graded]
    rounds: int
    num_groups_sampled: int
    num_groups_with_signal: int
    """All of them where no group is dropped; the surplus counts."""

    def metrics(self) -> dict[str, float]:
        return {
            "sampling/rounds": float(self.rounds),
            "sampling/groups_kept_frac": self.num_groups_with_signal / self.num_groups_sampled,
        }


def has_signal(group: Graded) -> bool:
    """Not all completions are equally right: only then is there anything to compare.

    This looks at accuracy, not at the shaped reward: length penalties would make a group of wrong
    answers look informative.
    """
    return len(set(group.accuracies)) > 1


def collect(
    sample: Callable[[int, int], Sequence[Graded]], num_groups: int, algo: AlgoConfig
) -> Collected:
    """`num_groups` groups from `sample(round, count)`.

    With dynamic sampling (DAPO), groups without signal are dropped and more are sampled from the
    same weights until there are enough; the surplus is cut off.
    """
    if not algo.dynamic_sampling:
        graded = list(sample(0, num_groups))
        num = len(graded)
        return Collected(graded, rounds=1, num_groups_sampled=num, num_groups_with_signal=num)
    kept: list[Graded] = []
    num_sampled = 0
    for round in range(algo.max_gen_rounds):
        groups = sample(round, num_groups * algo.gen_multiple)
        num_sampled += len(groups)
        kept += [group for group in groups if has_signal(group)]
        if len(kept) >= num_groups:
            return Collected(kept[:num_groups], round + 1, num_sampled, len(kept))
    raise TrainingError(
        f"dynamic sampling found {len(kept)} groups with mixed outcomes among {num_sampled} in "
        f"algo.max_gen_rounds = {algo.max_gen_rounds} rounds, and {num_groups} are needed: the "
        "problems are too easy or too hard for this policy. Raise algo.max_gen_rounds and resume; "
        "or, in another run_dir, raise sampling.group_size, change the task, or turn "
        "algo.dynamic_sampling off"
    )
