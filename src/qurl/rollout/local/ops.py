"""The operations that the decoder is made of; one set uses torch, one Triton.

A projection takes an `Operand` (numbers, or codes with a scale per token) and gives a `Product`
(finished, or parts that the next operation sums up). On one thread of a CPU and in deterministic
mode a row's result does not depend on the other rows. Otherwise the number of rows may decide how a
GPU splits a sum, and the last bits depend on it.

Shapes: N packed tokens, B sequences, H heads, D head_dim, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qurl.quant.linear import Operand, Product
from qurl.rollout.local.weights import Layer, Projection, Weights
from qurl.rollout.sampler import RowParams


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer."""

    data: Tensor  # [2, pages, page_size, H_kv, D]
    scale: Tensor | None  # [2, H_kv]: value = code * scale, if the cache holds codes
    center: Tensor | None = None  # [H_kv, D]: subtracted from coded keys (`kv_range`)
    slots: Tensor | None = None  # [N] int64, page * page_size + offset: where new ones go


class Ops(Protocol):
    """One implementation of the decoder's operations."""

    row_multiple: int
    """Packed tokens come in multiples of this."""
    weights: Weights

    def begin(
        self, tokens: Tensor, positions: Tensor, table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, hidden] of one token per sequence in FP32, and their slots [B]."""
        ...

    def input_norm(self, layer: Layer, x: Tensor, delta: Product | None) -> Operand:
        """x [N, hidden] += delta, in place; then RMSNorm, as the layer's projections want it."""
        ...

    def project(self, projections: Sequence[Projection], h: Operand) -> Product:
        """h W^T + b; several projections give their outputs side by side."""
        ...

    def rotate(
        self, qkv: Product, layer: Layer, positions: Tensor, cache: LayerCache | None, keep_kv: bool
    ) -> tuple[Tensor, ...]:
        """q [N, H, D], rotated, and with `keep_kv` k and v [N, H_kv, D]; these go to the cache.

        They come back as the cache gives them back: rounded, if it holds codes.
        """
        ...

    def attend_prompts(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]
    ) -> Operand:
        """Causal attention within each packed prompt."""
        ...

    def attend_pages(
        self, layer: Layer, q: Tensor, cache: LayerCache, table: Tensor, positions: Tensor
    ) -> Operand:
        """One query per sequence over its pages table [B, P], up to and with its position."""
        ...

    def mlp(self, layer: Layer, x: Tensor, delta: Product) -> Product:
        """x += delta, in place; norm, gate and up, silu(gate) * up, down."""
        ...

    def final_norm(self, x: Tensor, delta: Product | None) -> Tensor:
        """x += delta, in place; then the last norm, never quantized."""
        ...

    def head(self, h: Tensor) -> Tensor:
        """FP32 logits [N, V]."""
        ...

    def sample(
        self, logits: Tensor, keys: Tensor, counters: Tensor, params: RowParams
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B] and their log-probs [B]."""
        ...
