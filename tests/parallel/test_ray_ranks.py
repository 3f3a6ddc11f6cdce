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

ray = pytest.importorskip("ray")

from qurl.trainer.parallel.ray import _own_gpu, _reserve, start_by_ray

CASE = "grpo, reference, UAQ"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Three CPUs, and GPUs that Ray only believes in."""
    ray.init(num_cpus=3, num_gpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def by_ray(tmp_path):
    return functools.partial(start_by_ray, "local", tmp_path / "workers", 60.0)


def test_two_ranks_of_ray_are_one(by_ray):
    expected = train(make(CASE))
    with lead(2, "cpu", threads=1, start=by_ray) as workers:
        found = train(LearnerGroup(workers, functools.partial(make, CASE)))
    for row, expected_row in zip(found[0], expected[0], strict=True):
        assert row == pytest.approx(expected_row, rel=CLOSE, abs=CLOSE)
    assert_close(found[2], expected[2])


def process_ids(post):
    return post.ranks.pool(os.getpid())


def speak_and_train(post, others):
    """Rank 1 says something, and is killed while all exchange numbers."""
    if post.ranks.rank == 1:
        os.write(2, b"I have seen the end\n")
        os.kill(os.getpid(), signal.SIGKILL)
    post.ranks.total(1)


@pytest.mark.parametrize("kind", ["ray", "processes"])
def test_of_three_ranks_the_killed_one_is_named(by_ray, kind):
    """The exchange of the third breaks too, and it says so."""
    start = by_ray if kind == "ray" else None
    with lead(3, "cpu", threads=1, start=start) as workers:
        pids = workers.run(process_ids)
        assert len(set(pids)) == 3
        with pytest.raises(RankLost, match="trainer rank 1 ") as lost:
            workers.run(speak_and_train, pids)
        with pytest.raises(TrainingError, match="the trainer ranks are out of step"):
            workers.run(process_ids)
    if kind == "ray":
        assert f"process {pids[1]}) is gone: " in str(lost.value)
        assert "Its last words: I have seen the end" in str(lost.value)
    else:
        assert "was killed by signal 9" in str(lost.value)


def test_a_failure_that_one_rank_has_alone_names_it(by_ray):
    with lead(2, "cpu", threads=1, start=by_ray) as workers:
        group = LearnerGroup(workers, functools.partial(make, "dapo, checkpointed"))
        workers.run(fail_on_rank_1, 1)
        with pytest.raises(TrainingError, match="trainer rank 1: IndexError: a bug on one rank"):
            step(group, batches()[0], 0)


def test_more_ranks_than_the_cluster_has_room_for(tmp_path):
    start = functools.partial(start_by_ray, "local", tmp_path, 1.0)
    refused = r"parallel.trainers = 4: Ray found no room .* one CPU.* the cluster has 3"
    with pytest.raises(TrainingError, match=refused), lead(4, "cpu", start=start):
        pass


def test_each_rank_has_a_gpu_and_the_leader_knows_its_own(monkeypatch):
    @ray.remote(num_cpus=0)
    def find():
        return str(ray.get_gpu_ids()[0])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with _reserve(3, "cuda", 30.0) as places:
        found = ray.get([find.options(**place).remote() for place in places])
        assert sorted(found) == ["0", "1", "2"]
        assert _own_gpu(places[0]) == int(found[0])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"7,{found[0]}")
        assert _own_gpu(places[0]) == 1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES = '7' hides"):
            _own_gpu(places[0])


def rank_process(run_dir):
    """The process whose standard error is the log of rank 1."""
    log = str((run_dir / "workers" / "rank-1.log").absolute())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "fd" / "2") == log:
                return int(folder.name)
        except OSError:
            continue
    pytest.fail("no process writes the log of rank 1")


def test_a_run_whose_rank_is_killed_starts_again(tmp_path):
    """With an engine in each rank's process."""
    arm, alone, found = "dapo, int8, UAQ, reference", tmp_path / "alone", tmp_path / "ray"
    run(words(arm, alone))
    flags = words(arm, found, **{"parallel.trainers": 2, "parallel.address": "local"})
    process = start(flags)
    wait_for_rows(process, found, 4)
    os.kill(rank_process(found), signal.SIGKILL)
    code, errors = finish(process)
    assert code == 0, errors
    assert "trainer rank 1 (" in errors
    assert "All ranks start again from step-" in errors
    told = [event["message"] for event in read_jsonl(found / "events.jsonl")]
    assert any("All ranks start again" in message for message in told)
    assert_same_run(found, alone)


def test_ranks_end_with_their_driver(tmp_path):
    flags = words("ppo", tmp_path, **{"parallel.trainers": 2, "parallel.address": "local"})
    process = start(flags)
    wait_for_rows(process, tmp_path, 1)
    other = rank_process(tmp_path)
    process.kill()
    finish(process)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{other}").exists(), "a rank outlived its driver"
