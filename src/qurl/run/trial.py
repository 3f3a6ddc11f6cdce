"""Tries parts of your own before a run, so that a mistake in one costs no rollouts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qurl.advantages import ESTIMATORS, Estimator, compare
from qurl.config import Config
from qurl.errors import ConfigError
from qurl.losses import SURROGATES, Surrogate, policy_loss
from qurl.ops.device import pick_device
from qurl.plugins import check_call, naming_failures
from qurl.tasks import Task
from qurl.types import Corrected

_LENGTH = 8

SIGNATURES = {
    "algo.advantage": ("batch",),
    "rollout.episode": ("problem", "tokenizer"),
    "sampling.select": ("count", "num_problems", "num_taken", "history", "seed"),
    "sampling.budget": ("indices", "history", "group_size"),
    "sampling.thermostat": ("step", "temperature"),
    "sampling.replay": (),
    "batch.subselect": ("batch", "advantages", "seed"),
}
"""What the loop calls a part with. The class of a part is built with a `Setup` first."""
_METHODS = {
    "observe": ("step", "graded", "metrics"),
    "metrics": ("trained",),
    "load_state_dict": ("state",),
    "num_fresh": ("num_groups",),
    "merge": ("fresh", "num_groups", "seed"),
}


def check_signature(part: Any, key: str) -> None:
    """Refuse a function or a class that the loop cannot call. Names of built-in parts pass."""
    if key not in SIGNATURES or not callable(part):
        return
    if not isinstance(part, type) or key == "rollout.episode":
        if key != "sampling.replay":
            check_call(part, key, *SIGNATURES[key])
        return
    check_call(part, key, "setup")
    methods = _METHODS if key == "sampling.replay" else _METHODS | {"__call__": SIGNATURES[key]}
    for name, arguments in methods.items():
        if inspect.isfunction(method := inspect.getattr_static(part, name, None)):
            check_call(method, key, "self", *arguments)


def try_objective(objective: Surrogate, config: Config) -> None:
    """Call an objective of your own with made-up tokens."""
    if objective in SURROGATES.values():
        return
    check_call(objective, "algo.objective", "tokens")
    batch = _make_batch(config, ["0"])
    advantages = torch.randn(batch.mask.shape, generator=_draw()).to(batch.mask) * batch.mask
    logp = (0.9 * batch.logp_prox).requires_grad_()
    logps = (logp, batch.logp_prox, batch.logp_behav)
    options = {"cap": config.algo.cap, "aggregation": "token-mean"}
    loss, _ = policy_loss(*logps, advantages, batch.mask, objective=objective, **options)
    _check_finite(loss, "algo.objective", "a loss")
    [gradient] = torch.autograd.grad(loss, logp)
    _check_finite(gradient, "algo.objective", "a gradient")


def try_advantage(advantage: Estimator, config: Config, task: Task) -> None:
    """Call an advantage of your own with made-up completions of the task's first problems, whose
    ids it may look up."""
    if advantage in ESTIMATORS.values():
        return
    ids = [task[index].id for index in range(min(len(task), config.batch.problems))]
    batch = _make_batch(config, ids)
    with naming_failures("algo.advantage"):
        found = compare(batch, advantage)
    values = torch.stack([found.advantages, found.returns])[:, batch.mask.bool()]
    _check_finite(values, "algo.advantage", "numbers")


def _check_finite(values: Tensor, key: str, what: str) -> None:
    if not values.isfinite().all():
        raise ConfigError(
            f"{key} gave {what} with NaN or infinity for a made-up batch, on tokens that are "
            "trained; look for a division by 0 or a logarithm of 0 in it"
        )


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _make_batch(config: Config, problem_ids: Sequence[str]) -> Corrected:
    """As many rows as a step has, of short prompts and completions."""
    draw, group_size = _draw(), config.sampling.group_size
    num_rows = config.batch.problems * group_size
    lengths = torch.randint(3, _LENGTH + 1, (num_rows,), generator=draw)
    position = torch.arange(_LENGTH)
    mask = ((position >= 2) & (position < lengths[:, None])).float()
    rewards = (torch.arange(num_rows) % 2).float()
    logp_prox = -torch.rand(mask.shape, generator=draw) * mask
    logp_behav = (logp_prox - 0.1 * torch.rand(mask.shape, generator=draw)) * mask
    weight = (logp_prox - logp_behav).exp()
    batch = Corrected(
        token_ids=torch.ones(mask.shape, dtype=torch.int64),
        lengths=lengths,
        mask=mask,
        logp_behav=logp_behav,
        rewards=rewards,
        accuracies=rewards.clone(),
        group=torch.arange(num_rows) // group_size,
        problem_ids=[problem_ids[row // group_size % len(problem_ids)] for row in range(num_rows)],
        temperature=config.sampling.temperature,
        logp_prox=logp_prox,
        logp_ref=logp_prox.clone(),
        values=torch.zeros_like(mask),
        entropy=torch.ones_like(mask) * mask,
        has_prox=torch.ones(num_rows, dtype=torch.bool),
        weight=weight,
        shrink=torch.ones_like(mask),
    )
    return batch.to(pick_device(config.device))
