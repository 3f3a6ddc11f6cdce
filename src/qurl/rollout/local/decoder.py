"""The forward pass of the Llama family, on packed tokens and on paged keys and values.

One code path for CPU and GPU. The residual stream, norms and rotations are FP32; matrices multiply
in the weights' dtype. `rms_norm`, `rotate`, `attend_prompts`, `attend_pages` and `swiglu` are plain
functions, and with `qurl.quant.linear` they are the seams for faster kernels.

A row's result does not depend on the other rows. On the CPU this takes two precautions, both
measured: the number of rows is a multiple of `ROWS` (others may take other GEMM paths), and that of
the keys a multiple of `KEYS` (so that the vectorised softmax has no remainder).

Shapes: N packed tokens, B sequences, H heads, D head_dim, P pages of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl.rollout.local.weights import Layer, Projection, Weights

ROWS = 8
KEYS = 16


@dataclass(frozen=True)
class Rotations:
    """cos and sin of every position: looked up, so that they cannot depend on the batch."""

    cos: Tensor  # [positions, D / 2]
    sin: Tensor  # [positions, D / 2]

    @staticmethod
    def up_to(length: int, weights: Weights) -> Rotations:
        length = -(-length // 1024) * 1024
        angles = torch.arange(length, device=weights.device).float()[:, None] * weights.inv_freq
        return Rotations(angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale)

    def __len__(self) -> int:
        return self.cos.shape[0]


def prefill(
    weights: Weights,
    rotations: Rotations,
    prompts: Sequence[Sequence[int]],
    kv: Tensor | None = None,
    tables: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Final hidden states [N, hidden] of packed prompts; with `kv`, fills the pages of `tables`."""
    lengths = [len(p) for p in prompts]
    tokens = _pad(torch.tensor([t for p in prompts for t in p]), ROWS).to(weights.device)
    positions = _pad(torch.cat([torch.arange(n) for n in lengths]), ROWS).to(weights.device)
    slots = None
    if kv is not None:
        page_size = kv.shape[3]
        pages = [t[i // page_size] for t, n in zip(tables, lengths, strict=True) for i in range(n)]
        slots = _pad(torch.tensor(pages), ROWS).to(weights.device) * page_size
        slots = slots + positions % page_size
    x = weights.embedding[tokens].float()
    for index, layer in enumerate(weights.layers):
        q, k, v = _project_qkv(weights, rotations, layer, x, positions)
        if kv is not None and slots is not None:
            write_pages_(kv[index], k, v, slots)
        x = x + layer.o(attend_prompts(q, k, v, lengths, layer.window))
        x = x + _mlp(weights, layer, x)
    return x[: sum(lengths)]


def decode(
    weights: Weights,
    rotations: Rotations,
    kv: Tensor,
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
) -> Tensor:
    """Logits [B, V] after one token [B] per sequence at positions [B], with pages table [B, P].

    Writes the tokens' keys and values. B must be a multiple of ROWS; a padding row is position 0
    of the scratch page.
    """
    page_size = kv.shape[3]
    last_page = table.gather(1, (positions // page_size)[:, None]).squeeze(1)
    slots = last_page * page_size + positions % page_size
    x = weights.embedding[tokens].float()
    for index, layer in enumerate(weights.layers):
        q, k, v = _project_qkv(weights, rotations, layer, x, positions)
        write_pages_(kv[index], k, v, slots)
        x = x + layer.o(attend_pages(q, kv[index], table, positions, layer.window))
        x = x + _mlp(weights, layer, x)
    return to_logits(weights, x)


def to_logits(weights: Weights, x: Tensor) -> Tensor:
    """FP32 logits [N, V] of final hidden states."""
    x = rms_norm(x, weights.norm, weights.arch.norm_eps).to(weights.dtype)
    return F.linear(x, weights.lm_head).float()


def table_width(num_pages: int, page_size: int) -> int:
    """Columns of a page table whose number of keys is a multiple of KEYS."""
    step = KEYS // math.gcd(KEYS, page_size)
    return -(-num_pages // step) * step


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in FP32."""
    x = x.float()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, D]; dimension i turns with i + D / 2."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def attend_prompts(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None
) -> Tensor:
    """Causal attention within each prompt: q [N, H, D], k and v [N, H_kv, D] to [N, H * D]."""
    out = torch.zeros_like(q)
    start = 0
    for length in lengths:
        rows = slice(start, start := start + length)
        mask = _causal_mask(length, window, q.device) if window and window < length else None
        out[rows] = F.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1)[None] for x in (q, k, v)),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out.flatten(1)


def attend_pages(
    q: Tensor, kv: Tensor, table: Tensor, positions: Tensor, window: int | None
) -> Tensor:
    """One query per sequence, q [B, H, D], over its pages of kv [2, pages, size, H_kv, D]."""
    pages = (x.index_select(0, table.flatten()) for x in kv)
    keys, values = (
        x.unflatten(0, table.shape).flatten(1, 2).transpose(1, 2) for x in pages
    )  # [B, H_kv, keys, D]
    at = torch.arange(keys.shape[2], device=q.device)
    visible = at <= positions[:, None]
    if window is not None:
        visible &= at > positions[:, None] - window
    out = F.scaled_dot_product_attention(
        q[:, :, None], keys, values, attn_mask=visible[:, None, None], enable_gqa=True
    )
    return out.flatten(1)


def write_pages_(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store k and v [N, H_kv, D] at flat slots [N] = page * page_size + offset."""
    for target, source in zip(kv, (k, v), strict=True):
        target.flatten(0, 1)[slots] = source


def _project_qkv(
    weights: Weights, rotations: Rotations, layer: Layer, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    arch, norms = weights.arch, layer.norms
    h = rms_norm(x, norms["input_layernorm"], arch.norm_eps).to(weights.dtype)
    heads = _project(layer.qkv, h).unflatten(-1, (-1, arch.head_dim))
    q, k, v = heads.split((arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), 1)
    if "q_norm" in norms:
        q = rms_norm(q, norms["q_norm"], arch.norm_eps)
        k = rms_norm(k, norms["k_norm"], arch.norm_eps)
    cos, sin = rotations.cos[positions], rotations.sin[positions]
    return rotate(q, cos, sin).to(weights.dtype), rotate(k, cos, sin).to(weights.dtype), v


def _mlp(weights: Weights, layer: Layer, x: Tensor) -> Tensor:
    norm = layer.norms["post_attention_layernorm"]
    h = rms_norm(x, norm, weights.arch.norm_eps).to(weights.dtype)
    return layer.down(swiglu(_project(layer.gate_up, h)))


def _project(projections: Sequence[Projection], x: Tensor) -> Tensor:
    return torch.cat([p(x) for p in projections], -1) if len(projections) > 1 else projections[0](x)


def _causal_mask(length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    return (at <= at[:, None]) & (at > at[:, None] - window)


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Zeros up to the next multiple; token 0 at position 0, or slot 0 of the scratch page."""
    return F.pad(x, (0, -x.shape[0] % multiple))
