"""FSDP2 on the models of a learner: each rank keeps its share of the rows of every weight."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from qurl.trainer.learner import Learner
from qurl.trainer.policy import Policy, decoder_layers
from qurl.trainer.ranks import Ranks
from qurl.trainer.unified import code_shards_


def shard_(learner: Learner, ranks: Ranks) -> None:
    """Make a whole learner, the same on all ranks, this rank's share of it.

    All that acts on whole weights comes before: the checks of a policy, UAQ and dither. Optimizers
    are made anew, because sharding replaces parameters.
    """
    mesh = init_device_mesh(learner.policy.device.type, (ranks.size,))
    shard_model_(learner.policy.scorer, mesh)
    if isinstance(learner.reference, Policy):
        shard_model_(learner.reference.scorer, mesh)
    if learner.critic is not None:
        shard_model_(learner.critic, mesh)
    learner.ranks = ranks
    learner.build_optimizers_()


def shard_model_(root: nn.Module, mesh: Any) -> None:
    """Shard the decoder layers below `root` one by one, and what is left with `root`.

    The loss is divided by the mini-batch of all ranks, so gradients are added up over ranks, and
    not averaged. Nothing stays gathered after a forward: the parameters that others see are shards.
    """
    model = next(module for module in root.children() if len(decoder_layers(module)))
    code_shards_(model, mesh.size())
    for module in (*decoder_layers(model), root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
