"""The processes that train one model together, and what they have to agree on.

    counts    the most pieces that any rank has: all ranks run as many forwards
    sums      denominators, decisions and metrics of all rows, from what each rank has of its own
    errors    raised by all ranks or by none, or the others would wait for ever

A run on one device is a group of one, which exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from qurl.errors import MissingExtra, QurlError, TrainingError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes that call the same methods in the same order."""

    rank: int = 0
    size: int = 1
    control: Any = None
    """Process group of numbers and objects in main memory; tensors take the default group."""

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        return self._reduce(count, dist.ReduceOp.MAX)

    def total(self, count: int) -> int:
        """The counts of all ranks together."""
        return self._reduce(count, dist.ReduceOp.SUM)

    def pool(self, item: Item) -> list[Item]:
        """The items of all ranks, in their order."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.control)
        return items

    @contextmanager
    def agreeing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Raise on all ranks what any rank raises inside.

        Inside, no rank may wait for one that has failed.
        """
        if self.size == 1:
            yield
            return
        error = None
        try:
            yield
        except kinds as found:
            error = found
        if not self.most(int(error is not None)):
            return
        found = self.pool(None if error is None else _describe(error))
        rank, (kind, message) = next((r, x) for r, x in enumerate(found) if x is not None)
        agreed = kind(f"trainer rank {rank}: {message}")
        agreed.is_agreed = True
        raise agreed from error

    def _reduce(self, count: int, operation: Any) -> int:
        if self.size == 1:
            return count
        number = torch.tensor(count)
        dist.all_reduce(number, operation, group=self.control)
        return int(number)


ALONE = Ranks()


def _describe(error: Exception) -> tuple[type[QurlError], str]:
    """An error as it can be sent: those of other libraries may not survive pickling."""
    if isinstance(error, QurlError) and not isinstance(error, MissingExtra):
        return type(error), str(error)
    return TrainingError, str(error)
