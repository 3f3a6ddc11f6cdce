"""What one step off costs: how far rollouts are from the weights that are about to be trained.

With `rollout.ahead = 1` the mismatch rho = pi_prox / pi_behav holds quantization and age. The
engine, which has the newest weights by now, scores some rows again and so tells them apart:

    log rho = (log pi_actor - log pi_behav) + (log pi_prox - log pi_actor)
                        age                          quantization

Shapes: n rows of a batch that are scored, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from qurl.losses import kl_penalty
from qurl.rollout import Engine
from qurl.types import Batch, Graded, Trained

NUM_ROWS = 8
"""Rows that are scored; each takes a prefill."""


class Rescored(NamedTuple):
    """Some rows of a batch under the engine's newest weights."""

    logp_actor: Tensor  # [n, T]
    mask: Tensor  # [n, T], trained tokens that were scored


def rescore(engine: Engine, batch: Batch, longest: int) -> Rescored | None:
    """The first `longest` tokens of these rows; None at temperatures other than 1.

    Engines score at temperature 1, and hold the logits of all tokens of a row at once.
    """
    if batch.temperature != 1:
        return None
    logp, mask = torch.zeros_like(batch.mask), batch.mask.clone()
    mask[:, longest:] = 0
    for row, length in enumerate(batch.lengths.tolist()):
        token_ids = batch.token_ids[row, : min(length, longest)].tolist()
        logp[row, 1 : len(token_ids)] = engine.score(token_ids).to(logp)
    return Rescored(logp, mask)


def age_metrics(
    graded: Sequence[Graded], step: int, rescored: Rescored | None, trained: Trained
) -> dict[str, float]:
    """Age in versions of the weights, and the two parts of the mismatch on rows with a prox.

    `trained` has the rows that were scored again.
    """
    metrics = {"rollout_corr/age": fmean(step - group.rollout.version for group in graded)}
    if rescored is None:
        return metrics
    actor, mask = rescored
    known = (mask * trained.has_prox[:, None]).bool()
    if not known.any():
        return metrics
    behav, actor, prox = (x[known].double() for x in (trained.logp_behav, actor, trained.logp_prox))
    return metrics | {
        "rollout_corr/kl_age": float((behav - actor).mean()),
        "rollout_corr/kl_quant": float((actor - prox).mean()),
        "rollout_corr/k3_kl_age": float(kl_penalty(behav, actor, "k3").mean()),
        "rollout_corr/k3_kl_quant": float(kl_penalty(actor, prox, "k3").mean()),
    }
