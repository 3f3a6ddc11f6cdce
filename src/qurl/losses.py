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

All are maximised; a loss is minus the objective. Each can be made symmetric (`Symmetric`). Shapes:
B sequences, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qurl.correction import LOG_CLAMP, importance_weights
from qurl.errors import ConfigError
from qurl.objectives import OBJECTIVES, Objective, with_facts
from qurl.ops.pooling import Pool, alone, spreads
from qurl.plugins import kind_of, naming_failures

Stats = dict[str, Tensor]


@dataclass(frozen=True)
class Symmetric:
    """The symmetric RL loss: a policy gradient and its reverse, with label and prediction swapped.

        sppo   alpha min(R A, clip(R) A) - beta u A (1 - pi) / pi_old
        sa2c   u A (alpha log pi         - beta     (1 - pi))

    replace min(R A, clip(R) A) in an objective. u is 0 where the clip stops the token, else 1;
    pi_old is the policy in the denominator of R. With R = 1, sa2c is symmetric A2C.

    Derivatives by log pi, where u = 1: A R (alpha + beta) and A (alpha + beta pi). So sppo is PPO
    times a constant, because (1 - pi) / pi_old = 1 / pi_old - R. It acts only on what is not
    invariant to that constant: gradient clipping, and the balance with KL and entropy. sa2c gives
    likely tokens a larger weight.
    """

    kind: Literal["off", "sppo", "sa2c"] = "off"
    alpha: float = 0.5
    beta: float = 0.4

    def apply(self, tokens: TokenTerms, clipped: Tensor, is_free: Tensor) -> tuple[Tensor, Stats]:
        """What is maximised in place of `clipped`, and statistics; `is_free` is u."""
        if self.kind == "off":
            return clipped, {}
        free, probability = tokens.advantages * is_free, tokens.logp.exp()
        if self.kind == "sppo":
            inverse = (tokens.ratio / probability.clamp(min=_RAREST)).detach()  # 1 / pi_old
            forward, reverse = clipped, free * (tokens.ratio - inverse)
            slopes = tokens.ratio, tokens.ratio
        else:
            forward, reverse = free * tokens.logp, free * torch.expm1(tokens.logp)
            slopes = torch.ones_like(probability), probability
        pull, reverse_pull = self.alpha * slopes[0], self.beta * slopes[1]
        stats = {
            "symmetric/forward": _mean(forward, tokens.keep),
            "symmetric/reverse": _mean(reverse, tokens.keep),
            "symmetric/probability": _mean(probability, tokens.keep),
            "symmetric/reverse_share": _mean(reverse_pull / (pull + reverse_pull), tokens.keep),
        }
        return self.alpha * forward + self.beta * reverse, stats


_PLAIN = Symmetric()
_RAREST = math.exp(-LOG_CLAMP)


@dataclass(frozen=True)
class TokenTerms:
    """What an objective sees, [B, T] each; only ratio and logp have a gradient."""

    ratio: Tensor
    """R, or R_hat for objectives against the sampler."""
    logp: Tensor
    """log pi; 0 where the token is not trained."""
    advantages: Tensor
    weight: Tensor
    """rho for weighted objectives without truncation, else min(rho, C)."""
    shrink: Tensor
    """r = w / rho."""
    keep: Tensor
    """Whether the token is trained."""
    lower: float
    """1 - el."""
    upper: Tensor
    """1 + eh."""
    max_upper: float | None = None
    """How far the upper bound may be widened."""
    dual_clip: float | None = None
    """Bounds the loss of tokens with A < 0 at `dual_clip * |A|`."""
    symmetric: Symmetric = _PLAIN

    def clipped(self, upper: Tensor | None = None) -> tuple[Tensor, Stats]:
        """min(R A, clip(R, lower, upper) A), not below dual_clip A where A < 0; and statistics.

        With `algo.symmetric`, what takes its place.
        """
        upper = self.upper if upper is None else upper
        clipped = torch.minimum(self.ratio.clamp(min=self.lower), upper)
        surrogate = torch.minimum(self.ratio * self.advantages, clipped * self.advantages)
        if self.dual_clip is not None:
            floored = torch.maximum(surrogate, self.dual_clip * self.advantages)
            surrogate = torch.where(self.advantages < 0, floored, surrogate)
        stats, is_free = self._clip_stats(upper)
        surrogate, more = self.symmetric.apply(self, surrogate, is_free)
        return surrogate, stats | more

    @torch.no_grad()
    def _clip_stats(self, upper: Tensor) -> tuple[Stats, Tensor]:
        """Which tokens the clip stopped, and which only a wider bound lets through ("rescued").

        Second, the tokens [B, T] that nothing stopped.
        """
        is_positive, is_negative = self.advantages > 0, self.advantages < 0
        is_high = is_positive & (self.ratio > upper)
        is_low = is_negative & (self.ratio < self.lower)
        is_rescued = is_positive & (self.ratio > self.upper) & (self.ratio <= upper)
        is_floored = is_negative & (self.ratio > (self.dual_clip or float("inf")))
        stats = {
            "actor/pg_clipfrac": _mean(is_high | is_low, self.keep),
            "actor/clip_frac_high": _mean(is_high, self.keep),
            "actor/clip_frac_low": _mean(is_low, self.keep),
            "acr/rescued_frac": _mean(is_rescued, self.keep),
            "acr/max_upper": torch.where(self.keep, upper, self.upper).max(),
            "actor/pg_clipfrac_lower": _mean(is_floored, self.keep),
        }
        return stats, ~(is_high | is_low | is_floored)


Surrogate = Callable[[TokenTerms], Tensor | tuple[Tensor, Stats]]
"""An objective: per-token terms to what is maximised, [B, T], and statistics if it has any.

Its facts are attached by `with_facts`. Statistics are scalars: means over the kept tokens, or
maxima or minima if "max" or "min" is a word of their name, as in "my/ratio_max".
"""


@with_facts(OBJECTIVES["ppo_prox"])
def ppo_prox(tokens: TokenTerms) -> tuple[Tensor, Stats]:
    """Eq. (1): plain PPO on the full-precision old actor."""
    return tokens.clipped()


@with_facts(OBJECTIVES["ppo_behav"])
def ppo_behav(tokens: TokenTerms) -> tuple[Tensor, Stats]:
    """Eq. (3): the same, with the ratio against the sampler."""
    return tokens.clipped()


@with_facts(OBJECTIVES["decoupled"])
def decoupled(tokens: TokenTerms) -> tuple[Tensor, Stats]:
    """Eq. (4): PPO weighted by the mismatch."""
    surrogate, stats = tokens.clipped()
    return tokens.weight * surrogate, stats


@with_facts(OBJECTIVES["tis"])
def tis(tokens: TokenTerms) -> tuple[Tensor, Stats]:
    """Eq. (5): PPO weighted by the truncated mismatch."""
    surrogate, stats = tokens.clipped()
    return tokens.weight * surrogate, stats


@with_facts(OBJECTIVES["acr"])
def acr(tokens: TokenTerms) -> tuple[Tensor, Stats]:
    """Eq. (9): the upper bound (1 + eh) / r is wider where the weight was truncated.

    Without a limit on the bound, the surrogate of a token is bounded only by rho (1 + eh).
    """
    upper = tokens.upper / tokens.shrink
    if tokens.max_upper is not None:
        upper = torch.maximum(tokens.upper, upper.clamp(max=tokens.max_upper))
    surrogate, stats = tokens.clipped(upper)
    return tokens.weight * surrogate, stats


SURROGATES: Mapping[str, Surrogate] = {
    f.__name__: f for f in (ppo_prox, ppo_behav, decoupled, tis, acr)
}


def policy_loss(
    logp: Tensor,
    logp_prox: Tensor,
    logp_behav: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    objective: str | Surrogate = "acr",
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
    symmetric: Symmetric = _PLAIN,
) -> tuple[Tensor, Stats]:
    """The policy's loss and its statistics (means over the trained tokens, detached).

    `objective` is a built-in name or a function of your own. `weight` and `shrink` are what
    `correction.correct` made of a whole batch; by default they are the token-level w and r of the
    inputs. `denominator` is that of the global mini-batch when the inputs are only a part of it.
    With rho = 1 all five are plain PPO, and with R = 1 everywhere (one update per rollout batch)
    acr is tis. `cap` counts only if `weight` and `shrink` are not given.
    """
    if isinstance(objective, str) and objective not in SURROGATES:
        raise ValueError(f"objective = {objective!r} is not one of {', '.join(SURROGATES)}")
    surrogate_of = SURROGATES[objective] if isinstance(objective, str) else objective
    facts = facts_of(surrogate_of)
    if cap is not None and cap < 1:
        raise ValueError(f"cap = {cap} must be at least 1, or on-policy tokens would be rescaled")
    if (weight is None) != (shrink is None):
        raise ValueError("weight and shrink come together, from correction.correct")
    keep = mask.bool()
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp, logp_prox, logp_behav = logp.to(dtype), logp_prox.to(dtype), logp_behav.to(dtype)
    advantages = advantages.to(torch.promote_types(advantages.dtype, torch.float32))
    if weight is None or shrink is None:
        log_mismatch = torch.where(keep, logp_prox - logp_behav, 0.0)
        weight, shrink = importance_weights(log_mismatch, facts.cap(cap))

    base = logp_behav if facts.against == "behav" else logp_prox
    log_ratio = torch.where(keep, logp - base.detach(), 0.0)
    ratio = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP).exp()  # [B, T]
    lower, upper = 1.0 - clip_low, torch.full_like(ratio, 1.0 + clip_high)
    logp = torch.where(keep, logp, 0.0)
    options = {"max_upper": acr_max_bound, "dual_clip": dual_clip, "symmetric": symmetric}
    terms = TokenTerms(ratio, logp, advantages, weight, shrink, keep, lower, upper, **options)
    surrogate, stats = _call(surrogate_of, terms)
    loss = aggregate(-surrogate, mask, aggregation, horizon=horizon, denominator=denominator)
    return loss, {**stats, "actor/ppo_kl": _mean(logp_prox - logp, keep)}


def _call(surrogate_of: Surrogate, terms: TokenTerms) -> tuple[Tensor, Stats]:
    """What an objective returns for these tokens, checked: it may be the user's own."""
    name, ratio = f"objective {_name(surrogate_of)!r}", terms.ratio
    if surrogate_of in SURROGATES.values():
        return surrogate_of(terms)  # type: ignore[return-value]
    with naming_failures(name):
        found = surrogate_of(terms)
    surrogate, stats = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(surrogate, Tensor) or not isinstance(stats, Mapping):
        raise ConfigError(
            f"{name} returned {kind_of(found)}; it must return a tensor [B, T] of what is "
            "maximised, or that and a dict of statistics"
        )
    if surrogate.shape != ratio.shape:
        raise ConfigError(
            f"{name} returned the shape {tuple(surrogate.shape)}; it must return one number per "
            f"token, {tuple(ratio.shape)}"
        )
    if ratio.requires_grad and not surrogate.requires_grad:
        raise ConfigError(
            f"{name} returned numbers without a gradient; compute them from tokens.ratio or "
            "tokens.logp, and do not detach these"
        )
    for key, value in stats.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(
                f"{name} returned {key!r} of shape {tuple(value.shape)}; a statistic must be one "
                "number, such as a mean over tokens.keep"
            )
    return surrogate, dict(stats)


def facts_of(surrogate: Surrogate) -> Objective:
    """What `with_facts` attached to an objective."""
    facts = getattr(surrogate, "facts", None)
    if not isinstance(facts, Objective):
        has = f"has {type(facts).__name__} facts" if facts else "has no facts"
        raise ConfigError(
            f"objective {_name(surrogate)!r} {has}; decorate it with @with_facts(Objective("
            "is_weighted=..., is_truncated=..., against=...)) of qurl.objectives"
        )
    return facts


def _name(surrogate: Surrogate) -> str:
    return getattr(surrogate, "__name__", repr(surrogate))


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

    A sequence without a trained token enters no denominator. When the values are a part of a
    mini-batch, pass its `count(...)` as denominator: the parts then sum to the whole.
    """
    mask = mask.to(values.dtype)
    values = torch.where(mask.bool(), values, 0.0)
    if denominator is None:
        denominator = count(mask, aggregation)
    if aggregation == "seq-mean-token-mean":
        values = values.sum(-1) / mask.sum(-1).clamp(min=1)
    total = values.sum()
    if aggregation == "seq-mean-token-sum-norm":
        total = total / (horizon if horizon is not None else values.shape[-1])
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


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, pool: Pool = alone) -> float:
    """1 - Var(ret - V) / Var(ret): 1 is a perfect critic, 0 one that knows only the mean."""
    keep = mask.bool()
    found = spreads({"all": returns[keep], "left": (returns - values)[keep]}, pool)
    if found["all"].count < 2 or found["all"].deviations <= 0:
        return 0.0
    return 1 - found["left"].deviations / found["all"].deviations


def _mean(values: Tensor, keep: Tensor) -> Tensor:
    """Mean over the kept entries; 0 when there is none."""
    total = torch.where(
        keep, values.detach().to(torch.promote_types(values.dtype, torch.float32)), 0.0
    ).sum()
    return total / keep.sum().clamp(min=1)
