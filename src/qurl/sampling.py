"""Which problems are asked, and which groups are kept."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from traceback import extract_tb
from typing import Any

import torch

from qurl.config import AlgoConfig, Config
from qurl.errors import ConfigError, DataError, TrainingError
from qurl.plugins import load_plugin
from qurl.rewards import Grading, Pool, reward_metrics
from qurl.rewards.grading import overlong_cache
from qurl.rollout import Engine
from qurl.seeds import derive_seed, generator
from qurl.tasks.joined import JoinedTask
from qurl.tasks.task import Task
from qurl.types import Graded, Problem, SamplingParams

_REMEMBERED = 8
"""Groups per problem whose accuracies are kept."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2

Selector = Callable[[int, int, int, Mapping[int, Sequence[float]], int], Sequence[int]]
"""Chooses the indices of the next problems, as `shuffle` does. The choice must depend on the
arguments alone, so that a resumed run goes on as the original would have."""


def shuffle(
    count: int,
    num_problems: int,
    num_taken: int,
    accuracies: Mapping[int, Sequence[float]],
    seed: int,
) -> list[int]:
    """Every problem once per epoch, in a new random order each time.

    `num_taken` problems were handed out before these `count`. `accuracies` maps the index of a
    problem to the mean accuracy of its last groups, oldest first; this selector ignores it.
    """
    end, indices = num_taken + count, []
    for epoch in range(num_taken // num_problems, (end - 1) // num_problems + 1):
        order = torch.randperm(num_problems, generator=generator(seed, "epoch", epoch)).tolist()
        first = epoch * num_problems
        indices += order[max(0, num_taken - first) : end - first]
    return indices


def mix(sizes: Sequence[int], shares: Sequence[float]) -> Selector:
    """A selector for parts of `sizes` problems, of which each gets its share of every batch.

    Position t of the run belongs to the part whose interval of [0, 1) holds frac(t * golden ratio),
    which spreads the parts as evenly as can be. Within a part, problems come as `shuffle` has them.
    """
    ends = torch.tensor(shares, dtype=torch.float64).cumsum(0)[:-1] / sum(shares)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]

    def select(
        count: int,
        num_problems: int,
        num_taken: int,
        accuracies: Mapping[int, Sequence[float]],
        seed: int,
    ) -> list[int]:
        places = torch.arange(num_taken + count, dtype=torch.float64) * _GOLDEN_RATIO % 1
        parts = torch.bucketize(places, ends, right=True)
        indices = torch.empty(count, dtype=torch.int64)
        for part, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            is_here = parts == part
            num_before, is_next = int(is_here[:num_taken].sum()), is_here[num_taken:]
            part_seed = derive_seed(seed, "part", part)
            chosen = shuffle(int(is_next.sum()), size, num_before, accuracies, part_seed)
            indices[is_next] = torch.tensor(chosen, dtype=torch.int64) + start
        return indices.tolist()

    return select


class ProblemStream:
    """Hands out a task's problems as a selector chooses them.

    `select` is "shuffle", the `module:name` of your own selector, or the function itself.
    """

    def __init__(self, task: Task, seed: int, select: str | Selector = "shuffle") -> None:
        if len(task) == 0:
            raise DataError(f"task {task.name!r} has no problems")
        if select == "shuffle" and isinstance(task, JoinedTask):
            select = mix(task.sizes, task.shares)
        elif isinstance(select, str):
            select = shuffle if select == "shuffle" else load_plugin(select, "sampling.select")
        self.task, self.seed, self.position = task, seed, 0
        self._select: Selector = select  # type: ignore[assignment]
        self._accuracies: dict[int, list[float]] = {}
        self._indices: dict[str, int] = {}
        """Of the problems that were handed out and not recorded yet, by id."""

    def take(self, count: int) -> list[Problem]:
        size = len(self.task)
        try:
            chosen = self._select(count, size, self.position, self._accuracies, self.seed)
        except Exception as error:  # code of yours may raise anything
            *_, place = extract_tb(error.__traceback__)
            raise ConfigError(
                f"sampling.select failed: {type(error).__name__}: {error} ({place.filename}, line "
                f"{place.lineno})"
            ) from error
        try:
            indices = [operator.index(index) for index in chosen]
        except TypeError:  # no list, or not of whole numbers
            indices = []
        if len(indices) != count or not all(0 <= index < size for index in indices):
            raise ConfigError(
                f"sampling.select returned {str(chosen)[:200]}; it must return {count} indices "
                f"from 0 to {size - 1}"
            )
        return [self._hand_out(index) for index in indices]

    def _hand_out(self, index: int) -> Problem:
        problem = self.task[index]
        # Engines key their randomness by id: a problem that comes again must be answered anew.
        repetition = self.position // len(self.task) if self._select is shuffle else self.position
        if repetition:
            problem = dataclasses.replace(problem, id=f"{problem.id}@{repetition}")
        self.position += 1
        self._indices[problem.id] = index
        return problem

    def record(self, graded: Sequence[Graded]) -> None:
        """Remember how well problems of this stream were solved."""
        for group in graded:
            seen = self._accuracies.setdefault(self._indices.pop(group.rollout.problem.id), [])
            seen[:] = [*seen, fmean(group.accuracies)][-_REMEMBERED:]

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        accuracies = {index: list(seen) for index, seen in self._accuracies.items()}
        return {"position": self.position, "accuracies": accuracies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stopped; old ones hold no accuracies."""
        self.position = state["position"]
        self._accuracies = {i: list(seen) for i, seen in state.get("accuracies", {}).items()}


class Sampler:
    """Takes problems, generates and grades, as often as `collect` asks within one step.

    Grading starts with the first finished group. `timing_s/rollout` is the time until the last one
    is finished, and `timing_s/grade` what grading takes after that.
    """

    def __init__(
        self, config: Config, stream: ProblemStream, engine: Engine, pool: Pool, step: int
    ) -> None:
        self.config, self.stream, self.engine, self.pool = config, stream, engine, pool
        self.step = step
        self.graded: list[Graded] = []
        self._rollout_seconds = self._grade_seconds = 0.0

    def __call__(self, round: int, count: int) -> list[Graded]:
        sampling, max_tokens = self.config.sampling, self.config.sampling.max_tokens
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            stop=sampling.stops,
            group_size=sampling.group_size,
            seed=derive_seed(self.config.seed, "rollout", self.step, round),
        )
        problems, grading = self.stream.take(count), Grading(self.pool)
        start = time.perf_counter()
        with self.engine.stream(params) as rollouts:
            rollouts.submit(problems)
            for rollout in rollouts:
                grading.submit(rollout)
        generated = time.perf_counter()
        finished = grading.rewards(overlong_cache=self.overlong_cache, max_tokens=max_tokens)
        self._rollout_seconds += generated - start
        self._grade_seconds += time.perf_counter() - generated
        by_id = {group.rollout.problem.id: group for group in finished}
        graded = [by_id[problem.id] for problem in problems]
        self.stream.record(graded)
        self.graded += graded
        return graded

    def metrics(self) -> dict[str, float]:
        """Describe everything that was sampled, before groups are dropped."""
        lengths = [len(c.token_ids) for g in self.graded for c in g.rollout.completions]
        prompts = [tuple(group.rollout.problem.prompt_ids) for group in self.graded]
        metrics = reward_metrics(self.graded) | {
            "sampling/distinct_frac": len(set(prompts)) / len(prompts),
            "perf/rollout_tokens": float(sum(lengths)),
            "perf/rollout_tokens_per_s": sum(lengths) / self._rollout_seconds,
            "timing_s/rollout": self._rollout_seconds,
            "timing_s/grade": self._grade_seconds,
        }
        if (saturated := getattr(self.engine, "kv_saturated_frac", None)) is not None:
            metrics["rollout/kv_saturated_frac"] = saturated
        if self.overlong_cache:
            allowed = self.config.sampling.max_tokens - self.overlong_cache
            metrics["reward/overlong"] = fmean(length > allowed for length in lengths)
        return metrics

    @property
    def overlong_cache(self) -> int:
        """Number of last tokens that are punished."""
        return overlong_cache(self.config.algo.overlong_frac, self.config.sampling.max_tokens)


@dataclass(frozen=True)
class Collected:
    """The groups of a step and how they were obtained."""

    graded: list[Graded]
    rounds: int
    num_groups_sampled: int
    num_groups_with_signal: int
    """All of them if no group is dropped; the surplus counts."""

    def metrics(self) -> dict[str, float]:
        return {
            "sampling/rounds": float(self.rounds),
            "sampling/groups_kept_frac": self.num_groups_with_signal / self.num_groups_sampled,
        }


def has_signal(group: Graded) -> bool:
    """Do accuracies differ within the group, so that there is something to compare?

    The shaped reward does not count: length penalties would make a group of wrong answers look
    informative.
    """
    return len(set(group.accuracies)) > 1


def collect(
    sample: Callable[[int, int], Sequence[Graded]], num_groups: int, algo: AlgoConfig
) -> Collected:
    """`num_groups` groups from `sample(round, count)`.

    With dynamic sampling (DAPO), groups without signal are dropped and more are sampled from the
    same weights until there are enough; the surplus is cut off.
    """
    dynamic = algo.dynamic_sampling
    kept: list[Graded] = []
    num_sampled = 0
    for round in range(algo.max_gen_rounds if dynamic else 1):
        groups = sample(round, num_groups * (algo.gen_multiple if dynamic else 1))
        num_sampled += len(groups)
        kept += [group for group in groups if has_signal(group) or not dynamic]
        if len(kept) >= num_groups:
            return Collected(kept[:num_groups], round + 1, num_sampled, len(kept))
    raise TrainingError(
        f"dynamic sampling found {len(kept)} groups with mixed outcomes among {num_sampled} in "
        f"algo.max_gen_rounds = {algo.max_gen_rounds} rounds, and {num_groups} are needed: the "
        "problems are too easy or too hard for this policy. Raise algo.max_gen_rounds and resume; "
        "or, in another run_dir, raise sampling.group_size, change the task, or turn "
        "algo.dynamic_sampling off"
    )
