"""Weights on their way to an engine: named tensors as a saved model has them, in chunks.

Projections go as codes and scales, half the bytes of BF16, or in full precision if the engine
quantizes them itself. Names are those of saved files, since vLLM's loaders know no others:
transformers holds the experts of a layer in two tensors, and saves a matrix for each expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from qurl.quant.formats import Format, quantize
from qurl.quant.linear import quantized_projections

CHUNK_BYTES = 2**30
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class Chunk(dict[str, Tensor]):
    """Named tensors of a shipment, which nobody changes once they are summed up."""

    @cached_property
    def sums(self) -> dict[str, list[int]]:
        """See `checksums`: sums of rows and of columns, weighted by their place and added up.

        For all tensors at once: there are hundreds of them, and on a GPU each operation is a
        launch.
        """
        if not self:
            return {}
        device = next(iter(self.values())).device
        vectors = [x.to(device) for tensor in self.values() for x in _row_and_column_sums(tensor)]
        lengths = torch.tensor([len(x) for x in vectors]).to(device)
        ends, joined = lengths.cumsum(0), torch.cat(vectors)
        starts = torch.repeat_interleave(ends - lengths, lengths, output_size=len(joined))
        places = torch.arange(1, len(joined) + 1, device=device) - starts
        running = torch.cat([joined.new_zeros(1), (joined * places).cumsum(0)])
        sums = running[ends] - running[ends - lengths]
        return dict(zip(self, sums.view(-1, 2).tolist(), strict=True))  # a GPU is waited for once


class Shipment(Protocol):
    """What an engine syncs from if the trainer's model is not at hand as one module."""

    dtype: torch.dtype
    """The dtype in which the trainer multiplies when it scores."""

    def pack(self, packing: Packing) -> Iterator[Chunk]:
        """All weights, each once, as the engine wants them."""
        ...

    def score(self, token_ids: Sequence[int], quant: str) -> Tensor:
        """The trainer's own log-probs [T - 1] of these tokens, as in `qurl.rollout.canary`."""
        ...


@dataclass(frozen=True)
class Packing:
    """How weights are rounded on their way."""

    dtype: torch.dtype
    """The dtype of all that is not coded."""
    format: Format | None = None
    """The format of the engine's projections."""
    sends_codes: bool = False
    """The trainer's side codes them, not the engine."""
    compute_dtype: torch.dtype | None = None
    """The trainer's: what is coded is rounded to it first, so that codes are of what it sees."""
    unties: bool = False
    """Send a head that is tied to the embedding, too."""
    keeps: tuple[str, ...] = ()
    """How names end whose tensors keep the trainer's dtype."""
    full_layers: int = 0
    """Layers at either end whose projections are not coded."""

    @torch.no_grad()
    def pack(self, model: nn.Module) -> Iterator[Chunk]:
        """All weights of a model, in the order of its layers, in chunks of `CHUNK_BYTES` or so."""
        coded = self.coded_names(model)
        weights = saved_weights(model, self.unties)
        return bucket(self.pack_one(name, x.detach(), name in coded) for name, x in weights)

    def coded_names(self, model: nn.Module) -> set[str]:
        """The weights that the engine holds in codes."""
        found = quantized_projections(model, self.full_layers) if self.format else []
        return {f"{name}.weight" for name, _ in found}

    def pack_one(self, name: str, weight: Tensor, is_coded: bool) -> Chunk:
        if is_coded:
            weight = weight.to(self.compute_dtype or self.dtype)
        if is_coded and self.sends_codes and self.format:
            packed = quantize(weight, self.format)
            return Chunk({name: packed.codes, f"{name}_scale": packed.scale})
        is_kept = name.endswith(self.keeps) or not weight.is_floating_point()
        return Chunk({name: weight if is_kept and not is_coded else weight.to(self.dtype)})


def bucket(parts: Iterable[Chunk]) -> Iterator[Chunk]:
    """Parts put together into chunks of `CHUNK_BYTES` or so."""
    chunk, num_bytes = Chunk(), 0
    for part in parts:
        chunk |= part
        num_bytes += sum(tensor.nbytes for tensor in part.values())
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = Chunk(), 0
    if chunk:
        yield chunk


def saved_weights(model: Any, unties: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as a saved model has them: adapters merged, tied weights once."""
    # A layer at a time: merged adapters, and experts that are taken apart, are copies.
    for names in names_by_layer(model, unties):
        yield from as_saved(model, {name: find_weight(model, name) for name in names}).items()


def as_saved(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a layer, with the names and shapes that a saved model has."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, weights)


def names_by_layer(model: nn.Module, unties: bool) -> list[list[str]]:
    """The names of all weights, layer by layer."""
    return [list(names) for _, names in groupby(_names(model, unties), key=_layer_of)]


def find_weight(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _names(model: nn.Module, unties: bool) -> Iterator[str]:
    """Parameters and persistent buffers, by the names that they would have without adapters."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if ".parametrizations" in prefix:
            continue
        dot = prefix and f"{prefix}."
        if is_parametrized(module):
            yield from (f"{dot}{name}" for name in module.parametrizations)  # type: ignore[union-attr]
        buffers = module._buffers.items()
        kept = [(n, b) for n, b in buffers if n not in module._non_persistent_buffers_set]
        for name, tensor in (*module._parameters.items(), *kept):
            if tensor is not None and (unties or id(tensor) not in seen):
                seen.add(id(tensor))
                yield f"{dot}{name}"


def _layer_of(name: str) -> str:
    """The part of a name up to its first number: model.layers.3 of all that is in that layer."""
    return found.group() if (found := re.match(r".*?\.\d+(?=\.)", name)) else ""


def checksums(chunk: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Two sums of each tensor's bits that change if a value, a row or a column does or moves."""
    return (chunk if isinstance(chunk, Chunk) else Chunk(chunk)).sums


def _row_and_column_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    rows = tensor.detach().contiguous().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    # In words of 8 bytes where rows have whole ones: adding up codes byte by byte takes longer.
    width = math.gcd(rows.shape[1] * rows.itemsize, 8)
    is_aligned = rows.storage_offset() * rows.itemsize % width == 0
    words = (rows if is_aligned else rows.clone()).view(_BITS[width])
    return words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)


def mismatches(chunk: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of tensors that are missing, or not those that were summed up."""
    sums = checksums(chunk)
    return [name for name in {**expected, **sums} if sums.get(name) != expected.get(name)]


def save_chunk(chunk: Mapping[str, Tensor], path: Path) -> None:
    copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in chunk.items()}
    # safetensors before 0.8 writes into the file that is there, and who loaded it still maps it.
    path.unlink(missing_ok=True)
    save_file(copies, path)  # it refuses tensors that share memory
