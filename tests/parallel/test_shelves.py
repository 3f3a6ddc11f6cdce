"""Tokens that go from engines to trainer ranks: the run is that of one process, and it learns.

make test-parallel
"""

import os
import signal

import pytest
from models import as_flags
from test_learning import TOY, gain
from test_runs import TINY, assert_same_run, find_rank_1, finish, run, start, wait_for_rows

from qurl.run.directory import read_jsonl

TOGETHER = {"parallel.trainers": 2}
APART = {"parallel.trainers": 2, "parallel.engines": 2}
READERS = {
    "sampling.replay": "recent",
    "sampling.thermostat": "e3",
    "batch.subselect": "shuffle-r1",
    "rollout.ahead": 0,
}
"""Parts that read whole batches and older rollouts on the driver."""


def words(run_dir, **more):
    settings = TINY | {"run_dir": run_dir, "rollout.deterministic": "true", "rollout.ahead": 1}
    return as_flags(settings | more)


@pytest.fixture(scope="module", autouse=True)
def _ray():
    pytest.importorskip("ray")


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """A run in one process that samples one step ahead."""
    folder = tmp_path_factory.mktemp("ahead")
    run(words(folder))
    return folder


def samples(run_dir):
    """What is known of each sample before the trainer's arithmetic."""
    names = ("problem", "completion", "reward", "finish", "token_ids", "tokens", "mask")
    return [[row[name] for name in names] for row in read_jsonl(run_dir / "samples.jsonl")]


@pytest.mark.parametrize("place", [TOGETHER, APART], ids=["together", "apart"])
def test_one_step_ahead(ahead, place, tmp_path):
    run(words(tmp_path, **place))
    assert_same_run(tmp_path, ahead)
    assert samples(tmp_path) == samples(ahead)


@pytest.mark.parametrize(
    ("place", "victim"), [(TOGETHER, "driver"), (APART, "rank 1")], ids=["driver", "rank 1"]
)
def test_killed_one_step_ahead(ahead, place, victim, tmp_path):
    """The rollouts of the next step are in the checkpoint; those on shelves are gone."""
    flags = words(tmp_path, **place)
    process = start(flags)
    wait_for_rows(process, tmp_path, 4)
    if victim == "driver":
        process.kill()
        finish(process)
        run(flags)
    else:
        os.kill(find_rank_1(process.pid), signal.SIGKILL)
        code, errors = finish(process)
        assert code == 0, errors
        assert "All ranks start again from step-" in errors
    assert_same_run(tmp_path, ahead)
    assert samples(tmp_path) == samples(ahead)


def test_parts_that_read_tokens_on_the_driver(tmp_path):
    run(words(tmp_path / "one", **READERS))
    run(words(tmp_path / "two", **READERS, **TOGETHER))
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert samples(tmp_path / "two") == samples(tmp_path / "one")


def test_two_trainers_and_two_engines_learn(tmp_path):
    """40 steps raise the accuracy of rollouts by 0.1 at least, and tokens pass by the driver."""
    more = APART | {"steps": 40, "eval.every": 0, "save.keep": 0, "run_dir": tmp_path}
    run(as_flags(TOY | more))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert gain(rows) > 0.1
    assert max(abs(row["rollout_corr/kl"]) for row in rows) < 0.02
    completions = TOY["batch.problems"] * TOY["sampling.group_size"]
    assert max(row["parallel/driver_bytes"] for row in rows) < 600 * completions
