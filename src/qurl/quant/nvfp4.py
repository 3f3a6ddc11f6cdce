"""NVFP4: weights in 4 bits, with two scales.

    g = max|W| / (6 * 448);  a = fp8(max|group| / (6 g));  q = e2m1(w / (a g));  w_hat = q (a g)

E2M1 has the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties go to the even one of two.
A group is 16 input channels of one output channel. Its scale a is a number of FP8 E4M3, g is one
FP32 number for the tensor. A group whose a rounds to 0 is all zeros.

Codes and scales are stored as a product unpacks them (`qurl.quant.kernels.packed`). Scales are
BF16 numbers 2^118 a, so a weight takes 5 bits. Of 32 channels, the codes of i, i + 8, i + 16 and
i + 24 for i and i + 1 (i even, 0 to 6) share a word. From their places (`PLACES`) one rotation or
product and a mask make a pair of BF16 numbers. A thread of a matrix unit needs the words of one i
from all groups, so a block of up to 8 groups stores them side by side.

Shapes: N output channels, K input channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qurl.errors import ModelError

GROUP = 16
"""Input channels under one scale."""
LARGEST = 6.0
SCALE_MAX = 448.0
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What a code stands for, by its three low bits; the fourth is the sign."""
LIFT = 2.0**118
"""Factor of stored scales. A code whose bits are placed in a BF16 number is too small by 2^126; the
factor undoes most of that, and the largest scale, 448, stays finite."""
PLACES = ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3))
"""Bit positions of four codes in a word, each code's sign last. The code of i + 1 has them 16 bits
higher, modulo 32. The first place is where a BF16 number has these bits. Rotating the word right by
3 and by 6 bits moves the second and third there; masking and multiplying by 2^2 + 2^7 + 2^12 moves
the fourth."""
TOGETHER = 32
"""Input channels whose codes share words."""
MOST_GROUPS = 8
"""Groups in a block: then a thread fetches 16 bytes at once."""


def encode(weight: Tensor, outer: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes [N, K / 2], 2^118 a [N, K / 16], and g for each row [N, 1], unless given.

    It computes in FP32, or in FP64 for a weight of that precision.
    """
    rows, columns = weight.shape
    if columns % TOGETHER:
        raise ModelError(
            f"nvfp4 packs {TOGETHER} input channels together, and a weight has {columns}; use "
            "'int8'"
        )
    x = weight if weight.dtype == torch.float64 else weight.float()
    groups = x.unflatten(-1, (-1, GROUP))  # [N, K / 16, 16]
    amax = groups.abs().amax(-1)
    if outer is None:
        outer = scale_of(amax.amax(), LARGEST * SCALE_MAX).expand(rows, 1)
    scale = (amax / (LARGEST * outer)).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn)
    step = (scale.to(x.dtype) * outer)[..., None]
    # A group of zeros is divided by infinity, not by 0.
    codes = round_e2m1(groups / step.masked_fill(step == 0, torch.inf)).flatten(1)
    return pack(codes), scale.bfloat16() * LIFT, outer.contiguous()


def group_scale(stored: Tensor) -> Tensor:
    """a [N, K / 16] of the scales as stored; exact, and a fits BF16 and FP16."""
    return stored / LIFT


def scale_of(amax: Tensor, largest: float) -> Tensor:
    """amax / largest; 1 where that is subnormal and lacks bits, so the slice counts as zero."""
    # A tensor, because a GPU multiplies by the rounded reciprocal of a Python number.
    scale = amax / torch.full_like(amax, largest)
    return torch.where(scale < torch.finfo(amax.dtype).tiny, torch.ones_like(amax), scale)


def round_e2m1(x: Tensor) -> Tensor:
    """Codes (uint8) of the nearest numbers of E2M1; zero has no sign."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    return code | ((x < 0) & (code > 0)).to(torch.uint8) << 3


def groups_of_block(columns: int) -> int:
    """Groups whose words lie together: 8 if K is a multiple of 128, else 4 or 2."""
    return math.gcd(columns // GROUP, MOST_GROUPS)


def pack(codes: Tensor) -> Tensor:
    """Bytes [N, K / 2] of codes [N, K]."""
    pairs = groups_of_block(codes.shape[1]) // 2
    # [N, blocks, pairs of groups, i / 2, places, i % 2]
    parts = codes.int().unflatten(1, (-1, pairs, len(PLACES), 4, 2)).transpose(3, 4)
    words = parts.new_zeros(())
    for bit, at in enumerate(_positions(codes.device)):
        words = words | ((parts >> bit & 1) << at).sum((-2, -1), dtype=torch.int32)
    return words.transpose(2, 3).flatten(1).view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The numbers [N, K] that packed codes [N, K / 2] stand for."""
    pairs = groups_of_block(2 * packed.shape[1]) // 2
    words = packed.view(torch.int32).unflatten(1, (-1, 4, pairs)).transpose(2, 3)[..., None, None]
    codes = words.new_zeros(())
    for bit, at in enumerate(_positions(packed.device)):
        codes = codes | (words >> at & 1) << bit
    numbers = torch.tensor((*NUMBERS, *(-n for n in NUMBERS)), device=packed.device)
    return numbers[codes.transpose(3, 4).flatten(1)]


def _positions(device: torch.device) -> Tensor:
    """Where words have the bits of codes [bits, places, i % 2]."""
    places = torch.tensor(PLACES, dtype=torch.int32, device=device).T[..., None]
    return (places + torch.tensor([0, 16], dtype=torch.int32, device=device)) % 32
