"""Engines in processes of their own, started by Ray and killed with signal 9: minutes.

make test-parallel
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from models import as_flags, tiny_llama
from test_runs import TINY, assert_same_run, finish, start

from qurl.errors import EngineError
from qurl.rollout import build_engine
from qurl.rollout.group.engine import EngineGroup
from qurl.rollout.group.fleet import Fleet
from qurl.rollout.group.worker import EngineSpec
from qurl.run.directory import read_jsonl
from qurl.types import Problem, SamplingParams

pytest.importorskip("ray")

from qurl.ops.ray import connect
from qurl.rollout.group.ray import starter

PARAMS = SamplingParams(max_tokens=30, seed=3, group_size=2)
PROBLEMS = [Problem(str(i), [1, 2, 3 + i], "") for i in range(12)]


def build(model, fleet):
    options = {"max_batch": 4, "deterministic": True}
    setup = (model.config, model.generation_config, None, "int8", options, "cpu")
    return EngineGroup(fleet, EngineSpec("local", *setup))


@pytest.fixture
def events():
    return []


@pytest.fixture
def fleet(events, tmp_path, monkeypatch):
    monkeypatch.setattr("qurl.rollout.group.fleet.CONNECT_SECONDS", 15.0)
    start = starter("", tmp_path / "workers", threads=1)
    fleet = Fleet(2, start, timeout=120.0, notify=events.append)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def expected():
    engine = build_engine("local", tiny_llama(), quant="int8", max_batch=4, deterministic=True)
    return engine.generate(PROBLEMS, PARAMS)


def process_of(member):
    return int(member.where.result().split()[-1])


def sample_while(fleet, number, signal_number, timeout=None):
    """The rollouts of a group one of whose engines gets a signal in the midst of them."""
    group = build(tiny_llama(), fleet)
    group.sync(tiny_llama(), version=0)
    fleet.timeout = timeout or fleet.timeout
    with group.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        os.kill(process_of(fleet.members[number]), signal_number)
        found = {rollout.problem.id: rollout for rollout in stream}
    return [found[problem.id] for problem in PROBLEMS]


def test_killed_while_it_generates(fleet, events, expected):
    assert sample_while(fleet, 1, signal.SIGKILL) == expected
    assert "engine 1" in events[0]
    assert "another is starting and joins at a sync" in events[0]


class Slow:
    """A shipment in many chunks, with a pause at one of them in which something happens."""

    dtype = torch.float32

    def __init__(self, model, happens):
        from qurl.rollout.canary import ModelShipment

        self._shipment, self._happens = ModelShipment(model), happens

    def pack(self, packing):
        for chunk in self._shipment.pack(packing):
            for number, (name, tensor) in enumerate(chunk.items()):
                if number == 5:
                    self._happens()
                yield {name: tensor}

    def score(self, token_ids, quant):
        return self._shipment.score(token_ids, quant)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_while_it_receives(fleet, events, expected, number):
    """It is noticed, the others get the weights, and a replacement gets them at the next sync."""
    group = build(tiny_llama(), fleet)
    group.sync(tiny_llama(seed=1), version=0)
    victim = process_of(fleet.members[0])
    happened = []

    def strike():
        if not happened:
            happened.append(time.monotonic())
            os.kill(victim, number)
            time.sleep(0.5)

    report = group.sync(Slow(tiny_llama(), strike), version=1)
    assert report.verified
    assert group.generate(PROBLEMS, PARAMS)[0].version == 1
    fleet.muster(everyone=True)
    group.sync(tiny_llama(), version=0)
    assert [m.versions for m in fleet.members] == [{"actor": 0}, {"actor": 0}]
    assert group.generate(PROBLEMS, PARAMS) == expected
    assert any("engine 0" in event for event in events)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{victim}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not Path(f"/proc/{victim}").exists(), "a worker that was given up is still there"


def test_stopped_while_it_generates(fleet, events, expected):
    """Its process is there, and answers nothing."""
    assert sample_while(fleet, 0, signal.SIGSTOP, timeout=3.0) == expected
    assert "it did not answer for 3 s" in events[0]


def test_a_cluster_that_is_not_there():
    import ray

    ray.shutdown()
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1' cannot be reached"):
        connect("127.0.0.1:1")


def words(run_dir, **more):
    settings = TINY | {"run_dir": run_dir, "rollout.deterministic": "true", "algo.kl_coef": 0.01}
    return as_flags(settings | more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    code, errors = finish(start(words(folder)))
    assert code == 0, errors
    return folder


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_run_with_engines_elsewhere_is_a_run_with_one(alone, trainers, tmp_path):
    flags = words(tmp_path, **{"parallel.engines": 2, "parallel.trainers": trainers})
    code, errors = finish(start(flags))
    assert code == 0, errors
    assert_same_run(tmp_path, alone)


def test_one_step_ahead_on_engines_elsewhere(tmp_path):
    """The same as in one process, where the rollouts are sampled before the update."""
    ahead = {"rollout.ahead": 1}
    for folder, more in (("near", {}), ("far", {"parallel.engines": 2})):
        code, errors = finish(start(words(tmp_path / folder, **ahead, **more)))
        assert code == 0, errors
    assert_same_run(tmp_path / "far", tmp_path / "near")


def engine_processes(run_dir):
    """Those whose standard error is a log of this run; other runs on this machine have others."""
    logs, found = str((run_dir / "workers" / "engine-").absolute()), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(folder / "fd" / "2").startswith(logs):
                found.append(int(folder.name))
    return found


def test_random_kills_change_nothing(alone, tmp_path):
    """Engines are killed again and again while the run goes on."""
    process = start(words(tmp_path, **{"parallel.engines": 2, "parallel.timeout": 120}))
    stop, killed = threading.Event(), []

    def kill():
        while not stop.wait(4.0 if killed else 0.2):  # the first at once: the run may be short
            if victims := engine_processes(tmp_path):
                victim = victims[len(killed) % len(victims)]
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
            if len(killed) == 4:
                return

    thread = threading.Thread(target=kill)
    thread.start()
    code, errors = finish(process)
    stop.set()
    thread.join()
    assert code == 0, errors
    assert killed
    assert_same_run(tmp_path, alone)
    told = [
        e["message"] for e in read_jsonl(tmp_path / "events.jsonl") if "is gone" in e["message"]
    ]
    assert len(told) >= len(killed) - 1
