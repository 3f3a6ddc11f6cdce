"""What a run knows about its problems: how each was answered, how often and how long ago."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qurl.types import Graded

REMEMBERED = 8
"""Groups per problem that are kept one by one; totals cover the whole run."""


class Outcome(NamedTuple):
    """One graded group of a problem. A group of 8 with 6 right answers of about 40 tokens, sampled
    by the weights of step 12, is
    `Outcome(version=12, count=8, accuracy=0.75, length=40.0, is_mixed=True)`."""

    version: int
    """The weights that sampled it; -1 if a checkpoint of an earlier QuRL does not say."""
    count: int
    accuracy: float
    """Mean over the group."""
    length: float
    """Mean number of tokens."""
    is_mixed: bool = False
    """Do accuracies differ within the group? False if an old checkpoint does not say."""


class Running(NamedTuple):
    """Mean of numbers that arrive in pieces."""

    count: int = 0
    mean: float = 0.0

    def add(self, values: Sequence[float]) -> Running:
        """With so many numbers more. Adding pieces in any split gives the same up to rounding."""
        if not values:
            return self
        count = self.count + len(values)
        distance = fmean(values) - self.mean
        return Running(count, self.mean + distance * len(values) / count)


class History(Mapping[int, Sequence[float]]):
    """Outcomes by the index of the problem in its task.

    As a mapping it holds the mean accuracies of a problem's last groups, oldest first:

        history[7]           [0.5, 0.75]
        history.outcomes(7)  the last groups, with lengths and versions
        history.total(7)     count and mean of all accuracies of the run
    """

    def __init__(self, num_problems: int, *, keeps_responses: bool = False) -> None:
        self.num_problems = num_problems
        self.num_taken = 0
        """Problems handed out so far, repetitions included."""
        self.keeps_responses = keeps_responses
        # Plain tuples, so that checkpoints can hold them as they are.
        self._outcomes: dict[int, tuple[tuple, ...]] = {}
        self._totals: dict[int, tuple] = {}
        self._responses: dict[int, tuple[Tensor, ...]] = {}

    def __getitem__(self, index: int) -> list[float]:
        return [Outcome(*kept).accuracy for kept in self._outcomes[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)

    def outcomes(self, index: int) -> list[Outcome]:
        """The last groups of a problem, oldest first."""
        return [Outcome(*kept) for kept in self._outcomes.get(index, ())]

    def total(self, index: int) -> Running:
        """Accuracies of all completions of this run."""
        return Running(*self._totals.get(index, ()))

    def responses(self, index: int) -> Sequence[Tensor]:
        """Token ids of the problem's last group; empty unless `sampling.keep_responses` is set."""
        return self._responses.get(index, ())

    def record(self, index: int, group: Graded) -> None:
        """Add a group of this problem."""
        accuracies, completions = group.accuracies, group.rollout.completions
        outcome = Outcome(
            version=group.rollout.version,
            count=len(accuracies),
            accuracy=fmean(accuracies),
            length=fmean(len(c.token_ids) for c in completions),
            is_mixed=len(set(accuracies)) > 1,
        )
        kept = (*self._outcomes.get(index, ()), tuple(outcome))
        self._outcomes[index] = kept[-REMEMBERED:]
        self._totals[index] = tuple(self.total(index).add(accuracies))
        if self.keeps_responses:
            self._responses[index] = tuple(
                torch.tensor(c.token_ids, dtype=torch.int32) for c in completions
            )

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints. Its values are never changed, only replaced."""
        return {
            "num_taken": self.num_taken,
            "outcomes": dict(self._outcomes),
            "totals": dict(self._totals),
            "responses": dict(self._responses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stopped; old ones hold accuracies at most, or more numbers."""
        self.num_taken = state["num_taken"]
        earlier = state.get("accuracies", {})
        guessed = {i: [(-1, 1, accuracy, 0.0) for accuracy in seen] for i, seen in earlier.items()}
        means = {i: Running().add(seen) for i, seen in earlier.items()}
        outcomes, totals = state.get("outcomes", guessed), state.get("totals", means)
        self._outcomes = {i: tuple(map(tuple, seen)) for i, seen in outcomes.items()}
        self._totals = {i: tuple(kept[:2]) for i, kept in totals.items()}
        self._responses = dict(state.get("responses", {}))
