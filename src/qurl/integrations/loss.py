"""What the losses for other frameworks share: their options, and statistics as plain numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qurl.correction import importance_weights, mismatch_metrics, weight_metrics
from qurl.errors import ConfigError
from qurl.losses import SURROGATES, Surrogate, facts_of, policy_loss
from qurl.plugins import is_users_own, load_plugin


def find_objective(name: str | Surrogate, key: str) -> Surrogate:
    """A built-in objective, your own as `module:function`, or the function; errors name `key`."""
    if not isinstance(name, str):
        return name
    if is_users_own(name):
        return load_plugin(name, key)
    if name not in SURROGATES:
        raise ConfigError(
            f"{key} = {name!r} is not one of {', '.join(SURROGATES)}, nor module:function"
        )
    return SURROGATES[name]


def check_options(
    section: str, *, objective: str, cap: float | None, acr_max_bound: float | None
) -> None:
    """Refuse options that `corrected_loss` could not use, before any training."""
    facts_of(find_objective(objective, f"{section}.objective"))
    if cap is not None and not cap >= 1:
        raise ConfigError(f"{section}.cap = {cap} must be at least 1, or null to truncate nothing")
    if acr_max_bound is not None and not acr_max_bound > 1:
        raise ConfigError(f"{section}.acr_max_bound = {acr_max_bound} must be above 1, or null")


def corrected_loss(
    logp: Tensor,
    logp_prox: Tensor,
    logp_behav: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    objective: str | Surrogate,
    cap: float | None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """`policy_loss`, and its statistics with those of the weights, as numbers.

    All tensors are [B, T]; `options` are other arguments of `policy_loss`.
    """
    surrogate = find_objective(objective, "objective")
    log_mismatch = (logp_prox.float() - logp_behav.float()).masked_fill(~mask.bool(), 0.0)
    weight, shrink = importance_weights(log_mismatch, facts_of(surrogate).cap(cap))
    inputs = (logp, logp_prox, logp_behav, advantages, mask)
    weights = {"weight": weight, "shrink": shrink}
    loss, stats = policy_loss(*inputs, objective=surrogate, cap=cap, **weights, **options)
    metrics = {name: float(value) for name, value in stats.items()}
    if not mask.any():
        weight = shrink = mask = torch.ones_like(weight)
    return loss, metrics | weight_metrics(weight, shrink, mask)


def mismatch_numbers(
    logp_prox: Tensor, logp_behav: Tensor, mask: Tensor, *, cap: float | None
) -> dict[str, float]:
    """`mismatch_metrics` under the same names for every micro-batch, as `corrected_loss` has them.

    Hosts reduce metrics over ranks name by name. A micro-batch without a trained token reports what
    one without any mismatch would.
    """
    if not mask.any():
        logp_behav, mask = logp_prox, torch.ones_like(logp_prox)
    return mismatch_metrics(logp_prox.detach(), logp_behav, mask, cap=cap)
