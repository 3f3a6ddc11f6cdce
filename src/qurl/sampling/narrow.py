"""Trains on some of a step's completions: the rows that a sub-selection keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qurl.advantages import Estimator
from qurl.errors import ConfigError
from qurl.plugins import naming_failures
from qurl.sampling.parts import SubSelect
from qurl.types import Batch, Corrected


class Narrowed(NamedTuple):
    """What is left of a batch."""

    batch: Batch
    rows: Tensor  # [b] of the whole batch; they may repeat
    advantage: Estimator
    """For the batch that is left."""


def narrow(batch: Batch, subselect: SubSelect | None, advantage: Estimator, seed: int) -> Narrowed:
    """The rows that `subselect` keeps, before any forward of the trainer is made for the others.

    Advantages within the whole groups need rewards only, so they are known here.
    """
    if subselect is None:
        return Narrowed(batch, torch.arange(len(batch), device=batch.mask.device), advantage)
    whole = _sequence_advantages(batch, advantage)
    with naming_failures("batch.subselect"):
        found = subselect(batch, whole, seed)
    rows, kept = found if isinstance(found, tuple) else (found, None)
    _check(rows, len(batch))
    rows, bundle = rows.to(batch.mask.device), rows.shape[1] if rows.dim() == 2 else 1
    if kept is not None:
        kept = kept.flatten().to(batch.mask.device)
        advantage = _given(kept)
    rows = rows.flatten()
    return Narrowed(batch.select(rows).replace(bundle=bundle), rows, advantage)


def _sequence_advantages(batch: Batch, advantage: Estimator) -> Tensor:
    """[B]: an advantage that reads no forward, as a mean over the trained tokens of each row."""
    zeros, ones = torch.zeros_like(batch.mask), torch.ones_like(batch.mask)
    prox = {"logp_prox": batch.logp_behav, "logp_ref": batch.logp_behav}
    none = {"values": zeros, "entropy": zeros, "has_prox": torch.zeros_like(batch.lengths).bool()}
    found = advantage(batch.into(Corrected, **prox, **none, weight=ones, shrink=ones))
    per_token = found[0] if isinstance(found, tuple) else found
    return (per_token * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)


def _given(advantages: Tensor) -> Estimator:
    def estimate(batch: Corrected) -> Tensor:
        return advantages[:, None] * batch.mask

    return estimate


def _check(rows: Tensor, num_rows: int) -> None:
    is_index = isinstance(rows, Tensor) and rows.dtype == torch.int64 and rows.dim() in (1, 2)
    if not is_index or not rows.numel() or not (0 <= int(rows.min()) <= int(rows.max()) < num_rows):
        raise ConfigError(
            f"batch.subselect returned {rows}; it must return an int64 tensor of one or more rows "
            f"from 0 to {num_rows - 1}, [n] or [n, k]"
        )
