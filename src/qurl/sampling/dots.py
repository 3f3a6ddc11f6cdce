"""DOTS: asks the problems whose predicted accuracy is nearest to a target.

Every few steps some reference problems are answered. Their accuracies predict those of all others
(`qurl.sampling.predictor`), and problems are drawn without repetition until the next prediction:

    P_i ~ exp(-|p_i - target| / sharpness)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from qurl.sampling.history import History
from qurl.sampling.parts import Setup
from qurl.sampling.predictor import Predictor, attend, embed, fit_line, fit_scale, load_predictor
from qurl.seeds import generator
from qurl.types import Graded, Trained

UNKNOWN = 0.5
"""Accuracy of a problem about which nothing is known."""


def selection_logits(predicted: Tensor, target: float, sharpness: float) -> Tensor:
    """log P_i, up to a constant: softmax of these is P."""
    return -(predicted - target).abs() / sharpness


class Dots:
    """A selector. Its state: the order that the last prediction gave, and how far it is in it."""

    reads_batch = False

    def __init__(self, setup: Setup) -> None:
        self.config, self.task = setup.config.systems.dots, setup.task
        self._steps_per_epoch = len(setup.task) / setup.config.batch.problems
        self._step, self._cursor, self._is_due = 0, 0, True
        self._references: list[int] = []
        self._predicted = torch.zeros(0)  # [N]
        self._order = torch.zeros(0, dtype=torch.int64)  # [N], as drawn
        self._expected: list[float] = []
        """Predictions for the problems that were asked and not observed yet."""
        self._metrics: dict[str, float] = {}

    def probe(self, step: int, history: History, seed: int) -> list[int]:
        """Problems that are to be answered before the next prediction."""
        self._step = step
        if step % self.config.every and len(self._order):
            return []
        draw = generator(seed, "references", step)
        order = torch.randperm(history.num_problems, generator=draw)
        self._references = order[: self.config.references].tolist()
        self._is_due = True
        return self._references

    def __call__(
        self, count: int, num_problems: int, num_taken: int, history: History, seed: int
    ) -> list[int]:
        if self._is_due:
            self._predicted = self.predict(history)
            logits = selection_logits(self._predicted, self.config.target, self.config.sharpness)
            uniform = torch.rand(num_problems, generator=generator(seed, "dots", self._step))
            # The order of logits + Gumbel noise is that of drawing without replacement.
            noise = -(-uniform.clamp(1e-12).log()).clamp(1e-12).log()
            self._order = (logits + noise).argsort(descending=True)
            self._cursor, self._is_due = 0, False
        places = (torch.arange(count) + self._cursor) % num_problems
        self._cursor += count
        chosen = self._order[places].tolist()
        self._expected += self._predicted[chosen].tolist()
        return chosen

    def predict(self, history: History) -> Tensor:
        """The accuracy [N] of every problem under the present policy, as far as is known."""
        recent = {i: found for i in history if (found := self._own_rate(i, history)) is not None}
        known = self._references or sorted(recent)
        predicted = torch.full((history.num_problems,), UNKNOWN)
        if known:
            values = torch.tensor([history[index][-1] for index in known])
            predicted = self._from_references(torch.tensor(known), values)
        for index, rate in recent.items():
            predicted[index] = rate
        return predicted

    def _own_rate(self, index: int, history: History) -> float | None:
        """Mean of a problem's own recent answers under a Beta(1, 1) prior; None without any."""
        oldest = self._step - self.config.recent_epochs * self._steps_per_epoch
        if not self.config.recent_epochs:
            return None
        kept = [o for o in history.outcomes(index) if o.version >= oldest]
        num_right, count = sum(o.accuracy * o.count for o in kept), sum(o.count for o in kept)
        return (1 + num_right) / (2 + count) if kept else None

    @torch.no_grad()
    def _from_references(self, known: Tensor, values: Tensor) -> Tensor:
        embeddings = self._embeddings
        references, own = embeddings[known], torch.full((len(embeddings),), -1)
        own[known] = torch.arange(len(known))
        if len(known) == 1:  # nothing is left to attend to once it is masked
            return values.expand(len(embeddings)).clone()
        if self.config.predictor:
            predicted = self._predictor(embeddings, references, values, own)
        else:
            scale = fit_scale(references, values)
            predicted = attend(embeddings, references, values, scale, own)
        if self.config.calibrate:
            slope, intercept = fit_line(predicted[known], values)
            # Without itself, an easy reference is predicted a little harder than the others. If
            # that is all that the predictions say, the line falls, and the mean is the best guess.
            is_useful = slope > 0
            predicted = slope * predicted + intercept if is_useful else values.mean().expand_as(own)
        return predicted.clamp(0, 1)

    @cached_property
    def _embeddings(self) -> Tensor:
        problems = [self.task[index] for index in range(len(self.task))]
        return embed(problems, self.config.encoder)

    @cached_property
    def _predictor(self) -> Predictor:
        return load_predictor(self.config.predictor, self._embeddings.shape[1])

    def observe(self, step: int, graded: Sequence[Graded], metrics: Mapping[str, float]) -> None:
        """Compare what was predicted with what came."""
        count = len(graded)  # with rollout.ahead, the next step's problems were asked already
        predicted, self._expected = torch.tensor(self._expected[:count]), self._expected[count:]
        found = torch.tensor([fmean(group.accuracies) for group in graded])
        self._metrics = {
            "sampling/predicted_accuracy": float(predicted.mean()),
            "sampling/prediction_error": float((predicted - found).abs().mean()),
        }

    def metrics(self, trained: Trained) -> dict[str, float]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        tensors = {"order": self._order, "predicted": self._predicted}
        asked = {"references": self._references, "expected": list(self._expected)}
        return {**tensors, "cursor": self._cursor, **asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order, self._predicted = state["order"], state["predicted"]
        self._cursor, self._references = state["cursor"], state["references"]
        self._expected = list(state.get("expected", []))
        self._is_due = not len(self._order)
