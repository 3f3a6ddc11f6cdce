"""The objectives of the paper as losses, their aggregation, and the terms beside them.

Per token, with A the advantage and everything but `logp` detached:

    R     = pi / pi_prox          ratio
    R_hat = pi / pi_behav         ratio against the sampler
    rho   = pi_prox / pi_behav    mismatch
    w     = min(rho, C)           truncated importance weight
    r     = w / rho               what truncation took away

    ppo_prox   (1)        min(R A,     clip(R,     1 - el, 1 + eh) A)
    ppo_behav  (3)        min(R_hat A, clip(R_hat, 1 - el, 1 + eh) A)
    decoupled  (4)  rho * min(R A,     clip(R,     1 - el, 1 + eh) A)
    tis        (5)  w   * min(R A,     clip(R,     1 - el, 1 + eh) A)
    acr        (9)  w   * min(R A,     clip(R,     1 - el, (1 + eh) / r) A)

All are maximised; a loss is minus the objective. Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl.correction import LOG_CLAMP, importance_weights


@dataclass(frozen=True)
class ObjectiveSpec:
    """What tells one objective from another."""

    is_against_behav: bool = False
    """The ratio is taken against the sampler instead of the proximal policy."""
    is_weighted: bool = False
    """The surrogate is multiplied by the importance weight."""
    is_truncated: bool = False
    """That weight is capped at C."""
    is_widened: bool = False
    """The upper clip bound is divided by r where the weight was truncated."""


OBJECTIVES: Mapping[str, ObjectiveSpec] = {
    "ppo_prox": ObjectiveSpec(),
    "ppo_behav": ObjectiveSpec(is_against_behav=True),
    "decoupled": ObjectiveSpec(is_weighted=True),
    "tis": ObjectiveSpec(is_weighted=True, is_truncated=True),
    "acr": ObjectiveSpec(is_weighted=True, is_truncated=True, is_widened=True),
}


def policy_loss(
    logp: Tensor,
    logp_prox: Tensor,
    logp_behav: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    objective: str = "acr",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float | None = 2.0,
    aggregation: str = "token-mean",
    horizon: float | None = None,
    dual_clip: float | None = None,
    acr_max_bound: float | None = None,
    weight: Tensor | None = None,
    shrink: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss and its statistics (means over the masked tokens, detached).

    `weight` and `shrink` are what `correction.correct` made of a whole batch; without them they
    are the token-level w and r of the inputs. `denominator` is that of the global mini-batch when
    the inputs are only a part of it. With rho = 1 everything but ppo_behav is plain PPO, and with
    R = 1 everywhere (one update per rollout batch) acr is tis.

    Dual clip bounds the loss of tokens with A < 0 at `dual_clip * |A|`, before the weight.
    `acr_max_bound` limits how far acr may widen: unlimited, the surrogate of a token is bounded
    only by rho (1 + eh).
    """
    spec = _spec(objective)
    _check_cap(cap)
    keep = mask.bool()
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp, logp_prox, logp_behav = logp.to(dtype), logp_prox.to(dtype), logp_behav.to(dtype)

    if (weight is None) != (shrink is None):
        raise ValueError("weight and shrink come together, from correction.correct")
    if weight is None or shrink is None:
        log_mismatch = torch.where(keep, logp_prox - logp_behav, 0.0)
        weight, shrink = importance_weights(log_mismatch, cap if spec.is_truncated else None)

    base = logp_behav if spec.is_against_behav else logp_prox
    log_ratio = torch.where(keep, logp - base.detach(), 0.0)
    ratio = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP).exp()  # [B, T]

    lower, upper = 1.0 - clip_low, torch.full_like(ratio, 1.0 + clip_high)
    if spec.is_widened:
        upper = _widen(upper, shrink, acr_max_bound)
    surrogate = _clipped_surrogate(ratio, advantages, lower, upper, dual_clip)
    if spec.is_weighted:
        surrogate = weight * surrogate

    loss = aggregate(-surrogate, mask, aggregation, horizon=horizon, denominator=denominator)
    stats = _clip_stats(ratio, advantages, keep, lower, upper, 1.0 + clip_high)
    is_floored = (advantages < 0) & (ratio > (dual_clip or float("inf")))
    stats["actor/pg_clipfrac_lower"] = _mean(is_floored, keep)
    stats["actor/ppo_kl"] = _mean(logp_prox - logp, keep)
    return loss, stats


def _widen(upper: Tensor, shrink: Tensor, max_bound: float | None) -> Tensor:
    """(1 + eh) / r of Eq. (9): wider where the weight was truncated, up to `max_bound`."""
    widened = upper / shrink
    return widened if max_bound is None else torch.maximum(upper, widened.clamp(max=max_bound))


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, lower: float, upper: Tensor, dual_clip: float | None
) -> Tensor:
    """min(R A, clip(R, lower, upper) A), and not below dual_clip A where A < 0."""
    clipped = torch.minimum(ratio.clamp(min=lower), upper)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return surrogate
    floor = dual_clip * advantages
    return torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)


@torch.no_grad()
def _clip_stats(
    ratio: Tensor,
    advantages: Tensor,
    keep: Tensor,
    lower: float,
    upper: Tensor,
    plain_upper: float,
) -> dict[str, Tensor]:
    """Which tokens the clip stopped, and which only ACR's wider bound lets through ("rescued")."""
    is_high = (advantages > 0) & (ratio > upper)
    is_low = (advantages < 0) & (ratio < lower)
    is_rescued = (advantages > 0) & (ratio > plain_upper) & (ratio <= upper)
    return {
        "actor/pg_clipfrac": _mean(is_high | is_low, keep),
        "actor/clip_frac_high": _mean(is_high, keep),
        "actor/clip_frac_low": _mean(is_low, keep),
        "acr/rescued_frac": _mean(is_rescued, keep),
        "acr/max_upper": torch.where(keep, upper, plain_upper).max(),
    }


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: str = "token-mean",
    *,
    horizon: float | None = None,
    denominator: float | None = None,
) -> Tensor:
    """Token values [B, T] to one number.

        token-mean               sum(l m) / sum(m)
        seq-mean-token-mean      mean over sequences of sum_t(l m) / sum_t(m)
        seq-mean-token-sum       mean over sequences of sum_t(l m)
        seq-mean-token-sum-norm  the previous / horizon   (horizon: a constant, by default T)

    A sequence without a masked token enters no denominator. When the values are a part of a
    mini-batch, pass its `count(...)` as denominator: the parts then sum to the whole.
    """
    mask = mask.to(values.dtype)
    values = torch.where(mask.bool(), values, 0.0)
    if denominator is None:
        denominator = count(mask, aggregation)
    if aggregation == "token-mean":
        total = values.sum()
    elif aggregation == "seq-mean-token-mean":
        total = (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum()
    elif aggregation == "seq-mean-token-sum":
        total = values.sum()
    else:
        total = values.sum() / (horizon if horizon is not None else values.shape[-1])
    return total / max(denominator, 1)


def count(mask: Tensor, aggregation: str) -> float:
    """The denominator of an aggregation: trained tokens, or sequences that have any."""
    if aggregation == "token-mean":
        return float(mask.sum())
    if aggregation in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return float((mask.sum(-1) > 0).sum())
    raise ValueError(
        f"aggregation = {aggregation!r} is not one of token-mean, seq-mean-token-mean, "
        "seq-mean-token-sum, seq-mean-token-sum-norm"
    )


def kl_penalty(
    logp: Tensor, logp_ref: Tensor, estimator: str = "k3", *, limit: float | None = None
) -> Tensor:
    """KL(pi || pi_ref) per token, from samples of pi, with d = logp_ref - logp.

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    As a loss, E[grad k1] = 0 (it does not pull), E[grad k2] is the gradient of KL(pi || ref) and
    E[grad k3] that of KL(ref || pi). `limit` bounds the value, and with it the gradient.
    """
    d = (logp_ref.detach() - logp).clamp(-LOG_CLAMP, LOG_CLAMP)
    if estimator == "k1":
        kl = -d
    elif estimator == "k2":
        kl = d.square() / 2
    elif estimator == "k3":
        kl = d.exp() - d - 1
    else:
        raise ValueError(f"estimator = {estimator!r} is not one of k1, k2, k3")
    return kl if limit is None else kl.clamp(-limit, limit)


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss and its statistics.

    Vc  = clamp(V, V_old - c, V_old + c)
    L_V = 0.5 mean(max((V - ret)^2, (Vc - ret)^2))
    """
    error = (values - returns).square()
    is_clipped = torch.zeros_like(mask, dtype=torch.bool)
    if clip is not None and old_values is not None:
        near_old = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped_error = (near_old - returns).square()
        is_clipped = clipped_error > error
        error = torch.maximum(error, clipped_error)
    keep = mask.bool()
    loss = 0.5 * aggregate(error, mask, "token-mean", denominator=denominator)
    with torch.no_grad():
        stats = {
            "critic/vf_clipfrac": _mean(is_clipped, keep),
            "critic/value_mean": _mean(values, keep),
            "critic/return_mean": _mean(returns, keep),
        }
    return loss, stats


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(ret - V) / Var(ret): 1 is a perfect critic, 0 one that knows only the mean."""
    keep = mask.bool()
    if keep.sum() < 2:
        return 0.0
    total = returns[keep].var()
    return float(1 - (returns - values)[keep].var() / total) if total > 0 else 0.0


def _spec(objective: str) -> ObjectiveSpec:
    try:
        return OBJECTIVES[objective]
    except KeyError:
        raise ValueError(
            f"objective = {objective!r} is not one of {', '.join(OBJECTIVES)}"
        ) from None


def _check_cap(cap: float | None) -> None:
    if cap is not None and cap < 1:
        raise ValueError(
            f"cap = {cap} must be at least 1 (it would rescale on-policy tokens), or None"
        )


def _mean(values: Tensor, keep: Tensor) -> Tensor:
    """Mean over the kept entries; 0 when there is none."""
    total = torch.where(
        keep, values.detach().to(torch.promote_types(values.dtype, torch.float32)), 0.0
    ).sum()
    return total / keep.sum().clamp(min=1)
