"""Optimizer states on disk: of one process in one file, of several ranks in a folder of shards.

    optimizer.pt    {"policy": state_dict, "critic": state_dict}, as torch writes them
    optimizer/      the same by name ("policy.model.norm.weight.exp_avg"), in the format of
                    torch.distributed.checkpoint: each rank writes what it holds

Either can be read by any number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as shards
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor, zeros
from torch.optim import Optimizer

from qurl.errors import CheckpointError
from qurl.trainer.hadam import COUNTED
from qurl.trainer.ranks import Ranks
from qurl.trainer.states import parameters_of

FILE, FOLDER = "optimizer.pt", "optimizer"
Optimizers = Mapping[str, tuple[nn.Module, Optimizer]]
"""A model and its optimizer by role, policy or critic."""


def save_optimizers(folder: Path, optimizers: Optimizers, ranks: Ranks) -> None:
    if ranks.size == 1:
        states = {role: optimizer.state_dict() for role, (_, optimizer) in optimizers.items()}
        torch.save(states, folder / FILE)
        return
    tensors: dict[str, Any] = {}
    for role, (model, optimizer) in optimizers.items():
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{role}.{name}.{key}"] = torch.as_tensor(value)  # AdamW8bit counts in int
    with ranks.agreeing(CheckpointError):
        try:
            shards.save(tensors, checkpoint_id=folder / FOLDER, process_group=ranks.control)
        except CheckpointException as error:  # which all ranks raise
            raise CheckpointError(f"{folder / FOLDER} could not be written: {error}") from error


def load_optimizers(folder: Path, optimizers: Optimizers, ranks: Ranks) -> None:
    if (folder / FOLDER).exists():
        states = _read_shards(folder / FOLDER, optimizers, ranks)
    else:
        device = next(optimizers["policy"][0].parameters()).device
        states = load_for(folder / FILE, device, ranks)
    for role, (_, optimizer) in optimizers.items():
        _load(optimizer, states[role])


def load_for(file: Path, device: torch.device, ranks: Ranks) -> Any:
    """What a file holds, on the device; what ranks share stays on the disk until it is read."""
    if ranks.size == 1:
        return torch.load(file, map_location=device, weights_only=True)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load moments and what `HAdam` counts; settings are those of the recipe and the device."""
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        saved |= {name: own[name] for name in own if name not in ("params", *COUNTED)}
    for index, parameter in enumerate(parameters_of(optimizer)):
        found = state["state"].get(index, {})
        for key, value in found.items():
            if isinstance(value, Tensor) and value.dim():
                found[key] = share_of(value, parameter)
    optimizer.load_state_dict(state)


def share_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a tensor that is cut like a parameter."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor):
        return whole
    where = (parameter.device_mesh, parameter.placements)
    return distribute_tensor(whole.to(parameter.device), *where, src_data_rank=None)


def _read_shards(folder: Path, optimizers: Optimizers, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """The states of a folder, as `Optimizer.state_dict` has them."""
    saved: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, found in shards.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        owner, _, key = name.rpartition(".")
        saved[owner][key] = found
    tensors: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for role, (model, optimizer) in optimizers.items():
        names = {parameter: f"{role}.{name}" for name, parameter in model.named_parameters()}
        state: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, found in saved[names[parameter]].items():  # moments, and the number of steps
                value = _empty(found.size, found.properties.dtype, parameter)
                tensors[f"{names[parameter]}.{key}"] = state[index][key] = value
        states[role] = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    try:
        is_alone = ranks.size == 1
        shards.load(tensors, checkpoint_id=folder, process_group=ranks.control, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return states


def _empty(shape: torch.Size, dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """Room for a state, of which a rank holds what it holds of the parameter."""
    if not shape:  # the number of steps
        return torch.zeros(shape, dtype=dtype)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    where = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
    return zeros(shape, dtype=dtype, **where)
