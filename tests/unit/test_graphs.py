import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from qurl.errors import EngineError
from qurl.rollout import build_engine
from qurl.rollout.local.graphs import (
    ACTIVE,
    COUNTER,
    KEY,
    POSITION,
    TOKEN,
    Rows,
    Stepper,
    key_bucket,
    row_bucket,
)
from qurl.types import Problem, SamplingParams
from tests.models import CPU, tiny_llama

PARAMS = SamplingParams(max_tokens=12, group_size=3, seed=1, ignore_eos=True)
PROBLEMS = [Problem(str(i), tuple(range(5, 9 + 3 * i))) for i in range(4)]


def results(rollouts):
    return [(c.token_ids, c.logprobs) for r in rollouts for c in r.completions]


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(1, 1), (3, 4), (17, 24), (129, 160), (256, 256), (1024, 1024), (1025, 1536), (1537, 2048)],
)
def test_row_buckets(rows, bucket):
    assert row_bucket(rows) == bucket


@pytest.mark.parametrize(
    ("keys", "bucket"), [(1, 1024), (1024, 1024), (1025, 2048), (4096, 4096), (5000, 8192)]
)
def test_key_buckets(keys, bucket):
    assert key_bucket(keys) == bucket


# Rows


def test_rows_start_move_and_empty():
    rows = Rows(4, 2, CPU)
    rows.start_([0, 2, 1], [(10, 11, 12, -13), (30, 31, 32, -33), (20, 21, 22, -23)])
    rows.write_table_(np.array([[1, 2], [3, 4], [5, 6]], np.int32))
    expected = torch.tensor([[10, 20, 30, 0], [11, 21, 31, 0], [12, 22, 32, 0]])
    assert torch.equal(rows.numbers[[TOKEN, POSITION, COUNTER]], expected)
    assert rows.numbers[KEY].tolist() == [-13, -23, -33, 0]
    assert rows.numbers[ACTIVE].tolist() == [1, 1, 1, 0]
    rows.move_([(2, 0)])
    rows.keep_(2)
    assert rows.numbers[:, 0].tolist() == [30, 31, 32, -33, 1]
    assert rows.numbers[:, 1].tolist() == [20, 21, 22, -23, 1]
    assert not rows.numbers[:, 2:].any()
    assert rows.table.tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
    rows.keep_(0)
    assert not rows.numbers.any()
    assert not rows.table.any()


# Steps


def run_steps(engine, num_steps: int):
    """An engine in the midst of a generation."""
    generation = engine.stream(PARAMS)
    generation.submit(PROBLEMS)
    with torch.no_grad():
        for _ in range(num_steps):
            generation._step()
    return generation


@pytest.mark.parametrize("is_bucketed", [False, True])
def test_a_step_moves_its_rows_on_and_leaves_padding_alone(is_bucketed):
    engine = build_engine("local", tiny_llama(), max_batch=20)
    engine.stepper.is_bucketed = is_bucketed
    generation = run_steps(engine, 4)
    numbers = engine.stepper.rows.numbers
    assert numbers[COUNTER].tolist() == [4] * 12 + [0] * 12
    prompts = [len(p.prompt_ids) for p in PROBLEMS for _ in range(3)]
    assert numbers[POSITION, :12].tolist() == [n - 1 + 4 for n in prompts]
    tokens = [generation._transcript.token_ids(i)[-1] for i in range(12)]
    assert numbers[TOKEN, :12].tolist() == tokens
    assert not numbers[:, 12:].any()


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_rounding_up_to_buckets_changes_nothing(quant):
    model = tiny_llama()
    exact = build_engine("local", model, quant=quant).generate(PROBLEMS, PARAMS)
    engine = build_engine("local", model, quant=quant, max_batch=13)
    engine.stepper.is_bucketed = True
    assert results(engine.generate(PROBLEMS, PARAMS)) == results(exact)


def test_results_outlive_the_steps_in_flight():
    """Three steps are launched before the first is read."""
    engine = build_engine("local", tiny_llama())
    engine.stepper.depth = 2
    run_steps(engine, 1)
    stepper = engine.stepper
    steps = [stepper.launch(12, 30) for _ in range(3)]
    tokens = [step()[0].copy() for step in steps]
    assert np.array_equal(tokens[2], stepper.rows.numbers[TOKEN, :12].numpy())
    assert not np.array_equal(tokens[0], tokens[2])
    assert [len(t) for t in tokens] == [12, 12, 12]


# Graphs, with a stand-in that computes what a graph would replay


class FakeGraph:
    def __init__(self, stepper: Stepper, *size) -> None:
        self.replay = lambda: stepper._compute(*size)


@pytest.fixture
def engine(monkeypatch):
    """An engine that believes to have CUDA graphs, and lists what it captures.

    Its cache stays where it is between generations, as on a GPU.
    """
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    engine = build_engine("local", tiny_llama(), max_batch=16, draft_tokens=60)
    stepper = engine.stepper
    stepper.use_graphs = stepper.is_bucketed = True
    engine.captured = []
    monkeypatch.setattr(engine.memory, "release", lambda: None)

    def capture(rows, columns, is_drafted):
        engine.captured.append((rows, columns, stepper._params.has_filter))
        return FakeGraph(stepper, rows, columns, is_drafted)

    monkeypatch.setattr(stepper, "_capture", capture)
    return engine


def test_graphs_are_captured_once_for_each_size(engine):
    """12 requests, then 3 of a problem alone; 1024 keys are 64 pages of 16, more than 32 tokens."""
    expected = build_engine("local", engine._model).generate(PROBLEMS, PARAMS)
    for _ in range(2):
        assert results(engine.generate(PROBLEMS, PARAMS)) == results(expected)
    assert engine.captured == [(16, 64, False)]
    engine.generate(PROBLEMS[:1], PARAMS)
    assert engine.captured[1:] == [(8, 64, False)]
    assert len(engine.stepper._graphs) == 2


def test_steps_with_drafts_have_few_graphs_of_their_own(engine):
    """12 requests have 12, 24, 36, 48 or 60 tokens, then fewer: buckets of 16 to 64."""
    expected = engine.generate(PROBLEMS, PARAMS)
    engine.captured.clear()
    for _ in range(2):
        stream = engine.stream(PARAMS)
        stream.submit(PROBLEMS, (), [[c.token_ids for c in r.completions] for r in expected])
        found = sorted(stream, key=lambda r: r.problem.id)
        assert results(found) == results(expected)
        sizes = {rows for rows, _, _ in engine.captured}
        assert sizes <= {16, 24, 32, 48, 60, 64}
        assert len(sizes) == len(engine.captured) > 1
    assert engine.draft_counts.accepted > 0


def test_filters_have_graphs_of_their_own(engine):
    engine.generate(PROBLEMS, PARAMS)
    params = SamplingParams(max_tokens=12, group_size=3, top_p=0.9)
    engine.generate(PROBLEMS, params)
    assert {has_filter for _, _, has_filter in engine.captured} == {False, True}


def test_other_sampling_parameters_need_no_other_graph(engine):
    """They are rewritten in place."""
    engine.generate(PROBLEMS, PARAMS)
    captured = list(engine.captured)
    greedy = SamplingParams(max_tokens=12, temperature=0, group_size=3, ignore_eos=True)
    rollouts = engine.generate(PROBLEMS, greedy)
    assert engine.captured == captured
    assert results(rollouts) == results(
        build_engine("local", engine._model).generate(PROBLEMS, greedy)
    )


def test_a_sync_in_place_keeps_the_graphs_and_another_model_drops_them(engine):
    engine.generate(PROBLEMS, PARAMS)
    with torch.no_grad():
        for parameter in engine._model.parameters():
            parameter *= 1.01
    engine.sync(engine._model, version=1)
    engine.generate(PROBLEMS, PARAMS)
    assert len(engine.captured) == 1
    engine.sync(copy.deepcopy(engine._model), version=2)
    engine.generate(PROBLEMS, PARAMS)
    assert engine.captured == [(16, 64, False)] * 2
    assert len(engine.stepper._graphs) == 1


def test_a_larger_cache_drops_the_graphs(engine):
    """6 requests, then 12, then 6 in the cache of 12."""
    engine.generate(PROBLEMS[:2], PARAMS)
    engine.generate(PROBLEMS, PARAMS)
    assert engine.captured == [(8, 64, False), (16, 64, False)]
    engine.generate(PROBLEMS[:2], PARAMS)
    assert engine.captured[2:] == [(8, 64, False)]


def test_a_graph_that_cannot_be_captured_is_an_error(engine, monkeypatch):
    def fail(*size):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(engine.stepper, "_capture", fail)
    with pytest.raises(EngineError, match=r"16 rows and 64 pages.*out of memory.*kv_memory_frac"):
        engine.generate(PROBLEMS, PARAMS)


class FakeStream:
    """Takes down who waits for whom."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other) -> None:
        self.log.append((self.name, other.name))


def test_an_exception_before_a_capture_leaves_the_streams_in_order(monkeypatch):
    """What was launched on the side stream until then may still run."""
    engine = build_engine("local", tiny_llama())
    run_steps(engine, 1)
    log = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream("main", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    engine.stepper._stream = FakeStream("side", log)

    def fail(*size):
        log.append("computes")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.stepper, "_compute", fail)
    with pytest.raises(KeyboardInterrupt):
        engine.stepper._capture(8, 1, False)
    assert log == [("side", "main"), "computes", ("main", "side")]


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpu_model():
    return tiny_llama(hidden_size=128, intermediate_size=256).cuda()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kv", ["none", "fp8"])
@pytest.mark.parametrize("quant", ["none", "int8", "fp8"])
def test_graphs_compute_what_single_launches_do(quant, kv):
    """To the bit only in deterministic mode: the two admit requests at other steps."""
    model = gpu_model()
    problems = [Problem(str(i), tuple(range(5, 8 + i))) for i in range(9)]
    for params in (PARAMS, SamplingParams(max_tokens=12, group_size=3, top_p=0.9)):
        options = {"quant": quant, "kv": kv, "max_batch": 8, "deterministic": True}
        graphs = build_engine("local", model, **options)
        eager = build_engine("local", model, **options)
        eager.stepper.use_graphs, eager.stepper.depth = False, 0
        assert results(graphs.generate(problems, params)) == results(
            eager.generate(problems, params)
        )
        assert len(graphs.stepper._graphs) > 1
        assert not eager.stepper._graphs


@pytest.mark.gpu
@needs_gpu
def test_graphs_survive_a_sync_and_see_the_new_weights():
    model = gpu_model()
    engine = build_engine("local", model, quant="int8")
    before = engine.generate(PROBLEMS, PARAMS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    engine.sync(model, version=1)
    graphs = dict(engine.stepper._graphs)
    after = engine.generate(PROBLEMS, PARAMS)
    assert engine.stepper._graphs == graphs != {}
    assert results(after) != results(before)
    fresh = build_engine("local", model, quant="int8")
    assert results(after) == results(fresh.generate(PROBLEMS, PARAMS))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kv", ["none", "fp8"])
def test_a_released_cache_gives_its_memory_back_and_keeps_the_graphs(kv):
    engine = build_engine("local", gpu_model(), kv=kv, release_kv=True, kv_tokens=2**21)
    first = engine.generate(PROBLEMS, PARAMS)
    graphs = dict(engine.stepper._graphs)
    size = engine.memory.num_pages * engine.memory.page_bytes
    assert size >= 2**29
    free, _ = torch.cuda.mem_get_info()
    generation = run_steps(engine, 1)
    assert torch.cuda.mem_get_info()[0] <= free - size
    rollouts = sorted(generation, key=lambda r: r.problem.id)
    assert torch.cuda.mem_get_info()[0] > free - size / 8
    assert results(rollouts) == results(first)
    assert engine.stepper._graphs == graphs != {}
