"""The decoder's operations on torch primitives: the CPU's path, and the reference for the kernels.

With one thread a row's result does not depend on the other rows: their number is a multiple of ROWS
(others may take other GEMM paths), and that of keys one of KEYS (so that the vectorised softmax has
no remainder). With more threads the last bits depend on the thread that computes a row.

Shapes: N packed tokens, B sequences, H heads, D head_dim, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl.ops.attention import attend_dense, window_mask
from qurl.quant import Quantized
from qurl.quant.formats import quantize_activation
from qurl.quant.kv import code_kv, decode_kv
from qurl.quant.linear import Operand, Product, finish, linear, multiply
from qurl.rollout.local.ops import LayerCache
from qurl.rollout.local.weights import Layer, Projection, Weights
from qurl.rollout.sampler import RowParams, sample, uniform

ROWS = 8
KEYS = 16


class ReferenceOps:
    """Torch primitives. The residual stream, norms and rotations are FP32."""

    row_multiple = ROWS

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.arch, self.dtype = weights.arch, weights.dtype

    def begin(
        self, tokens: Tensor, positions: Tensor, table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        last_page = table.gather(1, (positions // page_size)[:, None]).squeeze(1)
        slots = last_page * page_size + positions % page_size
        return self.weights.embedding[tokens].float(), slots

    def input_norm(self, layer: Layer, x: Tensor, delta: Product | None) -> Operand:
        return self._operand(self._add_norm(x, delta, layer.norms["input_layernorm"]), layer)

    def final_norm(self, x: Tensor, delta: Product | None) -> Tensor:
        return self._add_norm(x, delta, self.weights.norm).to(self.dtype)

    def project(self, projections: Sequence[Projection], h: Operand) -> Product:
        products = [self._project(p, h) for p in projections]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def rotate(
        self, qkv: Product, layer: Layer, positions: Tensor, cache: LayerCache | None, keep_kv: bool
    ) -> tuple[Tensor, ...]:
        arch, norms = self.arch, layer.norms
        heads = finish(qkv).unflatten(-1, (-1, arch.head_dim))
        q, k, v = heads.split((arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), 1)
        if "q_norm" in norms:
            q = rms_norm(q, norms["q_norm"], arch.norm_eps)
            k = rms_norm(k, norms["k_norm"], arch.norm_eps)
        cos, sin = self.weights.cos[positions], self.weights.sin[positions]
        q, k = rotate(q, cos, sin).to(self.dtype), rotate(k, cos, sin).to(self.dtype)
        if cache is not None and cache.slots is not None:
            k, v = write_pages_(cache, k, v, cache.slots)
        return (q, k, v) if keep_kv else (q,)

    def attend_prompts(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]
    ) -> Operand:
        return self._operand(attend_prompts(q, k, v, lengths, layer.window), layer)

    def attend_pages(
        self, layer: Layer, q: Tensor, cache: LayerCache, table: Tensor, positions: Tensor
    ) -> Operand:
        return self._operand(attend_pages(q, cache, table, positions, layer.window), layer)

    def mlp(self, layer: Layer, x: Tensor, delta: Product) -> Product:
        h = self._add_norm(x, delta, layer.norms["post_attention_layernorm"])
        h = self._operand(h, layer)
        y = finish(self.project(layer.gate_up, h)).float()
        gate, up = (
            y.unflatten(-1, (-1, 2)).unbind(-1) if layer.has_alternating_gate else y.chunk(2, -1)
        )
        # Contiguous: torch's exp has other last bits for numbers that lie apart.
        h = self._operand((F.silu(gate.contiguous()) * up).to(self.dtype), layer)
        return self.project((layer.down,), h)

    def head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weights.lm_head).float()

    def sample(
        self, logits: Tensor, keys: Tensor, counters: Tensor, params: RowParams
    ) -> tuple[Tensor, Tensor]:
        return sample(logits, uniform(keys, counters), params)

    def _project(self, projection: Projection, h: Operand) -> Tensor:
        weight, bias = projection.weight, projection.bias
        if isinstance(h, Quantized):
            assert isinstance(weight, Quantized)
            return multiply(h, weight, bias, self.dtype)
        is_coded = isinstance(weight, Quantized)
        y = linear(h, weight, bias) if is_coded else F.linear(h, weight, bias)
        return y if projection.adapter is None else projection.adapter.add_(y, h)

    def _add_norm(self, x: Tensor, delta: Product | None, norm: Tensor) -> Tensor:
        if delta is not None:
            x += finish(delta).float()
        return rms_norm(x, norm, self.arch.norm_eps)

    def _operand(self, x: Tensor, layer: Layer) -> Operand:
        format = layer.format
        return x.to(self.dtype) if format is None else quantize_activation(x, format)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in FP32."""
    x = x.float()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, D]; dimension i turns with i + D / 2."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend_prompts(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None
) -> Tensor:
    """Causal attention within each prompt: q [N, H, D], k and v [N, H_kv, D] to [N, H * D]."""
    out = torch.zeros_like(q)
    start = 0
    for length in lengths:
        rows = slice(start, start := start + length)
        mask = window_mask(length, window, q.device) if window and window < length else None
        heads = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
        out[rows] = attend_dense(*heads, mask, is_causal=mask is None)[0].transpose(0, 1)
    return out.flatten(1)


def attend_pages(
    q: Tensor, cache: LayerCache, table: Tensor, positions: Tensor, window: int | None
) -> Tensor:
    """One query per sequence, q [B, H, D], over its pages, to [B, H * D]."""
    pages = (x.index_select(0, table.flatten()) for x in cache.data)
    keys, values = (
        x.unflatten(0, table.shape).flatten(1, 2).transpose(1, 2) for x in pages
    )  # [B, H_kv, keys, D]
    if cache.scale is not None:
        scales = cache.scale[..., None, None]
        keys, values = map(decode_kv, (keys, values), scales, (q.dtype, q.dtype))
    at = torch.arange(keys.shape[2], device=q.device)
    visible = at <= positions[:, None]
    if window is not None:
        visible &= at > positions[:, None] - window
    out = attend_dense(q[:, :, None], keys, values, visible[:, None, None])
    return out.flatten(1)


def write_pages_(cache: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Store k and v [N, H_kv, D] at flat slots [N] = page * page_size + offset.

    Returns them as the pages give them back.
    """
    targets = [plane.flatten(0, 1) for plane in cache.data]
    if cache.scale is None:
        targets[0][slots], targets[1][slots] = k, v
        return k, v
    k_scale, v_scale = cache.scale[..., None]
    k_codes, v_codes = code_kv(k, k_scale, cache.center), code_kv(v, v_scale)
    targets[0][slots], targets[1][slots] = k_codes, v_codes
    return decode_kv(k_codes, k_scale, k.dtype), decode_kv(v_codes, v_scale, v.dtype)
