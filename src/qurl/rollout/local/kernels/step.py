"""The start of a decode step: the tokens' embeddings, and the slots of their keys.

Shapes: B sequences, P pages of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl.ops.launch import await_inputs, divide_up, next_power_of_2, overlapping
from qurl.ops.rounding import load_float

_COLUMNS = 1024


def begin_step(
    embedding: Tensor, tokens: Tensor, positions: Tensor, table: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """The residual stream [B, hidden] in FP32, and the slots [B] of positions [B] in table [B, P].

    A token or position outside its table makes the row NaN, and its slot is 0.
    """
    batch, width = tokens.shape[0], embedding.shape[1]
    assert embedding.is_contiguous()
    assert table.dtype == torch.int32
    assert table.stride(1) == 1
    assert tokens.stride(0) == positions.stride(0) == 1
    x = torch.empty(batch, width, dtype=torch.float32, device=embedding.device)
    slots = torch.empty(batch, dtype=torch.int64, device=embedding.device)
    columns = min(_COLUMNS, next_power_of_2(width))
    shape: dict[str, Any] = {"WIDTH": width, "PAGE_SIZE": page_size, "COLUMNS": columns}
    shape |= overlapping(embedding.device)
    sizes = (table.stride(0), table.shape[1], len(embedding))
    begin_kernel[(batch, divide_up(width, columns))](
        embedding, tokens, positions, table, x, slots, *sizes, **shape
    )
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
    source = embedding + tl.where(is_sound, token, 0) * WIDTH + columns
    values = load_float(source, columns < WIDTH)
    values = tl.where(is_sound, values, float("nan"))
    tl.store(x + row * WIDTH + columns, values, mask=columns < WIDTH)
    if tl.program_id(1) == 0:
        position = tl.where(is_sound, position, 0)
        page = tl.load(table + row * table_stride + position // PAGE_SIZE).to(tl.int64)
        tl.store(slots + row, tl.where(is_sound, page * PAGE_SIZE + position % PAGE_SIZE, 0))
