"""NVFP4: weights in 4 bits, with two scales.

    g = max|W| / (6 * 448);  a = fp8(max|group| / (6 g));  q = e2m1(w / (a g));  w_hat = q (a g)

E2M1 has the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties go to the even one of two.
A group is 16 input channels of one output channel. Its scale a is FP8 E4M3, g is one FP32 number
for the tensor: together 4.5 bits a weight. A group whose a rounds to 0 is all zeros.

A byte holds channels i (low) and i + 8 (high) of a group, so a kernel reads activations in runs of
eight. Shapes: N output channels, K input channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qurl.errors import ModelError

GROUP = 16
"""Input channels under one scale."""
LARGEST = 6.0
SCALE_MAX = 448.0
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the three low bits of a code; the fourth is the sign."""


def encode(weight: Tensor, outer: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes [N, K / 2], a [N, K / 16] in FP8, and g for each row [N, 1], unless given.

    It computes in FP32, or in FP64 for a weight of that precision.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ModelError(
            f"nvfp4 codes {GROUP} input channels together, and a weight has {columns}; use 'int8'"
        )
    x = weight if weight.dtype == torch.float64 else weight.float()
    groups = x.unflatten(-1, (-1, GROUP))  # [N, K / 16, 16]
    amax = groups.abs().amax(-1)
    if outer is None:
        outer = scale_of(amax.amax(), LARGEST * SCALE_MAX).expand(rows, 1)
    scale = (amax / (LARGEST * outer)).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn)
    step = (scale.to(x.dtype) * outer)[..., None]
    # A group of zeros is divided by infinity, not by 0.
    low, high = round_e2m1(groups / step.masked_fill(step == 0, torch.inf)).chunk(2, -1)
    return (low | high << 4).flatten(1), scale, outer.contiguous()


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


def unpack(packed: Tensor) -> Tensor:
    """The numbers [N, K] that packed codes [N, K / 2] stand for."""
    pairs = packed.unflatten(-1, (-1, GROUP // 2))
    codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(-2)
    numbers = torch.tensor((*NUMBERS, *(-n for n in NUMBERS)), device=packed.device)
    return numbers[codes.long()]
