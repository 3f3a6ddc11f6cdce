"""One step of AdamW on FP32 weights, with moments in 8 bits or in FP32.

    g = clip gradient;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2

    w = (1 - lr decay) w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

Between steps m and v are floats with 3 bits of mantissa, eight per octave, in blocks of 256:

    rank = (bits of |x| as FP32 + noise) >> 20;   top = the largest rank of the block
    code = max(0, rank - top + 127) of m, with its sign;   max(0, rank - top + 255) of v

Noise is uniform in [0, 2^20), so the expectation of what is stored is x. Without it v would stand
still: at beta2 = 0.999 a step changes it by less than half of what separates two codes. The noise
is a hash of step and position, so a resumed run repeats it, and so do ranks that share a weight.

Codes of m reach 16 octaves below the largest of the block, those of v 32. An m below that is 0, and
a v below that is raised to the smallest code, so that a lost v cannot blow up the update.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

BLOCK = 256
SHIFT = 20
"""Bits of an FP32 mantissa that a code drops."""
M_LARGEST, V_LARGEST = 127, 255
MASK = 2**32 - 1
Word = TypeVar("Word", int, Tensor)


class Update(NamedTuple):
    """The numbers of one update, as kernels take them."""

    clip: float
    beta1: float
    rest1: float
    """1 - beta1, rounded once."""
    beta2: float
    rest2: float
    keep: float
    """What decay leaves of a weight."""
    rate: float
    """The learning rate over the bias correction of m."""
    correction: float
    """1 over the bias correction of v."""
    eps: float
    seed: int
    first: int
    """Where the numbers at hand begin in their weight."""

    @classmethod
    def of(cls, group: dict[str, Any], step: int, clip: float, first: int = 0) -> Update:
        """The numbers for a parameter group; `step` counts its updates from 1."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        keep, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
        seed = scramble(step) >> 1  # an INT32
        moving = (beta1, 1 - beta1, beta2, 1 - beta2)
        return cls(clip, *moving, keep, rate, 1 / (1 - beta2**step), group["eps"], seed, first)


def make_moments(parameter: Tensor, *, is_coded: bool) -> dict[str, Tensor]:
    """Moments that are 0, shared among ranks as their parameter is."""
    if not is_coded:
        return {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
    codes = {"m": torch.zeros_like(parameter, dtype=torch.int8)}
    codes["v"] = torch.zeros_like(parameter, dtype=torch.uint8)
    return codes | {name: _make_tops(codes["m"]) for name in ("m_top", "v_top")}


def _make_tops(codes: Tensor) -> Tensor:
    """[rows, blocks of a row], or [blocks] if a block has numbers of two rows."""
    width, total = codes.shape[-1], codes.numel()
    if total % BLOCK:
        return codes.new_zeros(-(-total // BLOCK), dtype=torch.int16)
    whole = codes.view(-1, BLOCK)[:, 0] if width % BLOCK else codes[..., : width // BLOCK]
    return torch.zeros_like(whole, dtype=torch.int16, memory_format=torch.contiguous_format)


def update_(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    m_top: Tensor | None = None,
    v_top: Tensor | None = None,
    *,
    update: Update,
) -> None:
    """One step in place; without tops the moments are FP32. GPUs have a kernel for it."""
    g = _blocks(gradient) * update.clip
    old_m = _blocks(m) if m_top is None else decode_m(_blocks(m), m_top.flatten())
    old_v = _blocks(v) if v_top is None else decode_v(_blocks(v), v_top.flatten())
    new_m = old_m * update.beta1 + g * update.rest1
    new_v = old_v * update.beta2 + g * g * update.rest2
    step = new_m * update.rate / ((new_v * update.correction).sqrt() + update.eps)
    _write_(weight, _blocks(weight) * update.keep - step)
    if m_top is not None and v_top is not None:
        noise = make_noise(g.numel(), update.seed, update.first).view(g.shape)
        new_m, new_m_top = encode_m(new_m, noise)
        new_v, new_v_top = encode_v(new_v, noise)
        m_top.copy_(new_m_top.view_as(m_top))
        v_top.copy_(new_v_top.view_as(v_top))
    _write_(m, new_m)
    _write_(v, new_v)


def encode_m(m: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, 256] and tops [blocks], with the lower bits of the noise."""
    codes, top = _encode(m, noise & (2**SHIFT - 1), M_LARGEST)
    return torch.where(m < 0, -codes, codes), top


def encode_v(v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The same with the upper bits."""
    return _encode(v, noise >> (32 - SHIFT), V_LARGEST)


def decode_m(codes: Tensor, top: Tensor) -> Tensor:
    return _decode(codes.abs(), top, M_LARGEST) * codes.sign()


def decode_v(codes: Tensor, top: Tensor) -> Tensor:
    return _decode(codes, top, V_LARGEST)


def _encode(x: Tensor, noise: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    ranks = (x.abs().view(torch.int32) + noise.int()) >> SHIFT
    top = ranks.amax(-1)
    return (ranks - top[:, None] + largest).clamp_min(0), top


def _decode(codes: Tensor, top: Tensor, largest: int) -> Tensor:
    ranks = (codes.int() + top[:, None] - largest).clamp_min(0)
    return (ranks << SHIFT).view(torch.float32)


def make_noise(count: int, seed: int, first: int = 0) -> Tensor:
    """32 random bits for each of `count` positions from `first` on, as INT64."""
    return scramble((torch.arange(first, first + count) & MASK) ^ seed)


def scramble(word: Word) -> Word:
    """The finalizer of MurmurHash3: 32 bits in, 32 bits out, one to one."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B & MASK
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & MASK
    return word ^ (word >> 16)


def _blocks(values: Tensor) -> Tensor:
    """[blocks, 256], the last block filled up with zeros."""
    flat = values.flatten()
    return nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _write_(target: Tensor, blocks: Tensor) -> None:
    target.copy_(blocks.flatten()[: target.numel()].view_as(target))
