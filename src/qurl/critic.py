"""The value model of PPO: the policy's backbone with a scalar head."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from qurl.policy import Policy, autocast, disable_dropout_
from qurl.types import Batch


class Critic(nn.Module):
    """V(s_t): the expected return before token t is chosen."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.backbone: nn.Module = copy.deepcopy(policy.model.base_model)  # type: ignore[assignment]
        self.head = nn.Linear(policy.model.config.hidden_size, 1)  # type: ignore[union-attr]
        # A fresh critic says 0 everywhere, so that the first advantages are the returns.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.compute_dtype = policy.compute_dtype
        self.to(policy.device)
        disable_dropout_(self)

    def forward(self, batch: Batch) -> Tensor:
        """[B, T], aligned with the tokens: the value of t is read at t - 1, which predicts it."""
        with autocast(batch.token_ids.device, self.compute_dtype):
            states = self.backbone(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        values = self.head(states[:, :-1].float()).squeeze(-1)  # [B, T - 1]
        return torch.cat([torch.zeros_like(values[:, :1]), values], -1) * batch.mask
