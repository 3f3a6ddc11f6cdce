"""Trainer ranks that Ray starts, on one machine: as those of processes.

make test-parallel
"""

import functools
import os
import signal
import time
from pathlib import Path

import pytest
from test_parallel import CLOSE, assert_close, batches, make, step, train
from test_runs import assert_same_run, fail_on_rank_1, finish, run, start, wait_for_rows, words

from qurl.errors import ConfigError, RankLost, TrainingError
from qurl.run.directory import read_jsonl
from qurl.trainer.parallel.group import LearnerGroup
from qurl.trainer.parallel.processes import lead
from qurl.trainer.parallel.ray import _own_gpu, _reserve, start_by_ray

ray = pytest.importorskip("ray")

CASE = "grpo, reference, UAQ"


@pytest.fixture(scope="module", autouse=True)
def address():
    """A cluster of three CPUs, and of GPUs that Ray only believes in."""
    ray.shutdown()  # that of another file's tests
    ray.init(num_cpus=3, num_gpus=3, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def by_ray(address, tmp_path):
    return functools.partial(start_by_ray, address, tmp_path / "workers", 60.0)


def fail_together(post):
    with post.ranks.agreeing(TrainingError):
        if post.ranks.rank == 1:
            raise TrainingError("a bad batch")


def test_two_ranks_of_ray_are_one_until_one_fails(by_ray):
    expected = train(make(CASE))
    with lead(2, "cpu", threads=1, start=by_ray) as workers:
        group = LearnerGroup(workers, make(CASE))
        found = train(group)
        with pytest.raises(TrainingError, match="trainer rank 1: a bad batch"):
            workers.run(fail_together)
        assert not workers.has_failed
        workers.run(fail_on_rank_1, 1)
        with pytest.raises(TrainingError, match="trainer rank 1: IndexError: a bug on one rank"):
            step(group, batches()[0], 0)
    for row, expected_row in zip(found[0], expected[0], strict=True):
        assert row == pytest.approx(expected_row, rel=CLOSE, abs=CLOSE)
    assert_close(found[2], expected[2])


def process_ids(post):
    return post.ranks.pool(os.getpid())


def die_on_rank_1(post):
    """While all exchange numbers."""
    if post.ranks.rank == 1:
        os.write(2, b"I have seen the end\n")
        os.kill(os.getpid(), signal.SIGKILL)
    post.ranks.total(1)


@pytest.mark.parametrize("kind", ["ray", "processes"])
def test_of_three_ranks_the_killed_one_is_named(by_ray, kind):
    """The exchange of the third breaks too, and it says so."""
    with lead(3, "cpu", threads=1, start=by_ray if kind == "ray" else None) as workers:
        pids = workers.run(process_ids)
        assert len(set(pids)) == 3
        with pytest.raises(RankLost, match="trainer rank 1 ") as lost:
            workers.run(die_on_rank_1)
        with pytest.raises(TrainingError, match="the trainer ranks are out of step"):
            workers.run(process_ids)
    if kind == "ray":
        assert f"process {pids[1]}) is gone: " in str(lost.value)
        assert "Its last words: I have seen the end" in str(lost.value)
    else:
        assert "was killed by signal 9" in str(lost.value)


def test_more_ranks_than_the_cluster_has_room_for(address, tmp_path):
    start = functools.partial(start_by_ray, address, tmp_path, 1.0)
    refused = r"parallel.trainers = 4: Ray found no room .* one CPU.* the cluster has 3"
    with pytest.raises(TrainingError, match=refused), lead(4, "cpu", start=start):
        pass


def test_each_rank_has_a_gpu_and_the_leader_knows_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with _reserve(2, "cuda", 30.0) as places:
        first, second = (_own_gpu(place) for place in places)
        assert first != second
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"7,{first}")
        assert _own_gpu(places[0]) == 1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES = '7' hides"):
            _own_gpu(places[0])


def rank_process(run_dir):
    """The process whose standard error is the log of rank 1, if any."""
    log = str((run_dir / "workers" / "rank-1.log").absolute())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "fd" / "2") == log:
                return int(folder.name)
        except OSError:
            continue
    return None


def test_a_run_outlives_its_rank_and_ranks_end_with_their_driver(address, tmp_path):
    """Each rank has an engine in its process."""
    arm, alone, found = "one flow with an FP8 cache", tmp_path / "alone", tmp_path / "ray"
    reference = start(words(arm, alone))
    flags = words(arm, found, **{"parallel.trainers": 2, "parallel.address": address})
    process = start(flags)
    wait_for_rows(process, found, 4)
    victim = rank_process(found)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (other := rank_process(found)) in (None, victim) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    _, errors = finish(process)
    assert f"process {victim}) is gone" in errors
    assert "All ranks start again from step-" in errors
    while rank_process(found) == other and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rank_process(found) is None, "a rank outlived its driver"
    told = [event["message"] for event in read_jsonl(found / "events.jsonl")]
    assert any("All ranks start again" in message for message in told)
    run(flags)
    code, errors = finish(reference)
    assert code == 0, errors
    assert_same_run(found, alone)
