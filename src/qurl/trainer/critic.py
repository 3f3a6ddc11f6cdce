"""The value model of PPO: the policy's backbone with a scalar head."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from qurl.quant.linear import use_full_precision_
from qurl.trainer.packing import BatchLayout
from qurl.trainer.policy import Policy, compile_layers_, disable_dropout_, hidden_states


class Critic(nn.Module):
    """V(s_t): the expected return before token t is chosen."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.backbone: nn.Module = copy.deepcopy(policy.model.base_model)  # type: ignore[assignment]
        use_full_precision_(self.backbone)  # no engine computes values
        self.head = nn.Linear(policy.model.config.hidden_size, 1)  # type: ignore[union-attr]
        # A fresh critic returns 0 everywhere, so the first advantages are the returns.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.compute_dtype = policy.compute_dtype
        self.to(next(policy.model.parameters()).device)
        disable_dropout_(self)
        if policy.is_compiled:  # copying drops the compiled code
            compile_layers_(self.backbone)

    def forward(self, layout: BatchLayout) -> Tensor:
        """Values [B, T] aligned with the tokens: that of t is read at t - 1, which predicts t."""
        states = hidden_states(
            self.backbone, layout.token_ids, self.compute_dtype, **layout.options
        )
        values = layout.spread(self.head(layout.before(states).float()).squeeze(-1))
        return values.clone()  # a view would lose the hook of a sharded critic, if written to
