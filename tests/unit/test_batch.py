"""Packing, micro-batches and the operations of `Batch`, by hand."""

import pytest
import torch
from models import group

from qurl.batch import microbatches, pack, sample_records


@pytest.fixture
def graded():
    return [
        group([5, 6], [[7, 8, 9], [10]], [1.0, 0.0], id="a", temperature=0.7),
        group([11], [[12, 13]], [0.5], id="b", temperature=0.7),
    ]


def test_pack_by_hand(graded):
    """Prompts of 2, 2 and 1 tokens; responses of 3, 1 and 2: lengths 5, 3, 3."""
    batch = pack(graded)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 10, 0, 0], [11, 12, 13, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]
    expected = [[0, 0, 0, -0.1, -0.2], [0, 0, -1, 0, 0], [0, 0, -0.1, 0, 0]]
    torch.testing.assert_close(batch.logp_behav, torch.tensor(expected, dtype=torch.float32))
    assert batch.lengths.tolist() == [5, 3, 3]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.temperature == 0.7
    assert (len(batch), batch.num_tokens) == (3, 6)


def test_microbatches_by_hand():
    """Lengths 9, 3, 5, 5, 2 and at most 10 tokens: [9], [5, 5], [3, 2] (padded to 9, 10, 6)."""
    pieces = list(microbatches(torch.tensor([9, 3, 5, 5, 2]), 10))
    assert [p.tolist() for p in pieces] == [[0], [2, 3], [1, 4]]


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 64, 10_000])
def test_microbatches_cover_every_row_once_within_the_budget(max_tokens):
    lengths = torch.randint(1, 30, (57,), generator=torch.Generator().manual_seed(max_tokens))
    pieces = list(microbatches(lengths, max_tokens))
    rows = torch.cat(pieces)
    assert sorted(rows.tolist()) == list(range(57))
    assert lengths[rows].tolist() == sorted(lengths.tolist(), reverse=True)
    for piece in pieces:
        assert len(piece) == 1 or len(piece) * int(lengths[piece].max()) <= max_tokens


def test_select_trims_to_the_longest_chosen_row(graded):
    batch = pack(graded).select(torch.tensor([2, 1]))
    assert batch.token_ids.tolist() == [[11, 12, 13], [5, 6, 10]]
    assert batch.mask.tolist() == [[0, 1, 1], [0, 0, 1]]
    assert batch.rewards.tolist() == [0.5, 0.0]
    assert batch.group.tolist() == [1, 0]
    assert batch.logp_prox is None


def test_split_keeps_order_and_loses_nothing(graded):
    batch = pack(graded + graded)
    parts = list(batch.split(4))
    assert [len(p) for p in parts] == [2, 2, 1, 1]
    assert torch.cat([p.rewards for p in parts]).tolist() == batch.rewards.tolist()
    assert parts[2].token_ids.tolist() == [[5, 6, 10]]
    assert sum(p.num_tokens for p in parts) == batch.num_tokens
    assert len(list(pack(graded).split(5))) == 3, "no empty parts"


def test_shuffle_moves_whole_rows_and_repeats_with_its_seed(graded):
    batch = pack(graded * 4)
    batch = batch.replace(rewards=torch.arange(12.0), logp_prox=batch.logp_behav * 2)
    shuffled = batch.shuffle(torch.Generator().manual_seed(3))
    order = shuffled.rewards.long()
    assert order.tolist() != list(range(12))
    assert sorted(order.tolist()) == list(range(12))
    for name in ("token_ids", "lengths", "mask", "logp_behav", "logp_prox", "group"):
        assert torch.equal(getattr(shuffled, name), getattr(batch, name)[order]), name
    again = batch.shuffle(torch.Generator().manual_seed(3))
    assert torch.equal(again.rewards, shuffled.rewards)
    other = batch.shuffle(torch.Generator().manual_seed(4))
    assert not torch.equal(other.rewards, shuffled.rewards)


def test_to_moves_every_tensor(graded):
    batch = pack(graded).replace(advantages=torch.zeros(3, 5)).to("meta")
    tensors = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 7
    assert {t.device.type for t in tensors} == {"meta"}


def test_sample_records_read_the_right_rows(graded):
    batch = pack(graded)
    batch = batch.replace(logp_prox=batch.logp_behav - 0.25 * batch.mask)
    first, last = sample_records(graded, batch, 2)
    assert first == {
        "problem": "a",
        "prompt": "6*7=",
        "completion": "answer 0",
        "answer": "42",
        "reward": 1.0,
        "details": {"accuracy": 1.0},
        "finish": "stop",
        "token_ids": [7, 8, 9],
        "logp_behav": [0.0, -0.1, -0.2],
        "logp_prox": [-0.25, -0.35, -0.45],
    }
    assert (last["problem"], last["logp_behav"]) == ("b", [0.0, -0.1])
    assert last["logp_prox"] == [-0.25, -0.35]


@pytest.mark.parametrize(("count", "written"), [(0, 0), (1, 1), (3, 3), (50, 3)])
def test_sample_records_writes_no_row_twice(graded, count, written):
    batch = pack(graded)
    batch = batch.replace(logp_prox=batch.logp_behav)
    records = [tuple(r["token_ids"]) for r in sample_records(graded, batch, count)]
    assert len(records) == len(set(records)) == written
