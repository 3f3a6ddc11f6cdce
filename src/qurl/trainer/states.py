"""What all optimizers hold: parameters, and a state of each."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """What an optimizer trains, in the order of the indices in its `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_uncast_(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """As `Optimizer` does, but without casting states to the dtype of the weights."""
    Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, parameter in zip(ids, parameters_of(optimizer), strict=True):
        optimizer.state[parameter] = {
            name: int(value) if name == "step" else value.to(parameter.device)
            for name, value in state_dict["state"].get(i, {}).items()
        }
