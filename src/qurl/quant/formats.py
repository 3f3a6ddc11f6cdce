"""The quantizers. Engines, update tracker and exporter call them; kernels give the same codes.

    INT8      a = max|x| / 127;  q = clamp(round_half_even(x / a), -127, 127);  x_hat = a q
    FP8 E4M3  a = max|x| / 448;  q = fp8(clamp(x / a, -448, 448));              x_hat = a q

Weights have one scale per output channel, activations one per token ("fp8-block": one per 128x128
tile and per 1x128 group). Scales are dynamic, symmetric and FP32. An all-zero slice has a = 1.
NVFP4 codes weights only (`qurl.quant.nvfp4`).

Shapes: N output channels, K input channels, M tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl.quant import nvfp4
from qurl.quant.nvfp4 import scale_of

BLOCK = 128


@dataclass(frozen=True)
class Format:
    """How the weights and activations of linear layers are coded."""

    name: str
    dtype: torch.dtype  # of the codes
    largest: float  # code, of weights and of activations
    block: int | None = None
    """Input channels per scale; for weights also output channels. None: one scale per row."""
    is_weight_only: bool = False
    """NVFP4: two codes in a byte, and activations in full precision."""
    canary_bound: float = 2.0
    """Largest mean |log-prob gap| to the trainer on the canary prompt; 0.4 to 0.6 is normal."""

    @property
    def is_integer(self) -> bool:
        return self.dtype == torch.int8

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight, without scales of whole rows or tiles."""
        return 0.5 + 2 / nvfp4.GROUP if self.is_weight_only else self.dtype.itemsize


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("int8", torch.int8, largest=127),
        Format("fp8", torch.float8_e4m3fn, largest=448),
        Format("fp8-block", torch.float8_e4m3fn, largest=448, block=BLOCK),
        # Coarse on purpose, to study objectives under large mismatch: int6 for pretrained models,
        # int4 for the toy task.
        Format("int6", torch.int8, largest=31, canary_bound=5.0),
        Format("int4", torch.int8, largest=7, canary_bound=10.0),
        Format("nvfp4", torch.uint8, nvfp4.LARGEST, is_weight_only=True, canary_bound=5.0),
    )
}


@dataclass(frozen=True)
class Quantized:
    """Codes and their scale."""

    codes: Tensor  # [N, K] of a weight, [..., M, K] of activations; NVFP4: bytes [N, K / 2]
    scale: Tensor  # [N, 1], [..., M, 1]; with blocks [N / 128, K / 128], [..., M, K / 128]
    format: Format
    tensor_scale: Tensor | None = None
    """NVFP4's g, repeated for each row [N, 1], as stacked weights have different ones. Its `scale`
    is 2^118 a [N, K / 16] in BF16."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def shape(self) -> tuple[int, int]:
        """N, K of a weight."""
        rows, columns = self.codes.shape
        return rows, 2 * columns if self.codes.dtype == torch.uint8 else columns

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.codes, self.scale, self.tensor_scale) if t is not None]

    def rows(self, rows: slice) -> Quantized:
        """Some rows of a weight; those of tiles in whole tiles."""
        block, outer = self.format.block, self.tensor_scale
        scales = slice(rows.start // block, -(-rows.stop // block)) if block else rows
        outer = None if outer is None else outer[rows]
        return Quantized(self.codes[rows], self.scale[scales], self.format, outer)

    def numbers(self) -> Tensor:
        """The codes as numbers, one each; FP32 if they are not floating-point numbers yet."""
        if self.codes.dtype == torch.uint8:
            return nvfp4.unpack(self.codes)
        return self.codes if self.codes.dtype.itemsize >= 4 else self.codes.float()


def get_format(name: str) -> Format:
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"format {name!r} is not one of {', '.join(FORMATS)}") from None


def quantize(weight: Tensor, format: str | Format, *, scale: Tensor | None = None) -> Quantized:
    """Code a weight [N, K], one scale per output channel, per 128x128 tile or per 16 columns.

    A given scale [N, 1] of output channels, of NVFP4 its g, is kept; weights beyond it are clamped.
    """
    format = get_format(format) if isinstance(format, str) else format
    if format.is_weight_only:
        codes, scale, tensor_scale = nvfp4.encode(weight, scale)
        return Quantized(codes, scale, format, tensor_scale)
    if format.block is None:
        return Quantized(*_code(weight, format.largest, format.dtype, scale), format)
    (rows, columns), block = weight.shape, format.block
    padded = F.pad(weight, (0, -columns % block, 0, -rows % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
    codes, scale = _code(tiles.flatten(-2), format.largest, format.dtype)  # [n, k, block^2]
    codes = codes.unflatten(-1, tiles.shape[-2:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return Quantized(codes[:rows, :columns].contiguous(), scale.squeeze(-1), format)


def quantize_activation(x: Tensor, format: Format) -> Quantized:
    """Code activations [..., M, K], one scale per token or per token and 128 input channels."""
    if format.block is None:
        return Quantized(*_code(x, format.largest, format.dtype), format)
    columns = x.shape[-1]
    groups = F.pad(x, (0, -columns % format.block)).unflatten(-1, (-1, format.block))
    codes, scale = _code(groups, format.largest, format.dtype)
    codes = codes.flatten(-2)[..., :columns].contiguous()
    return Quantized(codes, scale.squeeze(-1), format)


def dequantize(q: Quantized) -> Tensor:
    """codes * scale, in the scale's precision."""
    scale = expand_scale(q)
    return q.numbers().to(scale.dtype) * scale


def expand_scale(q: Quantized) -> Tensor:
    """The scale, broadcastable against the codes as numbers."""
    if q.tensor_scale is not None:
        scale = nvfp4.group_scale(q.scale).to(q.tensor_scale.dtype) * q.tensor_scale
        return scale.repeat_interleave(nvfp4.GROUP, -1)
    if q.format.block is None:
        return q.scale
    *rows, columns = q.codes.shape
    scale = q.scale.repeat_interleave(q.format.block, -1)[..., :columns]
    if list(q.scale.shape[:-1]) == rows:  # activations have one row of scales per token
        return scale
    return scale.repeat_interleave(q.format.block, -2)[: rows[0]]


def _code(
    x: Tensor, largest: float, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scale [..., 1] of slices along the last dimension; float64 stays float64."""
    x = x if x.dtype == torch.float64 else x.float()
    if scale is None:
        scale = scale_of(x.abs().amax(-1, keepdim=True), largest)
    codes = (x / scale).clamp(-largest, largest)
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale
