"""hAdam, which is AdamW with h = sqrt(v), and compound loss scaling: moments that FP16 can hold.

    g = S gradient;   m = b1 m + (1 - b1) g;   h = hypot(sqrt(b2) h, sqrt(1 - b2) |g|)

    w = (1 - lr decay) w - lr m / (1 - b1^t) / (h / sqrt(1 - b2^t) + S eps)

    hypot(a, b) = max sqrt(1 + (min / max)^2)

In exact arithmetic this is AdamW, whatever the scale S. In FP16 a gradient of 1e-5 has a square of
1e-10, which is 0 there, so AdamW divides by eps; h is 3e-7, which is not 0. S keeps m and h in the
middle of FP16's range. A scaled gradient that FP16 cannot hold halves S, m and h. After 10,000
updates without one they are doubled, if they stay finite.

The arithmetic is that of the gradients: FP32 in a run, also with moments in FP16. h in FP16 is
rounded to 11 bits, and at b2 = 0.999 a step changes it by less: gradients of constant variance give
an h that is 1 % too small after 1,000 steps and 3 to 4 % after 4,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qurl.trainer.masters import store_, widen
from qurl.trainer.states import load_uncast_, parameters_of

FIRST_SCALE = 1e4
COUNTED = ("scale", "good_steps")
"""What the groups hold besides settings."""
GROW_AFTER = 10_000
"""Updates without an overflow after which S doubles."""
MARGIN = 1.1
SMALLEST_EPS = 1e-7
"""FP16's smallest number is 6e-8."""


def hypot(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(a^2 + b^2) of numbers that are not negative, without squares that under- or overflow."""
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / torch.where(large > 0, large, 1.0)
    return large * (1 + ratio * ratio).sqrt()


class HAdam(Optimizer):
    """AdamW with m and h in the dtype of `moments`; FP16 ones are those of scaled gradients.

    Masters may be FP32 or split (`qurl.trainer.masters`).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        moments: torch.dtype = torch.float32,
    ) -> None:
        is_scaled = moments == torch.float16
        # In the groups, so that they are saved; all groups have the same.
        shared = dict(zip(COUNTED, (FIRST_SCALE if is_scaled else 1.0, 0), strict=True))
        defaults = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, **shared}
        super().__init__(groups, defaults)
        self.moments, self.is_scaled = moments, is_scaled

    @property
    def scale(self) -> float:
        """S, by which a loss may be multiplied. `step` then takes clip = 1 / S."""
        return self.param_groups[0]["scale"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, clip: float = 1.0) -> bool:
        """Update with the gradients times `clip`; False if they were not finite, and S is halved.

        Gradients are checked only if they are scaled.
        """
        assert closure is None
        if self.is_scaled and not self._fit_scale(clip):
            return False
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, clip * self.scale)
        if self.is_scaled:
            self._count_step()
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_uncast_(self, state_dict)

    def _update(self, parameter: Tensor, group: dict[str, Any], factor: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "step" not in state:
            zeros = torch.zeros_like(parameter, dtype=self.moments)
            state.update(step=0, m=zeros, h=zeros.clone())
        state["step"] += 1
        (beta1, beta2), step = group["betas"], state["step"]
        g = gradient * factor
        m = state["m"].to(g.dtype) * beta1 + g * (1 - beta1)
        h = hypot(state["h"].to(g.dtype) * math.sqrt(beta2), g.abs() * math.sqrt(1 - beta2))
        state["m"].copy_(m)
        state["h"].copy_(h)
        eps = max(group["eps"] * self.scale, SMALLEST_EPS if self.is_scaled else 0.0)
        direction = m / (1 - beta1**step) / (h / math.sqrt(1 - beta2**step) + eps)
        self._move(parameter, direction, group)

    def _move(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        state, lr = self.state[parameter], group["lr"]
        master = widen(parameter, state)
        master.mul_(1 - lr * group["weight_decay"]).sub_(lr * direction)
        store_(parameter, state, master)

    def _fit_scale(self, clip: float) -> bool:
        """Halve S until the moments can hold the scaled gradients; False if nothing could."""
        gradients = [p.grad for p in parameters_of(self) if p.grad is not None]
        largest = float(torch.stack(torch._foreach_norm(gradients, math.inf)).max()) * clip
        if not math.isfinite(largest):
            self._rescale(0.5)
            return False
        beta1, beta2 = self.param_groups[0]["betas"]
        limit = torch.finfo(self.moments).max / (MARGIN * max(1.0, beta1 / math.sqrt(beta2)))
        while largest * self.scale > limit:
            self._rescale(0.5)
        return True

    def _count_step(self) -> None:
        for group in self.param_groups:
            group["good_steps"] += 1
        if self.param_groups[0]["good_steps"] < GROW_AFTER:
            return
        buffers = [state[name] for state in self.state.values() for name in ("m", "h")]
        largest = float(torch.stack(torch._foreach_norm(buffers, math.inf)).max())
        can_grow = MARGIN * 2 * largest < torch.finfo(self.moments).max
        self._rescale(2.0 if can_grow else 1.0)  # either way the count begins anew

    def _rescale(self, factor: float) -> None:
        """Multiply S, m and h; eps follows S."""
        for group in self.param_groups:
            group["scale"] *= factor
            group["good_steps"] = 0
        for state in self.state.values():
            for name in ("m", "h"):
                if name in state:
                    state[name].mul_(factor)
