"""The quantizers. Engines, update tracker and exporter call them; kernels give the same codes.

    INT8      a = max|x| / 127;  q = clamp(round_half_even(x / a), -127, 127);  x_hat = a q
    FP8 E4M3  a = max|x| / 448;  q = fp8(clamp(x / a, -448, 448));              x_hat = a q

Weights have one scale per output channel, activations one per token ("fp8-block": one per 128x128
tile and per 1x128 group). Scales are dynamic, symmetric and FP32. An all-zero slice has a = 1.

Shapes: N output channels, K input channels, M tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True)
class Format:
    """How the weights and activations of linear layers are coded."""

    name: str
    dtype: torch.dtype  # of the codes
    weight_max: float  # largest code of a weight
    act_max: float  # largest code of an activation
    block: int | None = None
    """Input channels per scale; for weights also output channels. None: one scale per row."""
    canary_bound: float = 2.0
    """Largest mean |log-prob gap| to the trainer on the canary prompt; 0.4 to 0.6 is normal."""

    @property
    def is_integer(self) -> bool:
        return not self.dtype.is_floating_point


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("int8", torch.int8, weight_max=127, act_max=127),
        Format("fp8", torch.float8_e4m3fn, weight_max=448, act_max=448),
        Format("fp8-block", torch.float8_e4m3fn, weight_max=448, act_max=448, block=BLOCK),
        # Coarse on purpose, to study objectives under large mismatch: int6 for pretrained models,
        # int4 for the toy task.
        Format("int6", torch.int8, weight_max=31, act_max=31, canary_bound=5.0),
        Format("int4", torch.int8, weight_max=7, act_max=7, canary_bound=10.0),
    )
}


@dataclass(frozen=True)
class Quantized:
    """Codes and their scale."""

    codes: Tensor  # [N, K] of a weight, [..., M, K] of activations
    scale: Tensor  # [N, 1], [..., M, 1]; with blocks [N / 128, K / 128], [..., M, K / 128]
    format: Format

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def get_format(name: str) -> Format:
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"format {name!r} is not one of {', '.join(FORMATS)}") from None


def quantize(weight: Tensor, format: str | Format) -> Quantized:
    """Code a weight [N, K], one scale per output channel or per 128x128 tile."""
    format = get_format(format) if isinstance(format, str) else format
    if format.block is None:
        return Quantized(*_code(weight, format.weight_max, format.dtype), format)
    (rows, columns), block = weight.shape, format.block
    padded = F.pad(weight, (0, -columns % block, 0, -rows % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
    codes, scale = _code(tiles.flatten(-2), format.weight_max, format.dtype)  # [n, k, block^2]
    codes = codes.unflatten(-1, tiles.shape[-2:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return Quantized(codes[:rows, :columns].contiguous(), scale.squeeze(-1), format)


def quantize_activation(x: Tensor, format: Format) -> Quantized:
    """Code activations [..., M, K], one scale per token or per token and 128 input channels."""
    if format.block is None:
        return Quantized(*_code(x, format.act_max, format.dtype), format)
    columns = x.shape[-1]
    groups = F.pad(x, (0, -columns % format.block)).unflatten(-1, (-1, format.block))
    codes, scale = _code(groups, format.act_max, format.dtype)
    codes = codes.flatten(-2)[..., :columns].contiguous()
    return Quantized(codes, scale.squeeze(-1), format)


def dequantize(q: Quantized) -> Tensor:
    """codes * scale, in the scale's precision."""
    return q.codes.to(q.scale.dtype) * expand_scale(q)


def expand_scale(q: Quantized) -> Tensor:
    """The scale, broadcastable against the codes."""
    if q.format.block is None:
        return q.scale
    *rows, columns = q.codes.shape
    scale = q.scale.repeat_interleave(q.format.block, -1)[..., :columns]
    if list(q.scale.shape[:-1]) == rows:  # activations have one row of scales per token
        return scale
    return scale.repeat_interleave(q.format.block, -2)[: rows[0]]


def _code(x: Tensor, largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scale [..., 1] of slices along the last dimension; float64 stays float64."""
    x = x if x.dtype == torch.float64 else x.float()
    amax = x.abs().amax(-1, keepdim=True)
    # A tensor, because a GPU multiplies by the rounded reciprocal of a Python number.
    scale = amax / torch.full_like(amax, largest)
    # A subnormal scale lacks bits that x / scale needs, so such a slice counts as zero.
    scale = torch.where(scale < torch.finfo(x.dtype).tiny, torch.ones_like(amax), scale)
    codes = (x / scale).clamp(-largest, largest)
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale
