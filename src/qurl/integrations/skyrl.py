"""The policy loss `qurl` for SkyRL, and an entry point that knows its options:

    python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=qurl.integrations.skyrl trainer.algorithm.qurl.cap=2.0 ...

SkyRL hands a policy loss the log-probs of all three policies, and advantages that it has divided by
the mini-batch's tokens or sequences, so a loss adds up what it is given.
"""

# SkyRL builds its configuration from the types of fields, so annotations must not be strings.

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qurl.errors import ConfigError
from qurl.integrations.loss import check_options, corrected_loss, mismatch_numbers
from qurl.plugins import import_extra

_PURPOSE = "qurl.integrations.skyrl"
ppo_utils = import_extra("skyrl.backends.skyrl_train.utils.ppo_utils", "skyrl", "skyrl", _PURPOSE)
skyrl_config = import_extra("skyrl.train.config", "skyrl", "skyrl", _PURPOSE)

SECTION = "trainer.algorithm"


@dataclass
class QurlOptions(skyrl_config.BaseConfig):
    """Options of the loss: trainer.algorithm.qurl."""

    objective: str = "acr"
    """ppo_prox, ppo_behav, decoupled, tis or acr; your own as module:function."""
    cap: float | None = 2.0
    """C, the largest importance weight; None truncates nothing."""
    acr_max_bound: float | None = None
    """How far acr may widen the upper clip bound; None: as far as (1 + eh) / r goes."""
    dual_clip: bool = False
    """Bound the loss where A < 0 by trainer.algorithm.clip_ratio_c, as SkyRL's dual_clip does."""

    def __post_init__(self) -> None:
        options = {"cap": self.cap, "acr_max_bound": self.acr_max_bound}
        check_options(f"{SECTION}.qurl", objective=self.objective, **options)


@dataclass
class QurlAlgorithmConfig(skyrl_config.AlgorithmConfig):
    """SkyRL's algorithm section, with our loss as the default."""

    policy_loss_type: str = "qurl"
    qurl: QurlOptions = field(default_factory=QurlOptions)

    def __post_init__(self) -> None:
        if self.use_tis or self.off_policy_correction.tis_ratio_type is not None:
            raise ConfigError(
                f"{SECTION}.off_policy_correction.tis_ratio_type (or use_tis) would weigh tokens a "
                f"second time; leave it null and choose C with {SECTION}.qurl.cap"
            )


QurlTrainConfig = skyrl_config.make_config(algorithm_cls=QurlAlgorithmConfig)


def qurl_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's policy loss: `qurl.losses.policy_loss` on one micro-batch, all tensors [B, T]."""
    if not isinstance(config, QurlAlgorithmConfig):
        raise ConfigError(
            f"policy loss qurl needs its options: start with trainer.override_entrypoint={__name__}"
        )
    if rollout_logprobs is None:
        raise ConfigError(
            "policy loss qurl got no rollout_logprobs: set generator.sampling_params.logprobs = 1"
        )
    mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
    _, mask, metrics = ppo_utils.apply_off_policy_correction(  # SkyRL's masks; it weighs nothing
        log_probs, old_log_probs, rollout_logprobs, mask, config.off_policy_correction
    )
    options = config.qurl
    loss, stats = corrected_loss(
        log_probs,
        old_log_probs,
        rollout_logprobs,
        advantages,
        mask,
        objective=options.objective,
        cap=options.cap,
        acr_max_bound=options.acr_max_bound,
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        dual_clip=config.clip_ratio_c if options.dual_clip else None,
        denominator=1.0,
    )
    mismatch = mismatch_numbers(old_log_probs, rollout_logprobs, mask, cap=options.cap)
    return loss, {**metrics, **mismatch, **stats}


# Not as a decorator: workers then find the function by its name when SkyRL sends it to them.
ppo_utils.register_policy_loss("qurl")(qurl_loss)


def main() -> None:
    """Train as `skyrl.train.entrypoints.main_base` does, with the options of the loss."""
    from skyrl.train.entrypoints import main_base  # type: ignore[import-not-found]

    entrypoint = "trainer.override_entrypoint="  # how we got here, and no key of SkyRL
    arguments = [word for word in sys.argv[1:] if not word.startswith(entrypoint)]
    config = QurlTrainConfig.from_cli_overrides(arguments)
    main_base.validate_cfg(config)
    main_base.initialize_ray(config)
    main_base.ray.get(main_base.skyrl_entrypoint.remote(config))
