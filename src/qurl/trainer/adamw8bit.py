"""AdamW with moments in 8 bits (`qurl.trainer.moments` has the formulas), or with BF16 masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from qurl.errors import ConfigError
from qurl.quant.tracking import held_rows
from qurl.trainer import moments
from qurl.trainer.coded import own_rows
from qurl.trainer.masters import store_, widen
from qurl.trainer.moments import BLOCK, Update, make_moments
from qurl.trainer.states import load_uncast_

MIN_CODED = 4096
"""Smaller tensors keep FP32 moments, as bitsandbytes advises for them and for embeddings."""
MOMENTS = ("m", "v", "m_top", "v_top")


class AdamW8bit(Optimizer):
    """AdamW whose groups with `is_coded` keep their moments in 8 bits, the others in FP32.

    Masters may be FP32 or split (`qurl.trainer.masters`).
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, clip: float = 1.0) -> None:
        """Update with the gradients times `clip`, which saves a pass over them."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                master = widen(parameter, state)
                if "step" not in state:
                    state.update(step=0, **make_moments(master, is_coded=group["is_coded"]))
                state["step"] += 1
                update = Update.of(group, state["step"], clip, first_of(master))
                tensors = {name: own_rows(state[name]) for name in MOMENTS if name in state}
                if (weight := own_rows(master)).numel():
                    _update_(weight, own_rows(parameter.grad).contiguous(), tensors, update)
                store_(parameter, state, master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_uncast_(self, state_dict)


def find_coded(model: nn.Module) -> set[nn.Parameter]:
    """Parameters whose moments may be coded: large matrices, or stacks of them, but no embeddings.

    Raises if ranks share one whose blocks of moments they would cut.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and weight.numel() >= MIN_CODED and id(weight) not in embeddings:
            found[weight] = name
    for weight, name in found.items():
        if isinstance(weight, DTensor) and _is_cut(weight.shape, weight.device_mesh.size()):
            raise ConfigError(
                f"optim.moments = '8bit' has blocks of {BLOCK} numbers, which {name} with rows of "
                f"{weight.shape[-1]} would cut; use 'fp32', another parallel.trainers, or "
                "parallel.shard = false"
            )
    return set(found)


def _is_cut(shape: torch.Size, num_ranks: int) -> bool:
    """Whether a block has numbers of two ranks."""
    rows, size = shape[0], shape[1:].numel()
    is_split = rows % num_ranks > 0 or rows // num_ranks * size % BLOCK > 0
    return shape[-1] % BLOCK > 0 and is_split


def first_of(weight: Tensor) -> int:
    """Where the rows of this rank begin, in numbers."""
    _, row = held_rows(weight)
    return row * weight.shape[1:].numel()


def _update_(weight: Tensor, gradient: Tensor, tensors: dict[str, Tensor], update: Update) -> None:
    assert weight.dtype == gradient.dtype == torch.float32, "masters and gradients are FP32"
    if weight.is_cuda:
        from qurl.trainer.kernels import adamw8bit

        adamw8bit.update_(weight, gradient, **tensors, update=update)
    else:
        moments.update_(weight, gradient, **tensors, update=update)
