"""AdamW on FP32 masters, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from qurl.config import OptimConfig
from qurl.errors import TrainingError


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, lr: float, scales: Mapping[nn.Parameter, float] = {}
) -> AdamW:
    """AdamW with weight decay on matrices, not on norms and biases.

    `scales` multiply the learning rate of single parameters and divide their epsilon and decay. A
    scale s is then the same as training the parameter divided by s.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = (parameter.dim() >= 2, scales.get(parameter, 1.0))
            groups.setdefault(key, []).append(parameter)
    optimizer = AdamW(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay / scale if is_matrix else 0.0,
                "eps": config.eps / scale,
                "lr_scale": scale,
            }
            for (is_matrix, scale), parameters in groups.items()
        ],
        lr=lr,
        betas=config.betas,
        fused=next(model.parameters()).device.type == "cuda",
    )
    optimizer.register_step_post_hook(_count_versions)
    return optimizer


def _count_versions(optimizer: Optimizer, *_: Any) -> None:
    """Mark parameters as changed, which torch's fused AdamW does not; codes are renewed by it."""
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


def learning_rate(peak: float, step: int, total: int, config: OptimConfig) -> float:
    """The rate of `step` (from 0): linear warm-up, then constant, linear or cosine decay to 0."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    if config.schedule == "linear":
        return peak * (1 - progress)
    if config.schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def apply_gradients(optimizer: Optimizer, *, lr: float, grad_clip: float) -> float:
    """Clip, step and clear; returns the norm before clipping. One that is not finite raises."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, grad_clip))
    if not math.isfinite(norm):
        raise TrainingError(
            f"the gradient norm is {norm}: the weights were left as they are. Look at the loss "
            "terms and the rollouts in the crash folder; a lower optim.lr or algo.cap may help"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
