"""Packing, micro-batches and the operations of `Batch`, by hand."""

import pytest
import torch
from models import group, score

from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.batches import (
    level,
    microbatches,
    minibatches,
    pad,
    padded_microbatches,
    sample_records,
    spread,
    token_texts,
)
from qurl.types import Trained


@pytest.fixture
def graded():
    return [
        group([5, 6], [[7, 8, 9], [10]], [1.0, 0.0], id="a", temperature=0.7),
        group([11], [[12, 13]], [0.5], id="b", temperature=0.7),
    ]


def test_pack_by_hand(graded):
    """Prompts of 2, 2 and 1 tokens; responses of 3, 1 and 2: lengths 5, 3, 3."""
    batch = pad(graded)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 10, 0, 0], [11, 12, 13, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]
    expected = [[0, 0, 0, -0.1, -0.2], [0, 0, -1, 0, 0], [0, 0, -0.1, 0, 0]]
    torch.testing.assert_close(batch.logp_behav, torch.tensor(expected, dtype=torch.float32))
    assert batch.lengths.tolist() == [5, 3, 3]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.problem_ids == [g.rollout.problem.id for g in (graded[0], *graded)]
    assert len(set(batch.problem_ids)) == 2
    assert batch.temperature == 0.7
    assert (len(batch), batch.num_tokens) == (3, 6)


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        # 24 tokens need three pieces: 9, then 5 and 5, then 3 and 2 beside them (9, 8 and 7).
        ([9, 3, 5, 5, 2], [[0], [2, 1], [3, 4]]),
        # 18 tokens would fit in two pieces, but no two of these rows do.
        ([6, 6, 6], [[0], [1], [2]]),
        ([4, 30, 4], [[1], [0, 2]]),
        ([1], [[0]]),
        ([], []),
    ],
)
def test_microbatches_by_hand(lengths, pieces):
    """At most 10 tokens, the longest row first, each into the emptiest piece."""
    assert microbatches(lengths, 10) == pieces


def random_lengths(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 30, (57,), generator=draw).tolist()


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 64, 10_000])
def test_microbatches_hold_every_row_once_and_are_level(max_tokens):
    lengths = random_lengths(max_tokens)
    pieces = microbatches(lengths, max_tokens)
    assert sorted(row for rows in pieces for row in rows) == list(range(57))
    sizes = [sum(lengths[row] for row in rows) for rows in pieces]
    for size, rows in zip(sizes, pieces, strict=True):
        assert len(rows) == 1 or size <= max_tokens
    assert max(sizes) - min(sizes) <= max(lengths)
    assert len(pieces) <= 1.5 * sum(lengths) / max_tokens + 1


def test_thousands_of_rows_that_do_not_fit_together_are_cut_soon(monkeypatch):
    """Not every count from 1229 to 2048 is tried."""
    tried = []

    def counted(lengths, count):
        tried.append(count)
        return level(lengths, count)

    monkeypatch.setattr("qurl.trainer.batches.level", counted)
    assert len(microbatches([6] * 2048, 10)) == 2048
    assert len(tried) < 130


def test_padded_microbatches_by_hand():
    """At most 10 tokens with padding: [9], [5, 5] and [3, 2], padded to 9, 10 and 6."""
    assert padded_microbatches([9, 3, 5, 5, 2], 10) == [[0], [2, 3], [1, 4]]


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 64, 10_000])
def test_padded_microbatches_hold_every_row_once_within_the_budget(max_tokens):
    lengths = random_lengths(max_tokens)
    pieces = padded_microbatches(lengths, max_tokens)
    rows = [row for rows in pieces for row in rows]
    assert sorted(rows) == list(range(57))
    assert [lengths[row] for row in rows] == sorted(lengths, reverse=True)
    for piece in pieces:
        assert len(piece) == 1 or len(piece) * max(lengths[row] for row in piece) <= max_tokens


def test_select_trims_to_the_longest_chosen_row(graded):
    batch = pad(graded).select(torch.tensor([2, 1]))
    assert batch.token_ids.tolist() == [[11, 12, 13], [5, 6, 10]]
    assert batch.mask.tolist() == [[0, 1, 1], [0, 0, 1]]
    assert batch.rewards.tolist() == [0.5, 0.0]
    assert batch.group.tolist() == [1, 0]
    assert batch.problem_ids == [graded[1].rollout.problem.id, graded[0].rollout.problem.id]


def test_mini_batches_cover_all_rows_and_repeat_with_their_seed():
    def draw(seed, num_rows=10, count=4):
        order = torch.Generator().manual_seed(seed)
        return [rows.tolist() for rows in minibatches(num_rows, count, order)]

    assert [len(rows) for rows in draw(3)] == [3, 3, 2, 2]
    assert sorted(row for rows in draw(3) for row in rows) == list(range(10))
    assert draw(3) == draw(3) != draw(4)
    assert len(draw(3, num_rows=3)) == 3, "no empty ones"


def test_to_moves_every_tensor(graded):
    batch = score(pad(graded), values=torch.zeros(3, 5)).to("meta")
    tensors = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 12
    assert {t.device.type for t in tensors} == {"meta"}


def train_on(batch, *, logp_shift=0.0, shrink=1.0, advantage=0.0):
    """The batch after updates that moved every log-prob by `logp_shift`."""
    ones = torch.ones_like(batch.mask)
    advantages = advantage * batch.mask
    added = {"weight": ones, "shrink": shrink * ones, "returns": advantages}
    logp = batch.logp_prox + logp_shift * batch.mask
    return batch.into(Trained, **added, advantages=advantages, logp=logp)


def records(graded, batch, count):
    shown = spread(count, len(batch))
    return list(sample_records(graded, shown, batch.select(shown)))


def test_sample_records_read_the_right_rows(graded):
    batch = pad(graded)
    batch = score(batch, logp_prox=batch.logp_behav - 0.25 * batch.mask)
    batch = train_on(batch, logp_shift=0.5, shrink=0.75, advantage=-1.0)
    first, last = records(graded, batch, 2)
    assert first == {
        "problem": "a",
        "prompt": "6*7=",
        "completion": "answer 0",
        "answer": "42",
        "reward": 1.0,
        "details": {"accuracy": 1.0},
        "finish": "stop",
        "has_prox": True,
        "token_ids": [7, 8, 9],
        "tokens": [],
        "logp_behav": [0.0, -0.1, -0.2],
        "logp_prox": [-0.25, -0.35, -0.45],
        "logp": [0.25, 0.15, 0.05],
        "advantages": [-1.0, -1.0, -1.0],
        "shrink": [0.75, 0.75, 0.75],
        "mask": [1.0, 1.0, 1.0],
    }
    assert (last["problem"], last["logp_behav"]) == ("b", [0.0, -0.1])
    assert last["logp_prox"] == [-0.25, -0.35]


@pytest.mark.parametrize(("count", "written"), [(0, 0), (1, 1), (3, 3), (50, 3)])
def test_sample_records_writes_no_row_twice(graded, count, written):
    batch = train_on(score(pad(graded)))
    found = [tuple(r["token_ids"]) for r in records(graded, batch, count)]
    assert len(found) == len(set(found)) == written


def test_texts_of_tokens_make_up_the_completion():
    tokenizer = build_tokenizer()
    ids = tokenizer.encode("12+34=", add_special_tokens=False)
    assert token_texts(tokenizer, ids) == list("12+34=")
    assert "".join(token_texts(tokenizer, [*ids, tokenizer.eos_token_id])).startswith("12+34=")
    assert token_texts(None, ids) == []


class Bytes:
    """A tokenizer whose tokens are bytes; like SentencePiece, it drops a space at the start."""

    def decode(self, token_ids, skip_special_tokens):
        return bytes(token_ids).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("a b", ["a", " ", "b"]),
        ("é!", ["", "é", "!"]),
        ("a😀b", ["a", "", "", "", "😀", "b"]),
    ],
)
def test_a_character_of_several_tokens_stands_with_the_last(text, texts):
    assert token_texts(Bytes(), text.encode()) == texts


def test_bytes_that_are_no_text_do_not_pile_up():
    texts = token_texts(Bytes(), [0xFF] * 50)
    assert len(texts) == 50
    assert sum(map(len, texts)) >= 40
