"""A group of engines is one engine, whoever dies. Workers are threads here; tests/parallel has real
processes, killed with signal 9."""

import pickle
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny_llama, tiny_policy

from qurl.config import build_config
from qurl.errors import EngineError, SyncError
from qurl.ops.ray import WorkerDied
from qurl.ops.shelf import Traffic
from qurl.rollout import build_engine
from qurl.rollout.engine import Asked
from qurl.rollout.group.engine import EngineGroup
from qurl.rollout.group.fleet import MOST_DEATHS, Fleet, Member
from qurl.rollout.group.ray import starter
from qurl.rollout.group.stream import GroupStream
from qurl.rollout.group.wire import Switchboard, Wire
from qurl.rollout.group.worker import EngineSpec, EngineWorker, Progress
from qurl.rollout.local.requests import LengthHistory
from qurl.run.colocated import ColocatedEngines
from qurl.run.engines import choose_carrier
from qurl.trainer.parallel.processes import Post
from qurl.trainer.ranks import Ranks
from qurl.types import Completion, Problem, Rollout, SamplingParams

PARAMS = SamplingParams(max_tokens=12, seed=3, group_size=2)
PROBLEMS = [Problem(str(i), [1, 2, 3 + i], "") for i in range(8)]


class ThreadHandle:
    """A worker in this process, which can be made to die."""

    def __init__(self, worker):
        self.worker, self._pool = worker, ThreadPoolExecutor(8)
        self._open, self.called, self.is_dead = [], set(), False

    def call(self, method, *arguments):
        answer = Future()
        self.called.add(method)
        if self.is_dead:
            answer.set_exception(WorkerDied("it was killed by the test"))
            return answer
        self._open.append(answer)
        self._pool.submit(self._run, answer, method, arguments)
        return answer

    def _run(self, answer, method, arguments):
        try:
            result = getattr(self.worker, method)(*arguments)
            if not self.is_dead:
                answer.set_result(result)
        except Exception as error:
            if not self.is_dead:
                answer.set_exception(error)

    def kill(self):
        if not self.is_dead:
            self.is_dead = True
            for answer in self._open:
                if not answer.done():
                    answer.set_exception(WorkerDied("it was killed by the test"))
            for stream in list(self.worker._plays):
                self.worker.close_stream(stream)

    def last_words(self):
        return ""


class Yard:
    """Starts workers, and remembers them and what the fleet says."""

    def __init__(self, make: Any = EngineWorker):
        self.handles, self.events, self._make = [], [], make

    def start(self, number):
        self.handles.append(ThreadHandle(self._make(threads=1)))
        return self.handles[-1]

    def group(self, model, size=2, quant="int8", max_batch=4, can_resync=True, **options):
        options = {"timeout": 20.0, "notify": self.events.append} | options
        self.fleet = Fleet(size, self.start, **options)
        engine_options = {"max_batch": max_batch, "deterministic": True}
        setup = (model.config, model.generation_config, None, quant, engine_options, "cpu")
        return EngineGroup(self.fleet, EngineSpec("local", *setup), can_resync=can_resync)


@pytest.fixture
def yard():
    yard = Yard()
    yield yard
    for handle in yard.handles:
        handle.kill()


@pytest.fixture(scope="module")
def expected():
    """What one engine samples from the model of seed 0, and of seed 1."""
    engine = build_engine("local", tiny_llama(), quant="int8", max_batch=4, deterministic=True)
    first = engine.generate(PROBLEMS, PARAMS)
    engine.sync(tiny_llama(seed=1), version=1)
    return first, engine.generate(PROBLEMS, PARAMS)


def texts(rollouts):
    return [[(c.token_ids, c.logprobs) for c in r.completions] for r in rollouts]


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_samples_what_one_engine_does(yard, expected, size):
    group = yard.group(tiny_llama(), size)
    report = group.sync(tiny_llama(), version=0)
    assert report.verified
    assert report.canary_gap < 0.1
    assert group.generate(PROBLEMS, PARAMS) == expected[0]
    changed = group.sync(tiny_llama(seed=1), version=1)
    assert changed.code_flip_frac > 0.5
    assert group.generate(PROBLEMS, PARAMS) == expected[1]
    assert len(group.score([1, 2, 3])) == 2
    assert group.traffic.take() > 1000 > group.traffic.take() == 0
    codes = sum(t.numel() for n, t in tiny_llama().named_parameters() if "proj" in n)
    assert codes < report.bytes < 4 * codes
    assert not yard.events


def test_two_formats_share_the_workers(yard, expected):
    model = tiny_llama()
    group = yard.group(model)
    setup = (model.config, model.generation_config, None, "none", {"max_batch": 4}, "cpu")
    full = EngineGroup(yard.fleet, EngineSpec("local", *setup), name="full")
    for version in range(2):
        group.sync(model, version=version)
        assert full.sync(model, version=version).canary_gap < 1e-5
    assert texts(group.generate(PROBLEMS, PARAMS)) == texts(expected[0])
    assert texts(full.generate(PROBLEMS, PARAMS)) != texts(expected[0])


def test_what_a_dead_engine_worked_on_is_asked_of_another(yard, expected):
    group = yard.group(tiny_llama())
    group.sync(tiny_llama(), version=0)
    with group.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        yard.handles[0].kill()
        found = {rollout.problem.id: rollout for rollout in stream}
    assert [found[problem.id] for problem in PROBLEMS] == expected[0]
    [event] = yard.events
    assert "engine 0" in event
    assert "it was killed by the test; another is starting and joins at a sync" in event
    yard.fleet.muster(everyone=True)
    assert [m.versions for m in yard.fleet.members] == [{}, {"actor": 0}]
    group.sync(tiny_llama(seed=1), version=1)
    assert [m.versions for m in yard.fleet.members] == [{"actor": 1}, {"actor": 1}]
    assert group.generate(PROBLEMS, PARAMS) == expected[1]


def test_all_engines_die_and_their_replacements_go_on(yard, expected):
    group = yard.group(tiny_llama())
    group.sync(tiny_llama(), version=0)
    with group.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        for handle in list(yard.handles):
            handle.kill()
        found = {rollout.problem.id: rollout for rollout in stream}
    assert [found[problem.id] for problem in PROBLEMS] == expected[0]
    assert len(yard.handles) == 4


def test_one_step_off_the_run_stops_if_all_engines_die(yard):
    """The trainer has newer weights by then, so replacements cannot get those of this version."""
    group = yard.group(tiny_llama(), can_resync=False)
    group.sync(tiny_llama(), version=0)
    with group.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        for handle in list(yard.handles):
            handle.kill()
        with pytest.raises(EngineError, match="no engine is left that holds version 0"):
            list(stream)


def test_an_engine_that_dies_while_it_is_idle_is_not_asked(yard, expected):
    """Nobody has noticed its death when statistics are read and tokens are scored."""
    group = yard.group(tiny_llama())
    group.sync(tiny_llama(), version=0)
    scores = group.score([1, 2, 3])
    yard.handles[0].kill()
    assert group.kv_saturated_frac is None
    assert torch.equal(group.score([1, 2, 3]), scores)
    assert "engine 0" in yard.events[0]
    assert group.generate(PROBLEMS, PARAMS) == expected[0]


def test_a_group_that_is_closed_starts_no_engine():
    """With rollouts one step ahead, a thread still reads a stream when the run fails."""
    yard = Yard(Hanging)
    group = yard.group(tiny_llama())
    group.sync(tiny_llama(), version=0)
    caught = []

    def read():
        try:
            group.generate(PROBLEMS, PARAMS)
        except EngineError as error:
            caught.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    while not all("poll" in handle.called for handle in yard.handles):
        time.sleep(0.01)
    yard.fleet.close()
    thread.join(20.0)
    assert caught == ["the engines were closed"]
    assert len(yard.handles) == 2
    assert not yard.events


def test_a_worker_without_weights_refuses_to_sample():
    model = tiny_llama()
    setup = (model.config, model.generation_config, None, "int8", {}, "cpu")
    worker = EngineWorker(threads=1)
    worker.build("actor", EngineSpec("local", *setup))
    worker.open("stream", "actor", PARAMS)
    worker.submit("stream", pickle.dumps([Asked(PROBLEMS[0], 2)]))
    with pytest.raises(EngineError, match="no weights have arrived yet"):
        worker.poll("stream", 20.0)


def test_too_few_engines_stop_the_run_with_the_cause(yard):
    group = yard.group(tiny_llama(), min_engines=2)
    group.sync(tiny_llama(), version=0)
    for _ in range(MOST_DEATHS):
        yard.fleet.bury(yard.fleet.members[1], "a test")
    assert "it died 3 times in a row and is not started again" in yard.events[-1]
    with pytest.raises(EngineError, match=r"1 engines are left, and parallel.min_engines = 2: "):
        group.sync(tiny_llama(), version=1)


class Hanging(EngineWorker):
    """One whose engine stops decoding, while the worker still answers."""

    def submit(self, stream, asked):
        pass


def test_an_engine_that_decodes_nothing_is_replaced(expected):
    kinds = iter([Hanging])
    yard = Yard(lambda threads: next(kinds, EngineWorker)(threads))
    group = yard.group(tiny_llama(), timeout=1.5)
    group.sync(tiny_llama(), version=0)
    assert group.generate(PROBLEMS, PARAMS) == expected[0]
    assert "it decoded no token for 1.5 s" in yard.events[0]


class Scripted:
    """A worker that answers each poll with what is next in its script."""

    def __init__(self, *polls):
        self.polls = list(polls)

    def call(self, method, *arguments):
        answer = Future()
        answer.set_result(self.polls.pop(0) if method == "poll" else None)
        return answer


def test_an_engine_is_not_blamed_for_a_reader_that_takes_long(monkeypatch):
    """Tools of episodes run between two rollouts."""
    now, buried = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("qurl.rollout.group.stream.time", clock)

    def progress(*ids, num_steps=5):
        finished = [Completion([1], [-0.5], "", "stop", versions=[0])] * 2
        rollouts = [Rollout(PROBLEMS[i], finished, 0, 1.0) for i in ids]
        return Progress(pickle.dumps(rollouts), num_steps)

    scripts = (progress(), progress(0), progress(2)), (progress(), progress(), progress(1, 3))
    members = [Member(n, Scripted(*polls), {}, Future()) for n, polls in enumerate(scripts)]
    fleet: Any = SimpleNamespace(timeout=10.0, bury=lambda *death: buried.append(death))
    stream = GroupStream(
        fleet,
        "actor",
        PARAMS,
        capacity=4,
        lengths=LengthHistory(),
        traffic=Traffic(),
        shelves=None,
        get_members=lambda: members,
        get_version=lambda: 0,
    )
    stream.submit(PROBLEMS[:4])
    found = []
    for rollout in stream:
        found.append(rollout.problem.id)
        now[0] += 100.0
    assert found == ["0", "2", "1", "3"]
    assert not buried


class Damaging(EngineWorker):
    """One whose engine loses a write."""

    def begin_sync(self, name, version, dtype):
        receiver = self._engines[name]._receiver
        receiver.check = lambda version: (_ for _ in ()).throw(SyncError("a weight is not there"))
        super().begin_sync(name, version, dtype)


def test_an_engine_that_fails_a_sync_is_not_sampled_from(expected):
    kinds = iter([Damaging])
    yard = Yard(lambda threads: next(kinds, EngineWorker)(threads))
    group = yard.group(tiny_llama())
    group.sync(tiny_llama(), version=0)
    assert "a weight is not there; another is starting" in yard.events[0]
    assert [m.versions for m in yard.fleet.members] == [{}, {"actor": 0}]
    assert group.generate(PROBLEMS, PARAMS) == expected[0]


def test_a_sync_that_all_engines_refuse_is_an_error():
    yard = Yard(Damaging)
    group = yard.group(tiny_llama())
    with pytest.raises(SyncError, match="a weight is not there"):
        group.sync(tiny_llama(), version=0)


def test_weights_that_are_not_finite_are_the_trainers_fault(yard):
    group, broken = yard.group(tiny_llama()), tiny_llama()
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(SyncError, match="the trainer's own log-probs are not finite"):
        group.sync(broken, version=0)
    group.sync(tiny_llama(), version=1)


def test_one_stream_at_a_time(yard):
    group = yard.group(tiny_llama())
    with pytest.raises(EngineError, match="no weights have been sent yet"):
        group.generate(PROBLEMS, PARAMS)
    group.sync(tiny_llama(), version=0)
    with group.stream(PARAMS):
        with pytest.raises(EngineError, match="one stream at a time"):
            group.stream(PARAMS)
        with pytest.raises(EngineError, match="until the open stream is closed"):
            group.sync(tiny_llama(), version=1)
    group.sync(tiny_llama(), version=1)


def test_an_error_of_the_engine_is_raised_here(yard):
    group = yard.group(tiny_llama())
    group.sync(tiny_llama(), version=0)
    with pytest.raises(EngineError, match="max_position_embeddings"):
        group.generate(PROBLEMS, SamplingParams(max_tokens=10**6))


@pytest.fixture
def file_system():
    """Names instead of file descriptors, so that memory can be found by pickled tensors alone."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def test_members_that_share_memory_read_the_senders(file_system):
    """Main memory stands for that of a GPU. The sender waits until a chunk has been read, and let
    go of: it could not use the memory again."""
    switchboard = Switchboard(20.0, "ipc")
    address, events, found, lent = switchboard.next_address(), [], [], []
    cpu = torch.device("cpu")

    def receive():
        for chunk in Wire(address, 1, 2, cpu).receive():
            found.append({name: tensor.clone() for name, tensor in chunk.items()})
            lent.extend(map(weakref.ref, chunk.values()))
            time.sleep(0.2)
            events.append("read")

    thread = threading.Thread(target=receive)
    thread.start()
    wire = Wire(address, 0, 2, cpu)
    scalar, codes = torch.tensor(7.0), torch.arange(5, dtype=torch.int8)
    weight = torch.arange(12.0).view(3, 4)
    chunks = [{"codes": codes, "weight": weight.T, "scalar": scalar}, {"half": weight.bfloat16()}]
    chunks.append({"larger": torch.arange(5000.0)})
    for chunk in chunks:
        wire.send(chunk)
        events.append("sent")
        assert not any(reference() is not None for reference in lent)
    assert not any(tensor.is_shared() for chunk in chunks for tensor in chunk.values())
    wire.send({})
    thread.join(20.0)
    assert events == ["read", "sent"] * 3
    assert wire.num_bytes == 5 + 4 * (12 + 1) + 2 * 12 + 4 * 5000
    for chunk, copy in zip(chunks, found, strict=True):
        assert all(torch.equal(copy[name], chunk[name]) for name in chunk)
        assert all(copy[name].dtype == chunk[name].dtype for name in chunk)


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_that_shares_memory_samples_alike(size, yard, expected, file_system):
    group = yard.group(tiny_llama(), size=size, carrier="ipc")
    for version, model in enumerate((tiny_llama(), tiny_llama(seed=1))):
        group.sync(model, version=version)
        assert not any(parameter.is_shared() for parameter in model.parameters())
        assert texts(group.generate(PROBLEMS, PARAMS)) == texts(expected[version])


class Unable(EngineWorker):
    """One that cannot read what is sent."""

    def begin_sync(self, name, version, dtype):
        wire: Any = self._wire
        wire._take = lambda described: (_ for _ in ()).throw(RuntimeError("no memory is left"))
        super().begin_sync(name, version, dtype)


def test_an_engine_says_why_it_cannot_receive():
    """The sender only sees that nobody takes what it sends."""
    yard = Yard(Unable)
    group = yard.group(tiny_llama(), size=1, timeout=0.5)
    with pytest.raises(SyncError, match=r"failed 5 times.*RuntimeError: no memory is left"):
        group.sync(tiny_llama(), version=0)
    assert all("RuntimeError: no memory is left" in event for event in yard.events)


@pytest.mark.parametrize(
    ("num_gpus", "trainers", "engines", "address", "carrier"),
    [
        *[(0, 1, 1, "", "gloo"), (1, 1, 1, "", "ipc"), (2, 1, 1, "", "nccl")],
        *[(2, 1, 2, "", "ipc"), (1, 1, 2, "head:6379", "nccl"), (2, 1, 2, "auto", "nccl")],
        *[(1, 1, 1, "local", "ipc"), (4, 2, 2, "local", "nccl"), (2, 2, 2, "local", "nccl")],
    ],
)
def test_the_carrier_follows_from_who_has_a_gpu(
    num_gpus, trainers, engines, address, carrier, monkeypatch
):
    """Ray on this machine does not know the GPU of a single trainer, and would give it away."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    parallel = {"trainers": trainers, "engines": engines, "address": address}
    assert choose_carrier(build_config({"parallel": parallel}), num_gpus) == carrier


@pytest.mark.parametrize("reserves", [False, True])
def test_an_engine_has_a_gpu_by_number_or_from_ray(reserves, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr("qurl.rollout.group.ray.connect", lambda address: None)
    monkeypatch.setattr(
        "qurl.rollout.group.ray.start_actor",
        lambda kind, inputs, **options: found.append((inputs["gpu"], options["num_gpus"])),
    )
    start = starter("local", tmp_path, gpus=[2, 3], reserves=reserves)
    for number in range(3):
        start(number)
    assert found == ([(None, 1)] * 3 if reserves else [(2, 0), (3, 0), (2, 0)])


@pytest.mark.parametrize("carrier", ["gloo", "ipc"])
def test_a_chunk_that_is_damaged_on_its_way_is_found(carrier, monkeypatch, file_system):
    switchboard, cpu = Switchboard(10.0, carrier), torch.device("cpu")
    address = switchboard.next_address()
    caught = []

    def receive():
        try:
            list(Wire(address, 1, 2, cpu).receive())
        except SyncError as error:
            caught.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    wire = Wire(address, 0, 2, cpu)
    weight = torch.arange(12, dtype=torch.int8).view(3, 4)
    monkeypatch.setattr("qurl.rollout.group.wire.checksums", lambda chunk: {"weight": [0, 0]})
    wire.send({"weight": weight})
    monkeypatch.undo()
    wire.send({})
    thread.join(10.0)
    assert caught == ["weight arrived damaged"]


def test_an_engine_on_every_rank_may_be_built_before_the_one_whose_place_it_takes_is_closed():
    policy = tiny_policy()
    post = Post(Ranks(), {"learner": SimpleNamespace(policy=policy, is_replica=False)})
    workers: Any = SimpleNamespace(
        post=post, has_failed=False, run=lambda function, *given: function(post, *given)
    )
    old = ColocatedEngines(workers, "int8", {})
    new = ColocatedEngines(workers, "int8", {})
    expected = new.packing
    old.close()
    assert new.packing is expected
    with pytest.raises(KeyError):
        _ = old.packing
    new.close()
    assert list(post.held) == ["learner"]
