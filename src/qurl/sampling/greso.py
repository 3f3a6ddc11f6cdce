"""GRESO: problems that were all right or all wrong before are mostly skipped.

    z        groups of a problem in a row, up to the last, that were all right (or all wrong)
    P(skip)  1 - max(p^z, explore), with p of easy and of hard problems apart

After each step p moves by `step`, so that the shares of such groups among the sampled ones approach
their targets; not in the first epoch, in which nothing can be skipped. With dynamic sampling, a
round asks for as many problems as will probably be needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any

import torch

from qurl.config.systems import GresoConfig
from qurl.sampling.history import History
from qurl.sampling.parts import Setup
from qurl.sampling.sampler import has_signal
from qurl.sampling.stream import shuffle
from qurl.seeds import generator
from qurl.types import Graded, Trained

P_RANGE = (0.05, 0.95)
FIRST_ROUND = 1.5
"""Problems of the first round, as a multiple of the groups that are needed."""
SMALLEST_ROUND = 0.25
RESERVE = 1.25
"""Rounds ask for a quarter more than the last step's share of mixed groups says."""
LARGEST_RATE = 0.9
"""Share of groups without signal that a round allows for, at most."""


class Greso:
    """A selector. Its state: how far it is in the random order, and p."""

    reads_batch = False

    def __init__(self, setup: Setup) -> None:
        self.config: GresoConfig = setup.config.systems.greso
        self._num_problems = len(setup.task)
        self.cursor = 0
        """Problems of the random order that were asked or skipped so far."""
        self.p = {"easy": self.config.p, "hard": self.config.p}
        self.flat_rate: float | None = None
        """Share of the last step's groups without signal."""
        self._num_skipped = self._num_asked = 0
        self._skipped_frac = 0.0

    def __call__(
        self, count: int, num_problems: int, num_taken: int, history: History, seed: int
    ) -> list[int]:
        chosen: list[int] = []
        while (missing := count - len(chosen)) > 0:
            candidates = shuffle(missing, num_problems, self.cursor, history, seed)
            draws = torch.rand(missing, generator=generator(seed, "greso", self.cursor)).tolist()
            self.cursor += missing
            chosen += [
                index
                for index, draw in zip(candidates, draws, strict=True)
                if draw < self.chance(index, history)
            ]
            self._num_skipped += count - len(chosen)
        self._num_asked += count
        return chosen

    def chance(self, index: int, history: History) -> float:
        """1 - P(skip) of a problem."""
        kinds = [self.kind(o.accuracy, o.is_mixed) for o in reversed(history.outcomes(index))]
        if not kinds or kinds[0] == "neither":
            return 1.0
        z = sum(1 for _ in takewhile(lambda kind: kind == kinds[0], kinds))
        return max(self.p[kinds[0]] ** z, self.config.explore)

    def kind(self, accuracy: float, is_mixed: bool) -> str:
        """Whether a group with this mean accuracy is easy, hard or neither."""
        if is_mixed or self.config.hard_below < accuracy < self.config.easy_above:
            return "neither"
        return "easy" if accuracy >= self.config.easy_above else "hard"

    def round(self, num_groups: int, num_missing: int) -> int:
        """Problems that a round of dynamic sampling asks for."""
        if self.flat_rate is None:
            return math.ceil(FIRST_ROUND * num_groups)
        expected = num_missing / (1 - min(self.flat_rate, LARGEST_RATE))
        return max(math.ceil(RESERVE * expected), math.ceil(SMALLEST_ROUND * num_groups))

    def observe(self, step: int, graded: Sequence[Graded], metrics: Mapping[str, float]) -> None:
        """Move p towards the targets: too many such groups, and more are skipped."""
        kinds = [self.kind(fmean(group.accuracies), has_signal(group)) for group in graded]
        targets = {"easy": self.config.easy_target, "hard": self.config.hard_target}
        low, high = P_RANGE
        size = self.config.step if self.cursor > self._num_problems else 0.0
        for kind, target in targets.items():
            rate = kinds.count(kind) / len(kinds)
            change = size if rate < target else -size
            self.p[kind] = min(max(self.p[kind] + change, low), high)
        self.flat_rate = 1 - fmean(map(has_signal, graded))
        if self._num_asked:  # not in the last step of a run with rollout.ahead
            self._skipped_frac = self._num_skipped / (self._num_skipped + self._num_asked)
        self._num_skipped = self._num_asked = 0

    def metrics(self, trained: Trained) -> dict[str, float]:
        return {
            "sampling/skipped_frac": self._skipped_frac,
            "sampling/p_easy": self.p["easy"],
            "sampling/p_hard": self.p["hard"],
        }

    def state_dict(self) -> dict[str, Any]:
        state = {"cursor": self.cursor, "p": dict(self.p), "flat_rate": self.flat_rate}
        return {**state, "skipped_frac": self._skipped_frac}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor, self.flat_rate = state["cursor"], state["flat_rate"]
        self.p, self._skipped_frac = dict(state["p"]), state.get("skipped_frac", 0.0)
