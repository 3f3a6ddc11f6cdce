"""The weights of sharded learners on their way to engines.

    rows of a rank  ──round, quantize──▶  codes, scales  ──all-gather──▶  whole, layer by layer

Rows have scales of their own, so the codes of shards are rows of the codes of the whole, and ranks
exchange half the bytes of BF16. Formats with tiles are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from qurl.quant.formats import Format, quantize
from qurl.quant.kv import KVRounding
from qurl.quant.linear import full_precision
from qurl.quant.shipment import Chunk, Packing, as_saved, bucket, find_weight, names_by_layer
from qurl.trainer.coded import own_rows
from qurl.trainer.packing import BatchLayout, Packed
from qurl.trainer.parallel.processes import Post
from qurl.trainer.policy import Policy
from qurl.trainer.unified import UnifiedLinear


class ShardShipment:
    """The weights of all ranks, as one of them sends them to an engine."""

    def __init__(self, post: Post, run: Callable[..., Any]) -> None:
        """`run(function, *arguments)` calls `function(post, *arguments)` on all ranks."""
        self._post, self._run = post, run
        self.dtype = post.learner.policy.compute_dtype

    @classmethod
    def alike(cls, post: Post) -> ShardShipment:
        """For an engine of each rank: all ranks use theirs alike, at the same time."""
        return cls(post, lambda function, *arguments: function(post, *arguments))

    def pack(self, packing: Packing) -> Iterator[Chunk]:
        layers = names_by_layer(self._post.learner.policy.model, packing.unties)
        return bucket(self._run(pack_layer, names, packing) for names in layers)

    def score(self, token_ids: Sequence[int], quant: str) -> Tensor:
        return self._run(score_canary, list(token_ids), quant)


@torch.no_grad()
def pack_layer(post: Post, names: Sequence[str], packing: Packing) -> Chunk:
    """These weights, whole on every rank, as an engine wants them."""
    model = post.learner.policy.model
    coded = packing.coded_names(model)
    packed = Chunk()
    for name in names:
        weight, is_coded = find_weight(model, name).detach(), name in coded
        format = packing.format if is_coded and packing.sends_codes else None
        if isinstance(weight, DTensor) and format is not None and format.block is None:
            packed |= _code_rows(name, weight, format, packing.compute_dtype or packing.dtype)
            continue
        saved = as_saved(model, {name: gather(weight)})
        for part, whole in saved.items():
            packed |= packing.pack_one(part, whole, is_coded)
    return packed


def gather(weight: Tensor) -> Tensor:
    """The whole of a weight that may be sharded."""
    if not isinstance(weight, DTensor):
        return weight
    return _join(own_rows(weight), weight)


def _code_rows(name: str, weight: DTensor, format: Format, dtype: torch.dtype) -> Chunk:
    """Codes and scales of a whole weight; each rank codes its rows."""
    own = quantize(own_rows(weight).to(dtype), format)
    codes = _join(own.codes.view(torch.uint8), weight).view(format.dtype)
    return Chunk({name: codes, f"{name}_scale": _join(own.scale, weight)})


def _join(rows: Tensor, like: DTensor) -> Tensor:
    """Rows of all ranks, which are shared among them like those of another tensor."""
    shape = torch.Size((like.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    placed = (like.device_mesh, [Shard(0)])
    return DTensor.from_local(rows, *placed, shape=shape, stride=stride).full_tensor()


@torch.no_grad()
def gather_whole(post: Post) -> None:
    """Write the whole weights into the copy of rank 0, one after the other."""
    whole = post.held["whole"].model if post.ranks.rank == 0 else None
    targets = {} if whole is None else dict(whole.named_parameters())
    for name, parameter in post.learner.policy.model.named_parameters():
        found = gather(parameter.detach())
        if targets:
            targets[name].copy_(found)


def score_canary(post: Post, token_ids: list[int], quant: str) -> Tensor:
    """Log-probs [T - 1] of tokens 1.. under the policy; for engines that do not quantize, in full
    precision."""
    policy = post.learner.policy
    is_coded = any(isinstance(m, UnifiedLinear) for m in policy.model.modules())
    if quant != "none" or not is_coded:
        return _score(policy, token_ids, quant)
    gather_whole(post)  # ranks gather codes, and nobody has all masters
    is_first = post.ranks.rank == 0
    logp = _score(post.held["whole"], token_ids, quant) if is_first else torch.empty(0)
    return post.ranks.pool(logp)[0]


@torch.no_grad()
def _score(policy: Policy, token_ids: list[int], quant: str) -> Tensor:
    """Keys and values are not rounded: their scales may be those of an earlier sync."""
    ids = torch.tensor([token_ids], device=policy.device)
    options = Packed.of(ids, [len(token_ids)]).options if policy.is_packed else {}
    scored = torch.arange(1, len(token_ids), device=policy.device)
    layout = BatchLayout(ids, options, scored, scored, (1, len(token_ids)))
    plain = full_precision(policy.model) if quant == "none" else nullcontext()
    with plain, full_precision(policy.model, KVRounding):
        logp, _ = policy.scorer(layout, 1.0, False)
    return logp.cpu()
