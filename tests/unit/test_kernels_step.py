"""The start of a decode step, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qurl.rollout.local.kernels.step import begin_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def begin(tokens, positions, table, *, width=40, vocabulary=11, page_size=4):
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocabulary, width, generator=generator).to(DEVICE)
    tokens, positions = (torch.tensor(t, device=DEVICE) for t in (tokens, positions))
    table = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    return embedding, *begin_step(embedding, tokens, positions, table, page_size)


@pytest.mark.parametrize("width", [1, 40, 1024, 1536])
def test_embeddings_and_slots(width):
    """Positions 0, 3, 4 and 11 are the ends of pages of four."""
    table = [[9, 0, 0], [8, 7, 0], [6, 5, 0], [4, 3, 2]]
    embedding, x, slots = begin([0, 10, 3, 3], [0, 3, 4, 11], table, width=width)
    assert torch.equal(x, embedding[[0, 10, 3, 3]])
    assert slots.tolist() == [9 * 4, 8 * 4 + 3, 5 * 4, 2 * 4 + 3]


def test_columns_of_a_wider_table_are_left_alone():
    wide = torch.tensor([[1, 2, -1], [3, 4, -1]], dtype=torch.int32, device=DEVICE)
    embedding = torch.randn(5, 8, device=DEVICE).bfloat16()
    tokens = torch.tensor([1, 2], device=DEVICE)
    x, slots = begin_step(embedding, tokens, torch.tensor([5, 2], device=DEVICE), wide[:, :2], 4)
    assert torch.equal(x, embedding[[1, 2]].float())
    assert slots.tolist() == [2 * 4 + 1, 3 * 4 + 2]


@pytest.mark.parametrize(("token", "position"), [(-1, 0), (11, 0), (3, 8), (3, -1)])
def test_what_is_outside_its_table_becomes_nan(token, position):
    _, x, slots = begin([3, token], [1, position], [[5, 6], [7, 8]])
    assert x[0].isfinite().all()
    assert x[1].isnan().all()
    assert slots.tolist() == [21, 0]
