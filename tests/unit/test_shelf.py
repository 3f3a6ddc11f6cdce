"""Tokens that wait on shelves: what goes there comes back, is read once, and is forgotten."""

import pickle
import subprocess
import sys

import pytest
import torch
from models import group

from qurl.errors import EngineError, RankLost
from qurl.ops import shelf
from qurl.ops.shelf import TOKEN_BYTES, Address, Shelf, Shelves, Slip, Traffic, shelve, slip_of
from qurl.sampling.history import History
from qurl.sampling.packed import pack, unpack
from qurl.trainer.batches import pad
from qurl.types import Completion, Rollout

NOWHERE = Address(1, "127.0.0.1", 1, "gone")


@pytest.fixture(scope="module")
def shelf_of_rank_0():
    return Shelf(0)


@pytest.fixture
def graded():
    """A group of an answer with tokens of a tool, and of one across a sync."""
    found = group([5, 6], [[7, 8, 150_000], [9, 10]], [1.0, 0.0])
    first, last = found.rollout.completions
    completions = [
        Completion(first.token_ids, first.logprobs, "a", "stop", trained=(True, False, True)),
        Completion(last.token_ids, last.logprobs, "b", "length", versions=(7, 8)),
    ]
    return type(found)(
        Rollout(found.rollout.problem, completions, 7, 1.0), found.rewards, found.details
    )


def put(graded, place, traffic=None):
    """The group as the driver gets it, and the driver's view of the shelves."""
    shelves = Shelves([place.address], traffic or Traffic())
    sent = pickle.loads(pickle.dumps(shelve(graded.rollout, [place.address])))
    return type(graded)(shelves.adopt(sent), graded.rewards, graded.details), shelves


def numbers(completion):
    fields = ("token_ids", "logprobs", "trained", "versions")
    return [list(getattr(completion, name)) for name in fields]


def test_numbers_come_back_as_they_were(graded, shelf_of_rank_0):
    away, _ = put(graded, shelf_of_rank_0)
    for found, expected in zip(away.rollout.completions, graded.rollout.completions, strict=True):
        assert (found.text, found.finish) == (expected.text, expected.finish)
        ids, logprobs, *others = numbers(found)
        assert (ids, *others) == (numbers(expected)[0], *numbers(expected)[2:])
        assert logprobs == pytest.approx(list(expected.logprobs), rel=1e-7)
        assert found.token_ids[-1] == expected.token_ids[-1]
        assert found.versions[:1] == list(expected.versions[:1])


def test_batches_checkpoints_and_histories_read_them(graded, shelf_of_rank_0):
    away, _ = put(graded, shelf_of_rank_0)
    for found in (away, unpack(pack(away))):
        one, other = vars(pad([found])), vars(pad([graded]))
        for name in ("token_ids", "mask", "logp_behav", "lengths", "rewards"):
            assert torch.equal(one[name], other[name]), name
    history = History(1, keeps_responses=True)
    history.record(0, away)
    assert [x.tolist() for x in history.responses(0)] == [[7, 8, 150_000], [9, 10]]


def test_the_driver_is_charged_for_what_it_reads(graded, shelf_of_rank_0):
    traffic = Traffic()
    away, _ = put(graded, shelf_of_rank_0, traffic)
    lengths = [len(c.token_ids) for c in away.rollout.completions]
    assert (lengths, traffic.num_bytes) == ([3, 2], 0)
    assert [numbers(away.rollout.completions[0]) for _ in range(2)]
    assert traffic.take() == 3 * TOKEN_BYTES == 39
    assert traffic.take() == 0


def test_a_shelf_forgets_what_the_driver_forgets(graded, shelf_of_rank_0):
    before = len(shelf_of_rank_0)
    away, shelves = put(graded, shelf_of_rank_0)
    keys = [slip_of(c).key for c in away.rollout.completions]
    assert len(shelf_of_rank_0) == before + 2
    kept = away.rollout.completions[1]
    assert shelves.take_dropped() == {}
    del away
    assert shelves.take_dropped() == {0: keys[:1]}
    shelf_of_rank_0.drop(keys[:1])
    assert len(shelf_of_rank_0) == before + 1
    assert list(kept.token_ids) == [9, 10]


def test_the_next_shelf_takes_what_a_dead_one_does_not(graded, shelf_of_rank_0, monkeypatch):
    monkeypatch.setattr(shelf, "PATIENCE", shelf.timedelta(seconds=0.2))
    found = shelve(graded.rollout, [NOWHERE, shelf_of_rank_0.address])
    assert {slip_of(c).address for c in found.completions} == {shelf_of_rank_0.address}
    with pytest.raises(EngineError, match=r"none answers at 127\.0\.0\.1:1 of rank 1"):
        shelve(graded.rollout, [NOWHERE])
    with pytest.raises(RankLost, match=r"cannot be fetched from trainer rank 1 at 127\.0\.0\.1:1"):
        Slip(NOWHERE, "key", 1).read()


def test_a_shelf_that_died_since_the_last_put_takes_nothing(graded, shelf_of_rank_0):
    """torch's store does not wait for an answer when a value is set."""
    code = (
        "import sys; from qurl.ops.shelf import Shelf; own = Shelf(1); "
        "print(own.address.port, own.address.name, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port, name = child.stdout.readline().split()
    dead = Address(1, "127.0.0.1", int(port), name)
    addresses = [dead, shelf_of_rank_0.address]
    before = shelve(graded.rollout, addresses)
    assert slip_of(before.completions[0]).address == dead
    child.kill()
    child.wait()
    after = shelve(graded.rollout, addresses)
    assert {slip_of(c).address for c in after.completions} == {shelf_of_rank_0.address}
    assert numbers(after.completions[1])[0] == [9, 10]


def test_a_completion_that_is_too_long_is_named(graded, shelf_of_rank_0, monkeypatch):
    monkeypatch.setattr(shelf, "LARGEST", 2 * TOKEN_BYTES)
    with pytest.raises(EngineError, match="a completion of 3 tokens is more than the 2 that"):
        shelve(graded.rollout, [shelf_of_rank_0.address])
