"""Trains on some of a step's completions: the rows that a sub-selection keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qurl.advantages import Estimator, known_advantages, sequence_advantages
from qurl.errors import ConfigError
from qurl.plugins import kind_of, naming_failures
from qurl.sampling.parts import SubSelect
from qurl.trainer.batches import pad
from qurl.types import Graded


class Narrowed(NamedTuple):
    """What is left of a step's completions."""

    rows: Tensor  # [b] of all completions; they may repeat
    bundle: int
    """So many rows that follow each other stay in one mini-batch."""
    advantage: Estimator
    """For the rows that are left."""


def narrow(
    graded: Sequence[Graded], subselect: SubSelect | None, advantage: Estimator, seed: int
) -> Narrowed:
    """The rows that `subselect` keeps, before any forward of the trainer is made for the others.

    Advantages within the whole groups need rewards only, so they are known here.
    """
    if subselect is None:
        num_rows = sum(len(group.rewards) for group in graded)
        return Narrowed(torch.arange(num_rows), 1, advantage)
    batch = pad(graded)
    whole = sequence_advantages(batch, advantage)
    with naming_failures("batch.subselect"):
        found = subselect(batch, whole, seed)
    rows, kept = found if isinstance(found, tuple) else (found, None)
    _check(rows, len(batch))
    bundle = rows.shape[1] if rows.dim() == 2 else 1
    if kept is not None:
        _check_advantages(kept, rows)
        advantage = known_advantages(kept.flatten().cpu())
    return Narrowed(rows.flatten().cpu(), bundle, advantage)


def _check(rows: Tensor, num_rows: int) -> None:
    is_index = isinstance(rows, Tensor) and rows.dtype == torch.int64 and rows.dim() in (1, 2)
    if not is_index or not rows.numel() or not (0 <= int(rows.min()) <= int(rows.max()) < num_rows):
        raise ConfigError(
            f"batch.subselect returned {_describe(rows)}; it must return an int64 tensor of one or "
            f"more rows from 0 to {num_rows - 1}, [n] or [n, k]"
        )


def _describe(rows: Any) -> str:
    if not isinstance(rows, Tensor) or not rows.numel():
        return kind_of(rows)
    return f"{kind_of(rows)} from {rows.min()} to {rows.max()}"


def _check_advantages(kept: Tensor, rows: Tensor) -> None:
    if not isinstance(kept, Tensor) or kept.shape != rows.shape:
        shape = tuple(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
        raise ConfigError(
            f"batch.subselect returned advantages {shape} for rows {tuple(rows.shape)}; it must "
            "return one for each row, such as advantages[rows]"
        )
    if not kept.isfinite().all():
        raise ConfigError("batch.subselect returned advantages with NaN or infinity")
