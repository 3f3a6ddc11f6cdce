"""The policy loss `qurl` for verl, registered when verl or its config loads this module.

verl hands a policy loss the log-probs of two policies, pi and pi_prox, and the importance weights
rho = pi_prox / pi_behav that its trainer computed. With raw weights the third comes back:

    log pi_behav = log pi_prox - log rho        (|log rho| <= 20, as verl and QuRL clamp it)

`qurl/acr.yaml` beside this file sets what this needs:

    python -m verl.trainer.main_ppo "hydra.searchpath=[pkg://qurl.integrations.verl]" +qurl=acr ...
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from qurl.correction import LOG_CLAMP
from qurl.errors import ConfigError
from qurl.integrations.loss import check_options, corrected_loss
from qurl.plugins import import_extra

_PURPOSE = "qurl.integrations.verl"
core_algos = import_extra("verl.trainer.ppo.core_algos", "verl", "verl", _PURPOSE)
verl_config = import_extra("verl.workers.config", "verl", "verl", _PURPOSE)

SECTION = "actor_rollout_ref.actor.policy_loss"
REMEDY = "add +qurl=acr with hydra.searchpath=[pkg://qurl.integrations.verl] (docs/verl.md)"

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # verl's root logger stops at WARNING


@dataclass
class QurlLossConfig(verl_config.PolicyLossConfig):
    """Options of the loss; name this class in `policy_loss._target_`."""

    loss_mode: str = "qurl"
    objective: str = "acr"
    """ppo_prox, ppo_behav, decoupled, tis or acr; your own as module:function."""
    cap: float | None = 2.0
    """C, the largest importance weight; None truncates nothing."""
    acr_max_bound: float | None = None
    """How far acr may widen the upper clip bound; None: as far as (1 + eh) / r goes."""
    rollout_correction: Any = None
    """verl's own section, ${algorithm.rollout_correction}: it says whether weights are raw."""

    def __post_init__(self) -> None:
        options = {"cap": self.cap, "acr_max_bound": self.acr_max_bound}
        check_options(SECTION, objective=self.objective, **options)
        if self.loss_mode != "qurl":
            raise ConfigError(f"{SECTION}.loss_mode = {self.loss_mode!r} must be qurl; {REMEDY}")
        check_rollout_correction(self.rollout_correction)
        _announce(self.objective, self.cap)


def check_rollout_correction(section: Mapping[str, Any] | None) -> None:
    """Refuse settings under which verl's weights are missing, cut, normalized or per sequence."""
    if not section:
        raise ConfigError(f"{SECTION}.rollout_correction is missing; {REMEDY}")
    wrong = []
    if section.get("bypass_mode"):
        wrong.append("bypass_mode = True takes pi_behav for pi_prox; set it to False")
    if section.get("rollout_is") != "token":
        wrong.append(f"rollout_is = {section.get('rollout_is')!r} must be token")
    threshold, smallest = section.get("rollout_is_threshold"), math.exp(LOG_CLAMP)
    if not _upper_bound(threshold) >= smallest:
        wrong.append(
            f"rollout_is_threshold = {threshold!r} cuts the weights; set 1e9 (at least "
            f"{smallest:.2g}), and choose C with {SECTION}.cap"
        )
    if section.get("rollout_is_batch_normalize"):
        wrong.append("rollout_is_batch_normalize = True rescales the weights; set it to False")
    if wrong:
        listed = "; ".join(f"algorithm.rollout_correction.{line}" for line in wrong)
        raise ConfigError(f"policy loss qurl needs verl's raw weights: {listed}")


def qurl_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's policy loss: `qurl.losses.policy_loss` on one micro-batch, all tensors [B, T]."""
    options = config.policy_loss
    if not isinstance(options, QurlLossConfig):
        raise ConfigError(f"{SECTION}._target_ is not {__name__}.QurlLossConfig; {REMEDY}")
    logp_behav = recover_behaviour(old_log_prob, rollout_is_weights, response_mask)
    info = {name: x for name, x in config.global_batch_info.items() if x is not None}
    aggregation, denominator = _denominator(loss_agg_mode, info)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    loss, metrics = corrected_loss(
        log_prob,
        old_log_prob,
        logp_behav,
        advantages,
        response_mask,
        objective=options.objective,
        cap=options.cap,
        acr_max_bound=options.acr_max_bound,
        clip_low=config.clip_ratio if low is None else low,
        clip_high=config.clip_ratio if high is None else high,
        dual_clip=config.clip_ratio_c,
        aggregation=aggregation,
        denominator=denominator,
        horizon=info.get("loss_scale_factor"),
    )
    # Data-parallel ranks average their gradients, and each divides by the global mini-batch.
    return loss * info.get("dp_size", 1), metrics


core_algos.register_policy_loss("qurl")(qurl_loss)


def recover_behaviour(logp_prox: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:
    """log pi_behav from verl's raw weights, which are 0 on padding."""
    if weights is None:
        raise ConfigError(
            "policy loss qurl got no rollout_is_weights: set "
            "actor_rollout_ref.rollout.calculate_log_probs = True and "
            "algorithm.rollout_correction.rollout_is = token"
        )
    weights = torch.where(mask.bool(), weights, 1.0)
    if not bool((weights > 0).all()):
        raise ConfigError(
            "policy loss qurl got a weight of 0 or NaN on a trained token; raw weights are above 0 "
            "(algorithm.rollout_correction.rollout_is_threshold = 1e9, without bounds low_high)"
        )
    return logp_prox - weights.log()


def _denominator(loss_agg_mode: str, info: Mapping[str, Any]) -> tuple[str, float | None]:
    """verl's aggregation in ours: its name, and the denominator of the global mini-batch."""
    if loss_agg_mode == "token-sum":
        return "token-mean", 1.0
    name = "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size"
    if name not in info:
        if info.get("dp_size", 1) > 1:
            raise ValueError(f"{name} must be in global_batch_info with dp_size > 1")
        return loss_agg_mode, None
    return loss_agg_mode, float(info[name])


def _upper_bound(threshold: Any) -> float:
    """The bound as verl reads it; 0 for none at all and for "low_high", which drops tokens."""
    try:
        return 0.0 if "_" in str(threshold) else float(threshold)
    except (TypeError, ValueError):
        return 0.0


@functools.cache
def _announce(objective: str, cap: float | None) -> None:
    """Say once that the loss is in use: verl hides errors of plug-ins at DEBUG."""
    packages = f"QuRL {version('qurl-rl')} in verl {version('verl')}"
    logger.info("%s: policy loss qurl, objective = %s, cap = %s", packages, objective, cap)
