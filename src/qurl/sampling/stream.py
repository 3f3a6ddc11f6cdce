"""Which problems are asked: selectors, and the stream that hands problems out."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qurl.errors import ConfigError, DataError
from qurl.plugins import naming_failures
from qurl.sampling.history import History
from qurl.seeds import derive_seed, generator
from qurl.tasks.joined import JoinedTask
from qurl.tasks.task import Task
from qurl.types import Graded, Problem

_GOLDEN_RATIO = (5**0.5 - 1) / 2

Selector = Callable[[int, int, int, History, int], Sequence[int]]
"""Chooses the indices of the next problems, as `shuffle` does. The choice must depend on the
arguments alone, or on a state that is saved (`qurl.sampling.parts`), so that a resumed run goes on
as the original would have."""


def shuffle(
    count: int, num_problems: int, num_taken: int, history: History, seed: int
) -> list[int]:
    """Every problem once per epoch, in a new random order each time.

    `num_taken` problems were handed out before these `count`. `history` maps the index of a problem
    to the mean accuracy of its last groups, oldest first; this selector ignores it.
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
        count: int, num_problems: int, num_taken: int, history: History, seed: int
    ) -> list[int]:
        places = torch.arange(num_taken + count, dtype=torch.float64) * _GOLDEN_RATIO % 1
        parts = torch.bucketize(places, ends, right=True)
        indices = torch.empty(count, dtype=torch.int64)
        for part, (size, start) in enumerate(zip(sizes, starts, strict=True)):
            is_here = parts == part
            num_before, is_next = int(is_here[:num_taken].sum()), is_here[num_taken:]
            part_seed = derive_seed(seed, "part", part)
            chosen = shuffle(int(is_next.sum()), size, num_before, history, part_seed)
            indices[is_next] = torch.tensor(chosen, dtype=torch.int64) + start
        return indices.tolist()

    return select


class ProblemStream:
    """Hands out a task's problems as a selector chooses them, and keeps their history."""

    def __init__(
        self, task: Task, seed: int, select: Selector = shuffle, *, keeps_responses: bool = False
    ) -> None:
        if len(task) == 0:
            raise DataError(f"task {task.name!r} has no problems")
        if select is shuffle and isinstance(task, JoinedTask):
            select = mix(task.sizes, task.shares)
        self.task, self.seed, self.select = task, seed, select
        self.history = History(len(task), keeps_responses=keeps_responses)
        self._indices: dict[str, int] = {}
        """Places in the task of problems that were handed out and not recorded yet, by id."""

    @property
    def position(self) -> int:
        """Problems handed out so far."""
        return self.history.num_taken

    def take(self, count: int) -> list[Problem]:
        """The next problems, as the selector wants them."""
        size = len(self.task)
        with naming_failures("sampling.select"):
            chosen = self.select(count, size, self.position, self.history, self.seed)
        try:
            indices = [operator.index(index) for index in chosen]
        except TypeError:  # no list, or not of whole numbers
            indices = []
        if len(indices) != count or not all(0 <= index < size for index in indices):
            raise ConfigError(
                f"sampling.select returned {str(chosen)[:200]}; it must return {count} indices "
                f"from 0 to {size - 1}"
            )
        return self.hand_out(indices)

    def hand_out(self, indices: Sequence[int]) -> list[Problem]:
        """These problems, whoever chose them."""
        return [self._hand_out(index) for index in indices]

    def _hand_out(self, index: int) -> Problem:
        problem = self.task[index]
        # Engines key their randomness by id: a problem that comes again must be answered anew.
        repetition = self.position // len(self.task) if self.select is shuffle else self.position
        if repetition:
            problem = dataclasses.replace(problem, id=f"{problem.id}@{repetition}")
        if problem.id in self._indices:
            raise DataError(
                f"task {self.task.name!r} has several problems with the id {problem.id!r}; give "
                "each its own"
            )
        self.history.num_taken += 1
        self._indices[problem.id] = index
        return problem

    def index_of(self, problem: Problem) -> int:
        """The place in the task of a problem that was handed out and not recorded yet."""
        return self._indices[problem.id]

    def record(self, graded: Sequence[Graded]) -> None:
        """Remember how problems of this stream were answered."""
        for group in graded:
            self.history.record(self._indices.pop(group.rollout.problem.id), group)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"position": self.position, "history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stopped; old ones hold accuracies at most."""
        earlier = {"num_taken": state["position"], "accuracies": state.get("accuracies", {})}
        self.history.load_state_dict(state.get("history", earlier))
