"""Keys and values as an FP8 cache gives them back, for the engine and for a unified trainer.

    code = fp8(clamp((x - center) / scale, -448, 448));        x_hat = scale * code

There is one scale per layer, key or value, and head, and a center of the keys. A key's x_hat lacks
its center: q . (k - c) differs from q . k by the same number for every key, which softmax and its
gradient ignore. Scales are powers of two, so x_hat is exact in BF16. It makes no difference then
whether attention reads x_hat, or multiplies codes and scales the result.

Shapes: H_kv key heads, T positions, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qurl.types import KVScales

FP8_MAX = 448.0


def code_kv(x: Tensor, scale: Tensor, center: Tensor | None = None) -> Tensor:
    """FP8 codes of keys or values; scale and center broadcast against x."""
    x = x.float() if center is None else x.float() - center
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def decode_kv(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x_hat of codes."""
    return (codes.float() * scale).to(dtype)


class KVRounding(nn.Module):
    """Rounds keys and values of one layer while `is_unified`, once their scales are known.

    Gradients pass straight through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_unified = True
        self._scales: tuple[Tensor, Tensor] | None = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Scale [2, H_kv] and center [H_kv, D]; None while nothing is rounded."""
        return self._scales if self.is_unified else None

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., H_kv, T, D]."""
        if self.scales is None:
            return k, v
        scale, center = self.scales
        k_scale, v_scale = scale[..., None, None]
        return _round(k, k_scale, center[:, None]), _round(v, v_scale)


def set_kv_scales_(model: nn.Module, scales: KVScales) -> None:
    """Make a model's `KVRounding`s, if it has any, round as the engine does."""
    roundings = [module for module in model.modules() if isinstance(module, KVRounding)]
    if roundings:
        pairs = zip(scales.scale, scales.center, strict=True)
        for rounding, pair in zip(roundings, pairs, strict=True):
            rounding._scales = pair


def _round(x: Tensor, scale: Tensor, center: Tensor | None = None) -> Tensor:
    rounded = decode_kv(code_kv(x.detach(), scale, center), scale, x.dtype)
    return rounded + (x - x.detach())  # exact: the difference is zero, with a gradient
