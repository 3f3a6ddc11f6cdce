# pyright: reportGeneralTypeIssues=false
# (To pyright what a jitted function returns has no length.)
"""Parts of the kernels that multiply: how a product is cut into tiles, fetching and storing one.

Shapes: M tokens, N output channels, K input channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qurl.ops.launch import EXACT, can_describe, divide_up, next_power_of_2, overlapping
from qurl.ops.rounding import narrow


@dataclass(frozen=True)
class Plan:
    """How one product is computed."""

    tokens: int
    """Tokens per tile."""
    channels: int
    """Output channels per tile."""
    depth: int
    """Input channels per step."""
    splits: int = 0
    """Parts of K that the consumer adds; 0 = one part, finished here."""
    warps: int = 4
    stages: int = 4
    """Loads in flight."""
    prefetch: int = 0
    """Steps of weights to prefetch before the kernel waits for its input."""
    is_fast: bool = False
    """Leave whole FP8 sums to the matrix unit, which has about 14 bits for them."""

    @property
    def num_parts(self) -> int:
        return max(1, self.splits)

    def launch(
        self, tokens: int, weight: Tensor, num_columns: int, *, is_gated: bool
    ) -> tuple[tuple[int, int], int, dict[str, Any]]:
        """The grid of a product, steps of a part of K, and constants of either kernel.

        Rows of the weight [N, ...] have so many columns, up to eight to an element.
        """
        overlap = overlapping(weight.device)
        bytes_per_step = self.depth * weight.itemsize * weight.shape[1] // num_columns
        lines = self.prefetch * bytes_per_step // 128  # of the cache, per channel
        constants: dict[str, Any] = {
            "TOKENS": self.tokens,
            "CHANNELS": self.channels,
            "DEPTH": self.depth,
            "IS_FINISHED": self.splits == 0,
            "IS_GATED": is_gated,
            "PREFETCH_LINES": next_power_of_2(lines) if lines and overlap["PDL"] else 0,
            "num_warps": self.warps,
            "num_stages": self.stages,
            **overlap,
            **EXACT,
        }
        num_tiles = divide_up(tokens, self.tokens) * divide_up(len(weight), self.channels)
        steps = divide_up(divide_up(num_columns, self.depth), self.num_parts)
        return (num_tiles, self.num_parts), steps, constants


def as_tiles(x: Tensor, w: Tensor, plan: Plan) -> tuple[Any, Any, bool]:
    """Descriptors of the tiles of x and w, and whether there are; if not, x and w themselves.

    Rows of w may have several input channels to an element.
    """
    if not (can_describe(x) and can_describe(w)):
        return x, w, False
    w_depth = plan.depth * w.shape[1] // x.shape[1]
    return (
        TensorDescriptor.from_tensor(x, [plan.tokens, plan.depth]),
        TensorDescriptor.from_tensor(w, [plan.channels, w_depth]),
        True,
    )


@triton.jit
def prefetch_weights(
    w, first_channel, first_column, N, K, CHANNELS: tl.constexpr, LINES: tl.constexpr
):
    """Fetch LINES cache lines of each channel's row into L2."""
    channels = first_channel + tl.arange(0, CHANNELS)
    columns = first_column + tl.arange(0, LINES) * (1024 // w.dtype.element_ty.primitive_bitwidth)
    channels = tl.minimum(channels, N - 1).to(tl.int64)
    columns = tl.minimum(columns, K - 1)
    at = w + channels[:, None] * K + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_tile(matrix, rows, columns, num_rows, num_columns):
    """Rows and columns of a contiguous matrix, zero beyond its edges."""
    pointers = matrix + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(
    y,
    out,
    bias,
    part,
    tokens,
    first_channel,
    M,
    N,
    IS_FINISHED: tl.constexpr,
    IS_GATED: tl.constexpr,
    scale_x=None,
    scale_w=None,
    amax=None,
    IS_BLOCKED: tl.constexpr = tl.constexpr(False),  # noqa: B008
):
    """Store sums [TOKENS, CHANNELS] of one part of K; finish them first if there is no other."""
    CHANNELS: tl.constexpr = out.shape[1]
    channels = first_channel + tl.arange(0, CHANNELS)
    num_columns = N
    if IS_FINISHED:
        value = out.to(tl.float32)
        if scale_x is not None and not IS_BLOCKED:
            value = value * tl.load(scale_w + channels, channels < N, 0.0)[None, :]
            value = value * tl.load(scale_x + tokens, tokens < M, 0.0)[:, None]
        if bias is not None:
            value += tl.load(bias + channels, channels < N, 0.0).to(tl.float32)[None, :]
        out = narrow(value, y.dtype.element_ty)
        if IS_GATED:
            out = _gate(out)
            num_columns = N // 2
            channels = first_channel // 2 + tl.arange(0, CHANNELS // 2)
            if amax is not None:
                tl.atomic_max(amax + tokens, _largest(out), tokens < M, sem="relaxed")
    at = (part.to(tl.int64) * M + tokens.to(tl.int64))[:, None] * num_columns + channels[None, :]
    tl.store(y + at, out, (tokens < M)[:, None] & (channels < num_columns)[None, :])


@triton.jit
def _gate(y):
    """silu(gate) * up of a finished tile whose channels alternate, rounded once to its dtype."""
    pairs = y.to(tl.float32).reshape(y.shape[0], y.shape[1] // 2, 2)
    gate, up = tl.split(pairs)
    return narrow(gate / (1.0 + tl.exp(-gate)) * up, y.dtype)


@triton.jit
def _largest(y):
    """max|y| of each row. NaN becomes an infinite scale, which turns the row into NaN again."""
    size = tl.abs(y.to(tl.float32))
    return tl.max(tl.where(size == size, size, float("inf")), 1)
