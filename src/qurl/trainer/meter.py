"""Statistics of the pieces of an update, gathered without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Number = Tensor | float


class Meter:
    """Statistics of many pieces as one: means weighted by tokens, and maxima of `max` names.

    The pieces of an update share one denominator: their `_sum` names add up to that update's value,
    and the mean over updates is reported without the suffix. Tensors are read in `summary` only.
    """

    def __init__(self) -> None:
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
        """Close the sums of an update and add what is known of it as a whole."""
        self.add({**self._sums, **stats})
        self._sums.clear()

    def summary(self) -> dict[str, float]:
        values = iter(_read([value for column in self._values.values() for value in column]))
        columns = {name: [next(values) for _ in column] for name, column in self._values.items()}
        return {
            name: max(column) if "max" in name else _mean(column, self._weights[name])
            for name, column in columns.items()
        }


def _read(values: Sequence[Number]) -> list[float]:
    """Numbers and tensors as numbers; the device is asked once."""
    tensors = [value.double() for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(read) if isinstance(value, Tensor) else value for value in values]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(x * w for x, w in zip(values, weights, strict=True)) / sum(weights)
