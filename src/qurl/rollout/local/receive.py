"""Takes a shipment into the engine's buffers, and reads all of it back.

A sync from the trainer's model shares memory with it (`sync`). A shipment comes from elsewhere, so
embedding, norms and head get buffers of the engine's own. All buffers are allocated once: CUDA
graphs know their addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qurl.errors import SyncError
from qurl.quant import Quantized
from qurl.quant.shipment import Packing, Shipment, checksums, mismatches
from qurl.rollout.local.architecture import NORMS
from qurl.rollout.local.weights import Weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Receiver:
    """Keeps an engine's weights in step with shipments."""

    def __init__(self, model: Any, weights: Weights, full_layers: int) -> None:
        """`model` names the weights, and may have none."""
        self._model, self._weights = model, weights
        # The residual stream starts unrounded, so the embedding comes as the trainer has it.
        kept = ("norm.weight", EMBEDDING)
        self.packing = Packing(
            weights.dtype, weights.format, True, weights.compute_dtype, False, kept, full_layers
        )
        self._targets: dict[str, Tensor] = {}
        self._codes: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._sums: dict[str, list[int]] = {}
        """Dtypes and checksums of what arrived."""
        self._has_loaded = False

    @torch.no_grad()
    def load_(self, shipment: Shipment) -> float:
        """Write all weights; returns the share of codes that changed, 0 the first time."""
        if not self._targets:
            self._plan()
        self._sums, self._dtypes, weights = {}, {}, self._weights
        flips, num_codes = torch.zeros((), dtype=torch.int64, device=weights.device), 0
        for chunk in shipment.pack(self.packing):
            self._sums |= checksums(chunk)
            num_codes += sum(x.numel() for name, x in chunk.items() if name in self._codes)
            # No name here for a tensor: it would outlive the chunk, which may be lent.
            flips += sum(self._write(name, x) for name, x in chunk.items())
        if HEAD not in self._sums and EMBEDDING in self._sums:  # it is tied
            head = {HEAD: self._targets[EMBEDDING].to(weights.dtype)}
            self._sums |= checksums(head)
            self._write(HEAD, head[HEAD])
        if missing := self._targets.keys() - self._sums.keys():
            raise SyncError(f"the shipment lacks {', '.join(sorted(missing)[:3])}")
        weights.embedding, weights.lm_head = self._targets[EMBEDDING], self._targets[HEAD]
        had_loaded, self._has_loaded = self._has_loaded, True
        return int(flips) / max(1, num_codes) if had_loaded else 0.0

    @torch.no_grad()
    def check(self, version: int) -> None:
        """Compare every weight in the engine with what arrived."""
        kept = {name: self._targets[name].to(dtype) for name, dtype in self._dtypes.items()}
        if wrong := mismatches(kept, self._sums):
            raise SyncError(
                f"sync of version {version} failed: {', '.join(wrong[:3])} in the engine "
                f"{'is' if len(wrong) == 1 else 'are'} not what was shipped"
            )

    def _write(self, name: str, tensor: Tensor) -> Tensor | int:
        """Returns how many codes have changed."""
        target = self._targets.get(name)
        if name in (EMBEDDING, HEAD) and target is None:
            dtype = tensor.dtype if name == EMBEDDING else self._weights.dtype
            target = torch.empty(tensor.shape, dtype=dtype, device=self._weights.device)
            self._targets[name] = target
        if target is None or target.shape != tensor.shape:
            has = "nothing" if target is None else f"{list(target.shape)}"
            raise SyncError(f"the engine has {has} for {name} {list(tensor.shape)}")
        # Compared as numbers: a zero that changes its sign is no flip.
        is_coded, arrived = name in self._codes, tensor.to(target.device)
        flips = (target.float() != arrived.float()).sum() if is_coded else 0
        target.copy_(arrived)
        self._dtypes[name] = tensor.dtype
        return flips

    def _plan(self) -> None:
        """Where each weight goes; embedding and head follow when they arrive."""
        weights, body = self._weights, self._model.model
        for index, (layer, source) in enumerate(zip(weights.layers, body.layers, strict=True)):
            for path, module in source.named_modules():
                name, kind = f"model.layers.{index}.{path}", path.rpartition(".")[2]
                if kind in NORMS:
                    layer.norms[kind] = self._allocate_norm(f"{name}.weight", module)
                if kind not in layer.views:
                    continue
                stored, bias = layer.views[kind].weight, layer.views[kind].bias
                if isinstance(stored, Quantized):
                    self._targets[f"{name}.weight_scale"] = stored.scale
                    self._codes.add(f"{name}.weight")
                    stored = stored.codes
                self._targets[f"{name}.weight"] = stored
                if bias is not None and module.bias is not None:
                    self._targets[f"{name}.bias"] = bias
        weights.norm = self._allocate_norm("model.norm.weight", body.norm)

    def _allocate_norm(self, name: str, module: Any) -> Tensor:
        buffer = torch.empty(module.weight.shape, dtype=torch.float32, device=self._weights.device)
        self._targets[name] = buffer
        return buffer
