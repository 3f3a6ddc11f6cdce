"""E3: more completions for hard problems, and a temperature that keeps the policy's entropy.

k_i   rank of a problem by its mean accuracy over the run: 0 the easiest, towards 1 the hardest
c_i = floor(Gmin + (total - Gmin m) k_i / sum(k)), and what is left goes to the hardest
tau' = tau (1 + tau ln(H_target / H) / (ln V + ln ln V))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from qurl.sampling.history import History
from qurl.sampling.parts import Setup
from qurl.types import Graded, Trained

SMALLEST_ENTROPY = 1e-4


def divide_budget(
    ranks: Sequence[float], total: int, low: int, high: int, *, official: bool = False
) -> list[int]:
    """`total` completions over problems of these ranks, between `low` and `high` each.

    The released code (`official`) lets a share exceed `high`, and may hand out less than `total`.
    """
    if not sum(ranks):
        return [total // len(ranks)] * len(ranks)
    spare = total - low * len(ranks)
    sizes = [math.floor(low + spare * rank / sum(ranks)) for rank in ranks]
    if not official:
        sizes = [min(size, high) for size in sizes]
    left = total - sum(sizes)
    for i in sorted(range(len(ranks)), key=lambda i: -ranks[i]):
        given = max(0, min(left, high - sizes[i]))
        sizes[i] += given
        left -= given
    return sizes


class E3Budget:
    """A budget by difficulty. Ranks are taken at the end of each epoch; before, all are equal."""

    reads_batch = False

    def __init__(self, setup: Setup) -> None:
        self.config = setup.config.systems.e3
        self.epoch = 0
        self.ranks: dict[int, float] = {}
        self._sizes: list[int] = []

    def __call__(self, indices: Sequence[int], history: History, group_size: int) -> list[int]:
        # These problems are handed out already.
        epoch = (history.num_taken - len(indices)) // history.num_problems
        if epoch > self.epoch:
            self.epoch, self.ranks = epoch, rank(history)
        spread = min(self.config.spread, self.config.spread_step * self.epoch)
        low, high = round(group_size * (1 - spread)), round(group_size * (1 + spread))
        ranks = [self.ranks.get(index, 0.0) for index in indices]
        total, official = group_size * len(indices), self.config.official
        self._sizes = divide_budget(ranks, total, max(low, 1), high, official=official)
        return self._sizes

    def shape(self, indices: Sequence[int], graded: Sequence[Graded]) -> list[Graded]:
        """Easy problems: a right answer of l tokens earns mu l / (1 + mu l) less."""
        config = self.config
        if not config.length_coef:
            return list(graded)
        return [
            _shorten(group, config.length_coef)
            if self.ranks.get(index, 1.0) <= config.easy_below
            else group
            for index, group in zip(indices, graded, strict=True)
        ]

    def metrics(self, trained: Trained) -> dict[str, float]:
        return {
            "sampling/group_size_min": float(min(self._sizes)),
            "sampling/group_size_max": float(max(self._sizes)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "ranks": self.ranks, "sizes": self._sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.ranks = state["epoch"], state["ranks"]
        self._sizes = state.get("sizes", [])


def rank(history: History) -> dict[int, float]:
    """{index: k} of all problems that were asked; equal means keep the order of their indices."""
    order = sorted(history, key=lambda index: (-history.total(index).mean, index))
    return {index: place / len(order) for place, index in enumerate(order)}


def _shorten(group: Graded, coef: float) -> Graded:
    lengths = [len(c.token_ids) for c in group.rollout.completions]
    rewards = [
        reward - coef * length / (1 + coef * length) if accuracy > 0 else reward
        for reward, accuracy, length in zip(group.rewards, group.accuracies, lengths, strict=True)
    ]
    return dataclasses.replace(group, rewards=rewards)


def next_temperature(tau: float, target: float, entropy: float, vocabulary: int) -> float:
    """tau' of the module's formula: warmer if the entropy is below its target."""
    scale = math.log(vocabulary) + math.log(math.log(vocabulary))
    return tau * (1 + tau * math.log(target / max(entropy, SMALLEST_ENTROPY)) / scale)


def anneal_factor(step: int, total: int, share: float, end: float) -> float:
    """1, then a half cosine down to `end` over the last `share` of `total` steps."""
    start = total - int(share * total)
    if step <= start:
        return 1.0
    progress = min(1.0, (step - start) / (total - start))
    return (1 - end) * 0.5 * (1 + math.cos(math.pi * progress)) + end


class E3Thermostat:
    """Keeps the entropy near that of the first steps, by the temperature of the next ones."""

    reads_batch = False

    def __init__(self, setup: Setup) -> None:
        self.config, self.num_steps = setup.config.systems.e3, setup.config.steps
        self.vocabulary = setup.vocabulary
        self.temperature: float | None = None
        """The temperature of the next step; None: as the recipe says."""
        self.first: list[float] = []
        """Entropies of the first steps; their mean is the target."""
        self._recipe = setup.config.sampling.temperature

    def __call__(self, step: int, temperature: float) -> float:
        return temperature if self.temperature is None else self.temperature

    def target(self, step: int) -> float:
        """Entropy that is wanted after so many steps."""
        mean, config = sum(self.first) / len(self.first), self.config
        factor = anneal_factor(step, self.num_steps, config.anneal, config.anneal_to)
        return max(mean * factor, SMALLEST_ENTROPY)

    def observe(self, step: int, graded: Sequence[Graded], metrics: Mapping[str, float]) -> None:
        if (entropy := metrics.get("actor/entropy")) is None:  # no row had a forward
            return
        if len(self.first) < self.config.init_steps:
            self.first.append(entropy)
            return
        tau = self._recipe if self.temperature is None else self.temperature
        tau = next_temperature(tau, self.target(step + 1), entropy, self.vocabulary)
        self.temperature = min(max(tau, self.config.lowest), self.config.highest)

    def metrics(self, trained: Trained) -> dict[str, float]:
        return {"sampling/entropy_target": self.target(0)} if self.first else {}

    def state_dict(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "first": list(self.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.temperature, self.first = state["temperature"], list(state["first"])
