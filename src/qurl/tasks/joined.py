"""Several tasks as one: files of training problems with shares, or named held-out sets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from qurl.tasks.task import Task
from qurl.types import Problem


@dataclass(frozen=True)
class JoinedTask:
    """The problems of all parts in a row; a problem's `extra["qurl_set"]` names its part."""

    parts: Mapping[str, Task]
    shares: Sequence[float]
    """How often a problem of each part is asked (`qurl.sampling.mix`)."""

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(task.name for task in self.parts.values()))

    @property
    def reward(self) -> str:
        return next(iter(self.parts.values())).reward

    @property
    def rewards(self) -> frozenset[str]:
        return frozenset().union(*(rewards_of(task) for task in self.parts.values()))

    @property
    def notes(self) -> list[str]:
        return [note for task in self.parts.values() for note in task.notes]

    @property
    def fingerprint(self) -> str:
        """Changes with the contents of any part."""
        return "+".join(getattr(task, "fingerprint", "") for task in self.parts.values())

    @property
    def questions(self) -> set[str]:
        """What is asked."""
        sets = (getattr(task, "questions", set()) for task in self.parts.values())
        return set().union(*sets)

    @property
    def sizes(self) -> list[int]:
        return [len(task) for task in self.parts.values()]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> Problem:
        index, starts = range(len(self))[index], list(accumulate(self.sizes, initial=0))
        part = bisect_right(starts, index) - 1
        name, task = list(self.parts.items())[part]
        problem = task[index - starts[part]]
        # Files may number their problems alike.
        id, extra = f"{name}/{problem.id}", {**problem.extra, "qurl_set": name}
        return replace(problem, id=id, extra=extra)


def rewards_of(task: Task) -> frozenset[str]:
    """All rewards that a task's problems name."""
    return getattr(task, "rewards", frozenset({task.reward}))
