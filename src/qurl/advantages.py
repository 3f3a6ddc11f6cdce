"""Advantages: generalised advantage estimation and the group baselines.

Shapes: B sequences, T positions, G completions of one problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from qurl.errors import ConfigError
from qurl.objectives import ADVANTAGES, Advantage, with_facts
from qurl.ops.pooling import Pool, alone, spreads
from qurl.plugins import kind_of
from qurl.types import Batch, Corrected, Scored, Trainable

WHITEN_EPS = 1e-8
GRPO_EPS = 1e-6


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the last dimension: (advantages, returns).

        delta_t = rew_t + gamma V_{t+1} - V_t        (V = 0 after the last token)
        A_t     = delta_t + gamma lam A_{t+1}
        ret_t   = A_t + V_t

    `lam` may differ from sequence to sequence. Untrained positions are stepped over: A and V of the
    next trained token are carried across them.
    With gamma = lam = 1 the return is the sum of the rewards still to come.
    """
    mask = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[..., 0])
    for t in reversed(range(values.shape[-1])):
        keep = mask[..., t]
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        advantage = delta + gamma * lam * next_advantage
        next_value = keep * values[..., t] + (1 - keep) * next_value
        next_advantage = keep * advantage + (1 - keep) * next_advantage
        advantages[..., t] = keep * advantage
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, pool: Pool = alone) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the trained tokens, with the unbiased variance."""
    found = spreads({"all": values[mask.bool()]}, pool)["all"]
    variance = found.deviations / max(found.count - 1, 1)
    return (values - found.mean) / math.sqrt(variance + WHITEN_EPS) * mask


def group_advantages(
    rewards: Tensor | Sequence, kind: str = "grpo", *, group: Tensor | None = None
) -> Tensor:
    """Advantage of each completion against its group, in the shape of `rewards`.

        grpo          (R - mean) / (std + 1e-6), unbiased std; a single completion has mean 0, std 1
        dr_grpo       R - mean
        rloo          R - mean of the others = n / (n - 1) (R - mean)
        reinforce_pp  R - mean, then whitened over all groups; for groups of one, whitened only

    The last dimension is the group, unless `group` names the group of each reward.
    """
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor(rewards, dtype=torch.float64)
    # In FP32 the mean of equal rewards is not always that reward, and grpo divides what is left by
    # a deviation just as small.
    flat = rewards.flatten().double()
    if group is None:
        size = rewards.shape[-1]
        group = torch.arange(flat.numel() // size, device=flat.device).repeat_interleave(size)
    _, index = group.flatten().unique(return_inverse=True)
    count = _group_sum(torch.ones_like(flat), index)
    mean = _group_sum(flat, index) / count
    is_single = count == 1
    others, centered = (count - 1).clamp(min=1), flat - mean
    advantages = torch.where(is_single, flat, centered)
    if kind == "rloo":
        advantages = centered * count / others
    elif kind == "grpo":
        std = (_group_sum(centered.square(), index) / others).sqrt()
        advantages = advantages / (torch.where(is_single, 1.0, std) + GRPO_EPS)
    elif kind == "reinforce_pp":
        advantages = whiten(advantages, torch.ones_like(advantages))
    elif kind != "dr_grpo":
        raise ValueError(f"kind = {kind!r} is not one of grpo, dr_grpo, rloo, reinforce_pp")
    dtype = rewards.dtype if rewards.is_floating_point() else advantages.dtype
    return advantages.reshape(rewards.shape).to(dtype)


Estimator = Callable[[Corrected], Tensor | tuple[Tensor, Tensor]]
"""An advantage: a batch to advantages [B, T], or to advantages and returns.

Its facts may be attached by `with_facts(Advantage(...))`. Without returns of its own, the critic
learns advantages + values.
"""


@with_facts(ADVANTAGES["gae"])
def critic_advantages(
    batch: Corrected,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float | None = None,
    lam_alpha: float = 0.0,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`gae` of the outcomes, less `kl_coef` times the KL to the reference on each token.

    `lam_alpha` gives each response a lambda by its length, and `critic_lam` gives the critic's
    returns one of their own (VAPO).
    """
    known = (token_rewards(batch, kl_coef), batch.values, batch.mask)
    by_length = length_lambda(batch.mask.sum(-1), lam_alpha) if lam_alpha else lam
    advantages, returns = gae(*known, gamma=gamma, lam=by_length)
    if critic_lam is not None:
        _, returns = gae(*known, gamma=gamma, lam=critic_lam)
    return advantages, returns


def length_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """1 - 1 / (alpha l), at least 0: the longer a response, the further its outcome reaches."""
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def _against_group(kind: str) -> Estimator:
    """`group_advantages` of one kind, on all trained tokens of a completion."""

    @with_facts(ADVANTAGES[kind])
    def estimate(batch: Corrected) -> Tensor:
        return group_advantages(batch.rewards, kind, group=batch.group)[:, None] * batch.mask

    estimate.__name__ = kind
    return estimate


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": critic_advantages,
    **{kind: _against_group(kind) for kind in ("grpo", "dr_grpo", "rloo", "reinforce_pp")},
}


def compare(
    batch: Corrected,
    estimate: Estimator,
    *,
    is_whitened: bool = False,
    pool: Pool = alone,
    agreeing: AbstractContextManager[None] | None = None,
) -> Trainable:
    """The batch with each token's advantage, and with the returns that a critic learns.

    An error of the estimate leaves through `agreeing`, before ranks wait for each other's sums.
    """
    with agreeing or nullcontext():
        advantages, returns = _estimate(batch, estimate)
    if is_whitened:
        advantages = whiten(advantages, batch.mask, pool)
    return batch.into(Trainable, advantages=advantages, returns=returns)


def _estimate(batch: Corrected, estimate: Estimator) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T], checked."""
    found = estimate(batch)
    name, shape = getattr(estimate, "__name__", repr(estimate)), tuple(batch.mask.shape)
    tensors = found if isinstance(found, tuple) else (found,)
    is_pair = isinstance(found, Tensor) or len(tensors) == 2
    if not is_pair or not all(
        isinstance(x, Tensor) and x.is_floating_point() and x.shape == shape for x in tensors
    ):
        raise ConfigError(
            f"advantage {name!r} returned {kind_of(found)}; it must return a floating-point "
            f"tensor of the shape of batch.mask, {shape}, or two: advantages and returns"
        )
    # A critic may diverge; without one, nothing that is read can be to blame.
    needs_critic = getattr(estimate, "facts", Advantage()).needs_critic
    keep = batch.mask.bool()
    if not needs_critic and not all(x[keep].isfinite().all() for x in tensors):
        raise ConfigError(f"advantage {name!r} returned NaN or infinity for trained tokens")
    return (found, found + batch.values) if isinstance(found, Tensor) else found


def known_advantages(advantages: Tensor) -> Estimator:
    """These [B], on all trained tokens of each sequence."""

    @with_facts(Advantage(needs_prox=False, reads="outcomes"))
    def estimate(batch: Corrected) -> Tensor:
        return advantages.to(batch.mask)[:, None] * batch.mask

    return estimate


def sequence_advantages(batch: Batch, estimate: Estimator) -> Tensor:
    """[B]: an advantage that reads no forward, as a mean over the trained tokens of each row."""
    zeros, ones = torch.zeros_like(batch.mask), torch.ones_like(batch.mask)
    prox = {"logp_prox": batch.logp_behav, "logp_ref": batch.logp_behav}
    none = {"values": zeros, "entropy": zeros, "has_prox": torch.zeros_like(batch.lengths).bool()}
    found = estimate(batch.into(Corrected, **prox, **none, weight=ones, shrink=ones))
    per_token = found[0] if isinstance(found, tuple) else found
    return (per_token * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)


def token_rewards(batch: Scored, kl_coef: float = 0.0) -> Tensor:
    """[B, T]: the outcome on the last trained token, less beta (logp_prox - logp_ref) on each."""
    keep = batch.mask.bool()
    is_last = keep & (keep.cumsum(-1) == keep.sum(-1, keepdim=True))
    rewards = batch.rewards[:, None] * is_last
    if kl_coef > 0:
        rewards = rewards - kl_coef * (batch.logp_prox - batch.logp_ref) * batch.mask
    return rewards


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    """For each entry, the sum over its group."""
    sums = torch.zeros(int(index.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, index, values)[index]
