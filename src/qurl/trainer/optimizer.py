"""The optimizer that a recipe names, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from qurl.config import OptimConfig
from qurl.errors import TrainingError
from qurl.trainer.adamw8bit import AdamW8bit, find_coded
from qurl.trainer.hadam import HAdam
from qurl.trainer.ranks import Ranks
from qurl.trainer.states import parameters_of


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, lr: float, scales: Mapping[nn.Parameter, float] = {}
) -> Optimizer:
    """AdamW with weight decay on matrices, not on norms and biases.

    `scales` multiply the learning rate of single parameters and divide their epsilon and decay. A
    scale s is then the same as training the parameter divided by s.
    """
    coded = find_coded(model) if config.moments == "8bit" else set()
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for is_matrix in (True, False):  # in this order, as in checkpoints
        groups[is_matrix, 1.0, False] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = (parameter.dim() >= 2, scales.get(parameter, 1.0), parameter in coded)
            groups.setdefault(key, []).append(parameter)
    options = [
        {
            "params": parameters,
            "weight_decay": config.weight_decay / scale if is_matrix else 0.0,
            "eps": config.eps / scale,
            "lr_scale": scale,
            "is_coded": is_coded,
        }
        for (is_matrix, scale, is_coded), parameters in groups.items()
    ]
    optimizer: Optimizer
    if config.name == "hadam":
        moments = torch.float16 if config.moments == "fp16" else torch.float32
        optimizer = HAdam(options, lr=lr, betas=config.betas, moments=moments)
    elif (config.moments, config.masters) != ("fp32", "fp32"):
        optimizer = AdamW8bit(options, lr=lr, betas=config.betas)
    else:
        is_fused = next(model.parameters()).device.type == "cuda"
        optimizer = AdamW(options, lr=lr, betas=config.betas, fused=is_fused)
    optimizer.register_step_post_hook(_count_versions)
    return optimizer


def _count_versions(optimizer: Optimizer, *_: Any) -> None:
    """Mark parameters as changed, so that copies are renewed; fused kernels do not do it."""
    increment_version(parameters_of(optimizer))


def optimizer_metrics(optimizer: Optimizer) -> dict[str, float]:
    """What an optimizer has to say about its last update."""
    if isinstance(optimizer, HAdam) and optimizer.is_scaled:
        return {"optim/scale": optimizer.scale}
    return {}


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


def add_up_gradients_(optimizer: Optimizer, ranks: Ranks) -> None:
    """Make each gradient the sum of those of all ranks; one that no rank has stays None."""
    parameters = parameters_of(optimizer)
    is_known = ranks.pool([p.grad is not None for p in parameters])
    for parameter, known in zip(parameters, zip(*is_known, strict=True), strict=True):
        if any(known):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
            dist.all_reduce(parameter.grad)


def apply_gradients(optimizer: Optimizer, *, lr: float, grad_clip: float) -> float:
    """Clip, step and clear; returns the norm before clipping. One that is not finite raises."""
    parameters = parameters_of(optimizer)
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = float(total)
    if not math.isfinite(norm):
        raise TrainingError(
            f"the gradient norm is {norm}: the weights were left as they are. Look at the loss "
            "terms and the rollouts in the crash folder; a lower optim.lr or algo.cap may help"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    if isinstance(optimizer, AdamW8bit | HAdam):
        optimizer.step(clip=min(1.0, grad_clip / (norm + 1e-6)))  # as torch clips
    else:
        clip_grads_with_norm_(parameters, grad_clip, total)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
