"""Tasks whose problems are drawn from a seed: no file, no end, and a known answer.

A problem depends on (seed, index) alone. The hash of its content decides whether it belongs to the
training or the evaluation split, so that the two are disjoint whatever the seeds are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from qurl.errors import DataError
from qurl.tasks.task import Prompts
from qurl.types import Problem

SIZES: Mapping[str, int] = {"train": 10_000, "eval": 500}  # problems per split

_EVAL_ONE_IN = 8
_MAX_ATTEMPTS = 500


@dataclass(frozen=True)
class Draft:
    """A problem before it is tokenised."""

    question: str
    answer: str
    key: str = ""
    """Equal for drafts that ask the same, such as a sum with swapped terms; else the question."""
    extra: Mapping[str, Any] = field(default_factory=dict)


Draw = Callable[[Random, int], Draft]
"""`draw(rng, difficulty)` makes one problem, as the tasks in this folder do."""


@dataclass(frozen=True)
class GeneratedTask:
    """The drafts of one split, tokenised."""

    name: str
    reward: str
    draw: Callable[[int, int], Draft]
    """The draft of (index, attempt); attempts go on until one falls into the split."""
    split: str
    prompts: Prompts
    instruction: str  # used unless `prompts` has another one
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return SIZES[self.split]

    def __getitem__(self, index: int) -> Problem:
        index = range(len(self))[index]
        for attempt in range(_MAX_ATTEMPTS):
            draft = self.draw(index, attempt)
            if not isinstance(draft, Draft):
                raise DataError(f"task {self.name} drew {draft!r}, not a qurl.tasks.Draft")
            if not isinstance(draft.question, str) or not isinstance(draft.answer, str):
                raise DataError(
                    f"task {self.name} drew {draft!r}; its question and answer must be text"
                )
            if split_of(draft.key or draft.question) != self.split:
                continue
            messages = [{"role": "user", "content": draft.question}]
            text, ids = self.prompts.encode(messages, self.instruction)
            id = f"{self.name}-{self.split}-{index}"
            if self.prompts.admit(ids, f"problem {id}"):
                return Problem(id, ids, draft.answer, {**draft.extra, "prompt": text})
        raise DataError(
            f"task {self.name} gave no fitting {self.split} problem in {_MAX_ATTEMPTS} attempts: "
            f"it has too few different problems, or prompts longer than {self.prompts.limit}"
        )

    def worked_answer(self, problem: Problem) -> str:
        """The text that a warm start teaches; the trainer appends the end-of-sequence token."""
        return problem.answer


def split_of(key: str) -> str:
    """ "eval" for one key in eight, "train" for the others."""
    digest = hashlib.sha256(key.encode()).digest()
    return "eval" if int.from_bytes(digest[:8]) % _EVAL_ONE_IN == 0 else "train"
