"""FSDP2 on the models of a learner: each rank keeps its share of the rows of every weight.

    models in the main memory of rank 0  ──outline──▶  the same modules on every rank, empty
    the weights of one layer there  ──broadcast──▶  on every device  ──fully_shard──▶  a rank's rows

So a device holds whole weights of one layer at a time, and main memory those of rank 0 alone.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from qurl.trainer.coded import own_rows
from qurl.trainer.learner import Learner
from qurl.trainer.packing import register_attention
from qurl.trainer.policy import Policy, Untrained, decoder_layers
from qurl.trainer.ranks import Ranks
from qurl.trainer.unified import code_shards_

Models = tuple[Policy, Policy | Untrained | None]
"""The policy and its reference."""


def outline_models(*models: Policy | Untrained | None) -> bytes:
    """Models without the numbers of their tensors, for other processes."""
    written = io.BytesIO()
    _Outliner(written).dump(models)
    return written.getvalue()


def read_outline(outline: bytes) -> Models:
    """The models of an outline, on the meta device."""
    register_attention()
    return pickle.loads(outline)


class _Outliner(pickle.Pickler):
    """Writes tensors as empty ones, and one that is tied once, as any object."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return NotImplemented
        shape, is_parameter = tuple(item.shape), isinstance(item, nn.Parameter)
        return _make_empty, (shape, item.dtype, is_parameter, item.requires_grad)


def _make_empty(
    shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool, needs_grad: bool
) -> Tensor:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, needs_grad) if is_parameter else empty


def shard_(learner: Learner, ranks: Ranks) -> None:
    """Make a learner, whole on rank 0 and without numbers on the others, each rank's share of it.

    All that acts on whole weights comes before: the checks of a policy, UAQ and dither. Optimizers
    are made anew, because sharding replaces parameters.
    """
    device = learner.policy.device
    mesh = init_device_mesh(device.type, (ranks.size,))
    shard_model_(learner.policy.scorer, mesh, device)
    if isinstance(learner.reference, Policy):
        shard_model_(learner.reference.scorer, mesh, device)
    if learner.critic is not None:
        shard_model_(learner.critic, mesh, device)
    learner.ranks = ranks
    learner.build_optimizers_()


def shard_model_(root: nn.Module, mesh: Any, device: torch.device) -> None:
    """Shard the decoder layers below `root` one by one, and what is left with `root`.

    The loss is divided by the mini-batch of all ranks, so gradients are added up over ranks, and
    not averaged. Nothing stays gathered after a forward: the parameters that others see are shards.
    """
    model = next(module for module in root.children() if len(decoder_layers(module)))
    code_shards_(model, mesh.size())
    for module in (*decoder_layers(model), root):
        _share_(module, device)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _share_(module: nn.Module, device: torch.device) -> None:
    """Put the whole tensors of rank 0 on the device of each rank; what is sharded already stays.

    They are copies, so the memory of rank 0's remains what it is.
    """
    moved: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers, vars(owner)):
            for name, tensor in tensors.items():
                if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                    continue
                if tensor not in moved:
                    moved[tensor] = _share(tensor, device)
                tensors[name] = moved[tensor]  # type: ignore[assignment]


def _share(tensor: Tensor, device: torch.device) -> Tensor:
    whole = tensor.detach()
    if tensor.is_meta:
        whole = torch.empty_like(whole, device=device)
    else:
        whole = whole.to(device, copy=True).contiguous()  # as in an outline
    dist.broadcast(own_rows(whole), src=0)
    return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
