"""Rollout correction: what the sampler's mismatch does to each token's weight and mask.

    mismatch  rho = pi_prox / pi_behav           full-precision over quantized old actor
    weight    w   = min(rho, C)                  truncated importance weight
    shrink    r   = w / rho = min(1, C / rho)    what truncation took away, in (0, 1]

Samples come from pi_behav, so means over tokens are expectations under pi_behav. Everything here
is detached: rho does not depend on the weights being trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qurl.objectives import parse_rejection
from qurl.ops.pooling import Pool, alone, summarize, total
from qurl.types import Corrected, Scored

LOG_CLAMP = 20.0
"""Log-ratios are clamped to +-20 before exp, as verl does."""

LARGEST_TAIL = 1e-3
"""Largest `gap_tail` with which `correction.mode = "auto"` takes behav for prox.

BF16 on both sides gives 4e-5, INT8 rollouts give 3e-2 (benchmarks/gap_tails.py, 0.5B and 1.5B).
"""


def importance_weights(log_mismatch: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """(w, r): the truncated weight and what truncation took away; cap None truncates nothing.

    w     = min(rho, C)
    log r = min(0, log C - log rho)
    """
    log_mismatch = log_mismatch.detach().clamp(-LOG_CLAMP, LOG_CLAMP)
    if cap is None:
        return log_mismatch.exp(), torch.ones_like(log_mismatch)
    log_shrink = (math.log(cap) - log_mismatch).clamp(max=0.0)
    return log_mismatch.exp().clamp(max=cap), log_shrink.exp()


def icepop_weights(log_mismatch: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(w, r): rho inside the band and 0 outside; nothing is truncated, so r = 1."""
    mismatch = log_mismatch.detach().clamp(-LOG_CLAMP, LOG_CLAMP).exp()
    inside = (mismatch >= low) & (mismatch <= high)
    return mismatch * inside, torch.ones_like(mismatch)


def weigh(
    scored: Scored,
    *,
    cap: float | None,
    level: str = "token",
    kind: str = "truncate",
    icepop_low: float = 0.5,
    icepop_high: float = 5.0,
) -> tuple[Tensor, Tensor]:
    """(w, r) of each row by itself; w is 0 where `mask` is 0. Where prox is behav, both are 1."""
    log_mismatch = (scored.logp_prox - scored.logp_behav) * scored.mask  # [B, T]
    if level == "sequence":
        log_mismatch = log_mismatch.sum(-1, keepdim=True).expand_as(log_mismatch)
    if kind == "icepop":
        weight, shrink = icepop_weights(log_mismatch, icepop_low, icepop_high)
    else:
        weight, shrink = importance_weights(log_mismatch, cap)
    return weight * scored.mask, shrink


def correct(
    scored: Scored,
    *,
    cap: float | None,
    mode: str = "decoupled",
    batch_normalize: bool = False,
    reject: Sequence[str] = (),
    veto: float | None = None,
    pool: Pool = alone,
    **weighting: Any,
) -> Corrected:
    """The batch with its weights, rejected tokens out of its mask.

    `cap` is C as the objective applies it (`Objective.cap`); the other options are those of the
    recipe's [correction] section, `weighting` those of `weigh`. In bypass mode prox is behav:
    nothing is weighted or rejected.
    """
    if mode == "bypass":
        ones = torch.ones_like(scored.mask)
        return scored.into(Corrected, weight=ones, shrink=ones)
    weight, shrink = weigh(scored, cap=cap, **weighting)
    log_mismatch = (scored.logp_prox - scored.logp_behav) * scored.mask  # [B, T]
    mask = scored.mask * acceptance(log_mismatch, scored.mask, reject=reject, veto=veto)
    if batch_normalize:
        weight = weight / max(_mean_weight(weight, mask, pool), 1e-8)
    return scored.into(Corrected, mask=mask, weight=weight * mask, shrink=shrink)


def _mean_weight(weight: Tensor, mask: Tensor, pool: Pool) -> float:
    return total((weight * mask).sum(), pool) / max(total(mask.sum(), pool), 1)


def gap_tail(scored: Scored, limit: float, pool: Pool = alone) -> float:
    """Share of the trained tokens with |log pi_prox - log pi_behav| > `limit`."""
    gap = (scored.logp_prox - scored.logp_behav).abs()
    num_above = total(((gap > limit) * scored.mask).sum(), pool)
    return num_above / max(total(scored.mask.sum(), pool), 1)


def acceptance(
    log_mismatch: Tensor, mask: Tensor, *, reject: Sequence[str] = (), veto: float | None = None
) -> Tensor:
    """[B, T] of 0 and 1: tokens that no rejection rule and no veto drops."""
    accepted = torch.ones_like(mask)
    for rule in reject:
        accepted = accepted * _accept(rule, log_mismatch, mask)
    if veto is not None:
        catastrophic = ((log_mismatch < math.log(veto)) & mask.bool()).any(-1, keepdim=True)
        accepted = accepted * ~catastrophic
    return accepted


def _accept(rule: str, log_mismatch: Tensor, mask: Tensor) -> Tensor:
    """One rule: a divergence d per token, reduced over the sequence where it says so, in bounds.

    k1 compares exp(d) = rho with a band (for seq_mean the geometric mean of rho, for seq_sum the
    ratio of the sequence); k2 = d^2 / 2 and k3 = exp(d) - d - 1 are compared with an upper bound.
    """
    name, low, high = parse_rejection(rule)
    d = log_mismatch.clamp(-LOG_CLAMP, LOG_CLAMP)
    kind = name[-2:]
    divergence = {"k1": d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[kind] * mask
    if kind == "k1":
        assert low is not None
        low, high = math.log(low), math.log(high)
    if name.startswith("seq_sum"):
        divergence = divergence.sum(-1, keepdim=True)
    elif name.startswith("seq_mean"):
        divergence = divergence.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    accepted = divergence <= high
    if low is not None:
        accepted = accepted & (divergence >= low)
    if name.startswith("seq_max"):  # every token must lie within
        accepted = accepted.all(-1, keepdim=True)
    return accepted.expand_as(mask).to(mask.dtype)


def correction_metrics(
    batch: Corrected,
    sampled: Tensor,
    *,
    cap: float | None,
    batch_normalize: bool = False,
    pool: Pool = alone,
    **weighting: Any,
) -> dict[str, float]:
    """Mismatch, rejection and weights of the rows with a prox.

    `sampled` is the mask before rejection, `weighting` the options of `weigh`.
    """
    before, mask = (m * batch.has_prox[:, None] for m in (sampled, batch.mask))
    metrics = mismatch_metrics(batch.logp_prox, batch.logp_behav, before, cap=cap, pool=pool)
    if not metrics:
        return {}
    metrics |= _rejection_metrics(before, mask, pool)
    if batch_normalize:
        weight, _ = weigh(batch.replace(mask=before), cap=cap, **weighting)
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = _mean_weight(weight, mask, pool)
    return metrics | weight_metrics(batch.weight, batch.shrink, mask, pool=pool)


def mismatch_metrics(
    logp_prox: Tensor, logp_behav: Tensor, mask: Tensor, *, cap: float | None, pool: Pool = alone
) -> dict[str, float]:
    """How far the sampler is from the proximal policy, raw and untruncated, under verl's names."""
    keep = mask.bool()
    d = (logp_prox - logp_behav)[keep].double()
    mismatch = d.clamp(-LOG_CLAMP, LOG_CLAMP).exp()
    probs_gap = (logp_prox[keep].double().exp() - logp_behav[keep].double().exp()).abs()
    lengths = mask.sum(-1)
    rows = lengths > 0
    mean_prox = ((logp_prox * mask).sum(-1) / lengths.clamp(min=1))[rows].double()
    mean_behav = ((logp_behav * mask).sum(-1) / lengths.clamp(min=1))[rows].double()
    log_ratio_seq = ((logp_prox - logp_behav) * mask).sum(-1)[rows].double()
    ratio_seq = log_ratio_seq.clamp(-LOG_CLAMP, LOG_CLAMP).exp()
    log_ppl_diff = mean_behav - mean_prox
    columns: dict[str, Tensor] = {
        "rollout_corr/kl": -d,
        "rollout_corr/k3_kl": mismatch - d - 1,
        "rollout_corr/chi2_token": mismatch.square() - 1,
        "rollout_corr/chi2_seq": ratio_seq.square() - 1,
        "rollout_corr/rollout_is_mean": mismatch,
        "rollout_corr/rollout_is_std": mismatch,
        "rollout_corr/rollout_is_max": mismatch,
        "rollout_corr/rollout_is_min": mismatch,
        "rollout_corr/rollout_is_seq_max": ratio_seq,
        "rollout_corr/rollout_is_seq_min": ratio_seq,
        "rollout_corr/training_ppl": (-mean_prox).exp(),
        "rollout_corr/rollout_ppl": (-mean_behav).exp(),
        "rollout_corr/log_ppl_diff": log_ppl_diff,
        "rollout_corr/log_ppl_abs_diff": log_ppl_diff.abs(),
        "training/rollout_probs_diff_mean": probs_gap,
        "training/rollout_probs_diff_max": probs_gap,
        "training/rollout_probs_diff_std": probs_gap,
    }
    if cap is not None:
        columns["rollout_corr/rollout_is_ratio_fraction_high"] = mismatch > cap
        columns["rollout_corr/rollout_is_ratio_fraction_low"] = mismatch < 1 / cap
    return summarize(columns, pool)


def weight_metrics(
    weight: Tensor, shrink: Tensor, mask: Tensor, *, pool: Pool = alone
) -> dict[str, float]:
    """What a weighted objective multiplies with: truncated weights, r, effective sample size."""
    keep = mask.bool()
    w, r = weight[keep].double(), shrink[keep].double()
    size = "rollout_corr/rollout_is_eff_sample_size"
    columns: dict[str, Tensor] = {
        "rollout_corr/weight_mean": w,
        "rollout_corr/weight_max": w,
        "rollout_corr/truncated_frac": r < 1,
        size: w.square(),
        "acr/shrink_mean": r,
        "acr/shrink_min": r,
    }
    found = summarize(columns, pool)
    if found:  # E[w]^2 / E[w^2]
        found[size] = found["rollout_corr/weight_mean"] ** 2 / max(found[size], 1e-300)
    return found


def _rejection_metrics(before: Tensor, after: Tensor, pool: Pool) -> dict[str, float]:
    rows = before.sum(-1) > 0
    lost = {
        "rollout_corr/rollout_rs_masked_fraction": (after == 0)[before.bool()],
        "rollout_corr/rollout_rs_seq_masked_fraction": (after.sum(-1) == 0)[rows],
    }
    return summarize(lost, pool)
