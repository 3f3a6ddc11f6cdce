"""Statistics of the pieces and updates of a step, on all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from qurl.ops.pooling import statistic_of
from qurl.trainer.ranks import ALONE, Ranks

Number = Tensor | float


class Meter:
    """Statistics of many pieces as one: means weighted by tokens, `max` and `min` names by theirs.

    `_sum` names add up over the pieces of an update; their mean over updates loses the suffix. The
    device is read in `summary` only. Ranks add the same names in the same order.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._values: dict[str, list[Number]] = defaultdict(list)
        self._weights: dict[str, list[float]] = defaultdict(list)
        self._sums: dict[str, Number] = {}

    def add(self, stats: Mapping[str, Number], weight: float = 1.0) -> None:
        for name, value in stats.items():
            if name.endswith("_sum"):
                name = name.removesuffix("_sum")
                value = value.double() if isinstance(value, Tensor) else value
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._values[name].append(value)
                self._weights[name].append(weight)

    def finish_update(self, stats: Mapping[str, Number]) -> None:
        size = self._ranks.size
        parts = {name: size * part for name, part in self._sums.items()}
        self.add(parts, weight=1 / size)  # the mean over ranks of `size` parts is their sum
        self.add(stats)
        self._sums.clear()

    def summary(self) -> dict[str, float]:
        numbers = (value for column in self._values.values() for value in column)
        tensors = [value.double().view(()) for value in numbers if isinstance(value, Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else [])  # the device is asked once
        totals: dict[str, tuple[float, float, float, float]] = {}
        for name, weights in self._weights.items():
            column = [next(read) if isinstance(x, Tensor) else x for x in self._values[name]]
            pairs = list(zip(column, weights, strict=True))
            counted = [x for x, w in pairs if w]
            ends = min(counted, default=math.inf), max(counted, default=-math.inf)
            totals[name] = sum(x * w for x, w in pairs), sum(weights), *ends
        of_ranks = self._ranks.pool(totals)
        summary = {}
        for name in totals:
            sums, weights, lowest, largest = zip(*(part[name] for part in of_ranks), strict=True)
            extremes = {"max": max(largest), "min": min(lowest)}
            summary[name] = extremes.get(statistic_of(name), sum(sums) / sum(weights))
        return summary
