"""Numbers of all tokens, where each trainer rank has some of them.

A `Pool` gives all ranks what each of them has, in the order of the ranks. On one device, `alone`
does nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Pool = Callable[[Any], list[Any]]
"""`pool(item)`: the items of all ranks."""


def alone(item: Any) -> list[Any]:
    """The pool of one device."""
    return [item]


def total(part: Tensor, pool: Pool) -> float:
    """The sum of a number over the ranks."""
    return math.fsum(pool(float(part)))


class Spread(NamedTuple):
    """How some numbers are spread; for 1, 2 and 6 it is Spread(3, 3.0, 14.0, 1.0, 6.0)."""

    count: int
    mean: float
    deviations: float
    """Sum of (x - mean)^2."""
    low: float
    high: float

    def join(self, other: Spread) -> Spread:
        """The spread of both, without looking at the numbers again (Chan et al.)."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        distance = other.mean - self.mean
        mean = self.mean + distance * other.count / count
        between = distance**2 * self.count * other.count / count
        deviations = self.deviations + other.deviations + between
        ends = np.minimum(self.low, other.low), np.maximum(self.high, other.high)  # NaN stays
        return Spread(count, mean, deviations, *map(float, ends))


def spreads(columns: Mapping[str, Tensor], pool: Pool = alone) -> dict[str, Spread]:
    """The spread of each column over all ranks, which have columns of the same names."""
    sizes = [column.numel() for column in columns.values()]
    numbers = torch.stack([_measure(x.double()) for x in columns.values()]).tolist()
    own = [Spread(size, *row) for size, row in zip(sizes, numbers, strict=True)]
    first, *others = pool(own)
    for other in others:
        first = [spread.join(more) for spread, more in zip(first, other, strict=True)]
    return dict(zip(columns, first, strict=True))


def _measure(values: Tensor) -> Tensor:
    """Mean, deviations and ends, where the numbers are: reading them stops a GPU."""
    if not values.numel():
        return values.new_tensor([0.0, 0.0, math.inf, -math.inf])
    mean = values.mean()
    return torch.stack([mean, (values - mean).square().sum(), *values.aminmax()])


def summarize(columns: Mapping[str, Tensor], pool: Pool = alone) -> dict[str, float]:
    """A number for each column: largest, smallest or standard deviation if its name has the word
    max, min or std, else the mean. Columns without a number, on any rank, are left out."""
    return {name: _pick(name, s) for name, s in spreads(columns, pool).items() if s.count}


def _pick(name: str, spread: Spread) -> float:
    statistic = statistic_of(name)
    if statistic == "std":
        return math.sqrt(spread.deviations / spread.count)
    return {"max": spread.high, "min": spread.low}.get(statistic, spread.mean)


def statistic_of(name: str) -> str:
    """The first of max, min and std that is a word of a metric's name, else mean."""
    words = re.split("[/_]", name)
    return next((kind for kind in ("max", "min", "std") if kind in words), "mean")
