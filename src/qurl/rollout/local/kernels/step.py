"""What a decode step starts with: the tokens' embeddings, and where their keys will go.

Shapes: B sequences, P pages of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.rounding import await_inputs
from qurl.rollout.local.kernels.product import next_power_of_2

_COLUMNS = 1024


def begin_step(
    embedding: Tensor,
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    page_size: int,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """The residual stream [B, hidden] in FP32, and the slots [B] of positions [B] in table [B, P].

    A token or a position outside of its table makes the row NaN and goes to slot 0.
    """
    batch, width = tokens.shape[0], embedding.shape[1]
    assert embedding.is_contiguous()
    assert table.dtype == torch.int32
    assert table.stride(1) == 1
    assert tokens.stride(0) == positions.stride(0) == 1
    x = torch.empty(batch, width, dtype=torch.float32, device=embedding.device)
    slots = torch.empty(batch, dtype=torch.int64, device=embedding.device)
    args: dict[str, Any] = {
        "embedding": embedding,
        "tokens": tokens,
        "positions": positions,
        "table": table,
        "x": x,
        "slots": slots,
        "table_stride": table.stride(0),
        "num_pages": table.shape[1],
        "vocabulary": embedding.shape[0],
        "WIDTH": width,
        "PAGE_SIZE": page_size,
        "COLUMNS": min(_COLUMNS, next_power_of_2(width)),
        "PDL": pdl,
        "num_warps": 4,
        "launch_pdl": pdl,
    }
    begin_kernel[(batch, -(-width // _COLUMNS))](**args)
    return x, slots


@triton.jit(do_not_specialize=["table_stride", "num_pages", "vocabulary"])
def begin_kernel(
    embedding,
    tokens,
    positions,
    table,
    x,
    slots,
    table_stride,
    num_pages,
    vocabulary,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sequence and piece of its embedding."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(tokens + row)
    position = tl.load(positions + row)
    is_sound = (token >= 0) & (token < vocabulary)
    is_sound = is_sound & (position >= 0) & (position < num_pages * PAGE_SIZE)
    values = tl.load(
        embedding + tl.where(is_sound, token, 0) * WIDTH + columns, mask=columns < WIDTH, other=0.0
    ).to(tl.float32)
    values = tl.where(is_sound, values, float("nan"))
    tl.store(x + row * WIDTH + columns, values, mask=columns < WIDTH)
    if tl.program_id(1) == 0:
        position = tl.where(is_sound, position, 0)
        page = tl.load(table + row * table_stride + position // PAGE_SIZE).to(tl.int64)
        tl.store(slots + row, tl.where(is_sound, page * PAGE_SIZE + position % PAGE_SIZE, 0))
