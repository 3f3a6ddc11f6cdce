import copy
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl.errors import EngineError
from qurl.rollout import build_engine, canary
from qurl.rollout.local import generation as module
from qurl.rollout.local.graphs import Rows
from qurl.rollout.local.requests import Transcript
from qurl.rollout.sampler import request_key
from qurl.tasks.tokenizer import build_tokenizer
from qurl.types import Problem, SamplingParams
from tests.models import completions, largest_gap, tiny_llama, tokens_of

MODEL = tiny_llama()
TOKENIZER = build_tokenizer()
PROBLEMS = [Problem(f"p{i}", tuple(range(5, 8 + 4 * i))) for i in range(5)]
STOP = tuple(range(20, 29))
"""Nine of about a hundred tokens end a completion, so that lengths differ."""
PARAMS = SamplingParams(max_tokens=20, group_size=3, seed=2, stop=STOP)


def build(model=MODEL, depth=0, **options):
    engine = build_engine("local", model, TOKENIZER, **options)
    engine.stepper.depth = depth
    return engine


@torch.no_grad()
def run(stream, num_steps):
    """Take so many steps, and read them."""
    for _ in range(num_steps):
        if is_open(stream):
            stream._step()
    stream._drain()


def is_open(stream):
    return bool(stream._requests or stream._submitted)


def start(engine, problems, params):
    stream = engine.stream(params)
    stream.submit(problems)
    return stream


def in_order(rollouts):
    """By the ids of their problems."""
    return sorted(rollouts, key=lambda r: r.problem.id)


@pytest.fixture(scope="module")
def reference():
    rollouts = build().generate(PROBLEMS, PARAMS)
    lengths = {len(c.token_ids) for c in completions(rollouts)}
    assert len(lengths) > 3, "the tests below need completions of several lengths"
    assert {c.finish for c in completions(rollouts)} == {"stop", "length"}
    return rollouts


# Pipelining


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_batch", [1, 4, 64])
def test_steps_in_flight_change_nothing(reference, depth, max_batch):
    """Ends are seen late, but nothing that was sampled beyond them is kept."""
    engine = build(depth=depth, max_batch=max_batch)
    assert engine.generate(PROBLEMS, PARAMS) == reference


def watch_prefills(monkeypatch):
    """The jobs of each prefill to come."""
    prefilled, prefill = [], module.prefill_jobs
    monkeypatch.setattr(
        module, "prefill_jobs", lambda *args: (prefilled.append(args[2]), prefill(*args))
    )
    return prefilled


def test_waiting_for_company_saves_prefills_and_changes_no_completion(monkeypatch):
    prefilled = watch_prefills(monkeypatch)
    problems = [Problem(f"p{i}", (5, 6, 7, i)) for i in range(40)]
    params = SamplingParams(max_tokens=20, seed=2, stop=STOP)
    rollouts, counts = [], []
    for patience in (0.0, 1.0):
        engine = build(max_batch=8)
        engine.patience = patience
        rollouts.append(engine.generate(problems, params))
        counts.append(len(prefilled))
        prefilled.clear()
    assert rollouts[0] == rollouts[1]
    assert counts[1] < counts[0] / 2


def test_a_late_end_costs_a_step_and_the_longest_length_none():
    """With an end of sequence at token n the pipeline launches n + 1 steps, but never beyond
    max_tokens, which is known ahead."""
    free = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    engines = [build(depth=depth) for depth in (0, 1)]
    full = [engine.generate(PROBLEMS[:1], free) for engine in engines]
    assert [engine.stepper.num_launched for engine in engines] == [20, 20]
    token = completions(full[0])[0].token_ids[6]
    end = completions(full[0])[0].token_ids.index(token) + 1
    params = SamplingParams(max_tokens=20, seed=3, stop=[token])
    stopped = [engine.generate(PROBLEMS[:1], params) for engine in engines]
    assert [len(completions(s)[0].token_ids) for s in stopped] == [end, end]
    assert [engine.stepper.num_launched - 20 for engine in engines] == [end, end + 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the contract suite does this on the GPU")
def test_the_operations_of_a_gpu_fit_the_loop(monkeypatch):
    """Triton's interpreter stands in for the GPU: row buckets, strided tables, steps in flight."""
    from qurl.rollout.local import engine as engine_module
    from qurl.rollout.local.fused import FusedOps

    monkeypatch.setattr(canary, "_LENGTH", 6)  # the interpreter is slow
    model = tiny_llama(num_hidden_layers=1)
    params = SamplingParams(max_tokens=2, group_size=2, seed=1, ignore_eos=True)
    expected = build(model=model, quant="int8", kv="fp8").generate(PROBLEMS[:2], params)
    weights = functools.partial(engine_module.Weights, native_codes=True)
    monkeypatch.setattr(engine_module, "Weights", weights)
    monkeypatch.setattr(engine_module, "choose_ops", FusedOps)
    engine = build(model=model, quant="int8", kv="fp8", depth=1, max_batch=3, page_size=4)
    engine.stepper.is_bucketed = True
    rollouts = engine.generate(PROBLEMS[:2], params)
    assert tokens_of(rollouts) == tokens_of(expected)
    assert largest_gap(rollouts, expected) < 1e-4


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_strings_end_completions(depth):
    """The slow path: a string may end at any token."""
    free = SamplingParams(max_tokens=20, group_size=4, seed=5, ignore_eos=True)
    text = completions(build().generate(PROBLEMS[:1], free))[0].text
    params = SamplingParams(max_tokens=20, group_size=4, seed=5, stop=[text[7:9]])
    rollouts = build(depth=depth).generate(PROBLEMS[:1], params)
    first = completions(rollouts)[0]
    assert first.finish == "stop"
    assert first.text == text[: text.index(text[7:9])]
    assert rollouts == build().generate(PROBLEMS[:1], params)


def test_stop_strings_look_at_no_more_than_the_tail(monkeypatch):
    """Else a completion of n tokens would be read n times."""
    decoded, full = [], []
    decode, token_ids = TOKENIZER.decode, Transcript.token_ids
    monkeypatch.setattr(
        TOKENIZER, "decode", lambda ids, **kw: decoded.append(len(ids)) or decode(ids, **kw)
    )
    monkeypatch.setattr(
        Transcript, "token_ids", lambda self, i: full.append(i) or token_ids(self, i)
    )
    params = SamplingParams(max_tokens=30, group_size=2, seed=5, stop=["no"])
    rollouts = build().generate(PROBLEMS[:1], params)
    lengths = [len(c.token_ids) for c in completions(rollouts)]
    assert min(lengths) > 12, "the test needs completions longer than the tail"
    assert sorted(full) == [0, 0, 1]  # to prefill the prompt, and for each result
    # Two characters: 12 tokens at most, besides each completion's text at its end.
    for length in lengths:
        decoded.remove(length)
    assert max(decoded) == 12


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_preemption_with_steps_in_flight(quant, depth):
    params = SamplingParams(max_tokens=24, group_size=3, seed=2, ignore_eos=True)
    expected = build(quant=quant).generate(PROBLEMS, params)
    engine = build(quant=quant, depth=depth, kv_tokens=48, page_size=4)
    rollouts = engine.generate(PROBLEMS, params)
    assert engine.num_preemptions > 0
    assert tokens_of(rollouts) == tokens_of(expected)


@pytest.mark.parametrize("depth", [0, 1])
def test_deterministic_preemption_saves_pages_and_changes_no_bit(depth, monkeypatch):
    """Nothing but prompts is ever prefilled."""
    params = SamplingParams(max_tokens=24, group_size=3, seed=2, ignore_eos=True)
    expected = build(quant="int8").generate(PROBLEMS, params)
    engine = build(quant="int8", depth=depth, kv_tokens=48, page_size=4, deterministic=True)
    prefilled = watch_prefills(monkeypatch)
    assert engine.generate(PROBLEMS, params) == expected
    assert engine.num_preemptions > 0
    prompts = {tuple(p.prompt_ids[:-1]) for p in PROBLEMS}
    assert {tuple(tokens) for jobs in prefilled for tokens, _ in jobs} == prompts


# Pauses


def drive(stream, problems, rng: random.Random):
    """Run to the end with pauses at random steps, sometimes giving the pages back.

    Problems are submitted and rollouts are taken at random steps too.
    """
    waiting, rollouts = list(problems), []
    while waiting or is_open(stream):
        if waiting and rng.random() < 0.5:
            stream.submit([waiting.pop() for _ in range(rng.randrange(1, 1 + len(waiting)))])
        if rng.random() < 0.3:
            rollouts += itertools.islice(stream, 1)
        else:
            run(stream, rng.randrange(1, 6))
        if rng.random() < 0.3:
            stream.release()
    return in_order([*rollouts, *stream])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    depth=st.integers(0, 2),
    max_batch=st.sampled_from([1, 3, 8, 64]),
    spare_pages=st.integers(0, 20),
    deterministic=st.booleans(),
)
def test_any_course_gives_the_same_tokens(seed, depth, max_batch, spare_pages, deterministic):
    """Pauses, preemption, late ends and moving rows, all at once."""
    rng = random.Random(seed)
    problems = [
        Problem(str(i), tuple(rng.randrange(5, 90) for _ in range(rng.randrange(1, 16))))
        for i in range(rng.randrange(1, 6))
    ]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 24), group_size=rng.randrange(1, 4), seed=seed, stop=STOP
    )
    expected = build().generate(problems, params)
    page_size = rng.choice([2, 4, 5])
    longest = max(len(p.prompt_ids) for p in problems) + params.max_tokens - 1
    engine = build(
        depth=depth,
        max_batch=max_batch,
        page_size=page_size,
        kv_tokens=(-(-longest // page_size) + spare_pages) * page_size,
        deterministic=deterministic,
    )
    rollouts = drive(engine.stream(params), problems, rng)
    assert tokens_of(rollouts) == tokens_of(expected)
    assert largest_gap(rollouts, expected) < 1e-4
    assert [c.finish for c in completions(rollouts)] == [c.finish for c in completions(expected)]


class Bomb:
    """Raises KeyboardInterrupt in one call of a function, before or after it."""

    def __init__(self, function, countdown: int, is_after: bool) -> None:
        self.function, self.countdown, self.is_after = function, countdown, is_after

    def __call__(self, *args, **kwargs):
        self.countdown -= 1
        if self.countdown == 0 and not self.is_after:
            raise KeyboardInterrupt
        result = self.function(*args, **kwargs)
        if self.countdown == 0:
            raise KeyboardInterrupt
        return result


PLACES = ["launch", "_read", "append", "_complete", "leave", "admit", "prefill_jobs", "start_"]


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("countdown", [1, 4])
def test_ctrl_c_anywhere_leaves_the_engine_usable(
    reference, place, is_after, countdown, monkeypatch
):
    engine = build(depth=1, max_batch=6)
    generation = start(engine, PROBLEMS, PARAMS)
    run(generation, 1)
    owner = {
        "launch": engine.stepper,
        "_read": generation,
        "append": generation._transcript,
        "_complete": generation,
        "leave": generation._scheduler,
        "admit": generation._scheduler,
        "prefill_jobs": module,
        "start_": engine.stepper.rows,
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, Bomb(getattr(owner, place), countdown, is_after))
        with pytest.raises(KeyboardInterrupt):
            list(generation)
    assert not engine.memory.is_mapped
    assert list(generation) == [], "what was unfinished is dropped"
    assert engine.generate(PROBLEMS, PARAMS) == reference


# Pages between generations


def test_another_generation_takes_the_pages_and_both_can_go_on(reference):
    engine = build()
    first = start(engine, PROBLEMS, PARAMS)
    run(first, 4)
    counts = first._transcript.counts.copy()
    second = start(engine, PROBLEMS[::-1], PARAMS)
    run(second, 2)
    assert (first._transcript.counts == counts).all()
    assert tokens_of(in_order(first)) == tokens_of(in_order(second)) == tokens_of(reference)


def test_pages_stay_until_they_are_released(monkeypatch):
    engine = build()
    generation = start(engine, PROBLEMS, PARAMS)
    run(generation, 2)
    assert engine.memory.is_mapped
    acquired, acquire = [], engine.memory.acquire
    monkeypatch.setattr(engine.memory, "acquire", lambda n: acquired.append(n) or acquire(n))
    run(generation, 2)
    assert acquired == []
    generation.release()
    assert not engine.memory.is_mapped
    run(generation, 2)
    assert len(acquired) == 1
    list(generation)
    assert not engine.memory.is_mapped


def test_a_failed_generation_holds_no_memory():
    engine = build(model=copy.deepcopy(MODEL))
    engine.weights.lm_head.data.fill_(torch.nan)
    with pytest.raises(EngineError, match=r"'p0'.*token 0 is nan"):
        engine.generate(PROBLEMS, PARAMS)
    assert not engine.memory.is_mapped


# Streams


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_batch", [4, 64])
def test_rollouts_come_as_soon_as_their_group_has_finished(reference, depth, max_batch):
    """The first of them when one group has ended, and others go on."""
    engine = build(depth=depth, max_batch=max_batch)
    with start(engine, PROBLEMS, PARAMS) as stream:
        rollouts, num_steps = [], []
        for rollout in stream:
            rollouts.append(rollout)
            num_steps.append(engine.stepper.num_launched)
    assert in_order(rollouts) == reference
    assert num_steps[0] < num_steps[-1]
    assert not engine.memory.is_mapped


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_batch", [2, 7, 64])
def test_problems_may_come_later_and_be_longer(reference, depth, max_batch, deterministic):
    """Each problem is longer than those before it, so that the cache has to grow."""
    engine = build(depth=depth, max_batch=max_batch, page_size=4, deterministic=deterministic)
    waiting, rollouts = PROBLEMS[1:], []
    with start(engine, PROBLEMS[:1], PARAMS) as stream:
        run(stream, 2)
        stream.submit([waiting.pop(0)])
        for rollout in stream:
            rollouts.append(rollout)
            stream.submit([waiting.pop(0)] if waiting else [])
    assert tokens_of(in_order(rollouts)) == tokens_of(reference)
    assert largest_gap(in_order(rollouts), reference) < (1e-9 if deterministic else 1e-4)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_long_stream_uses_its_rows_again(depth):
    problems = [Problem(f"p{i:02}", (5, 6, 7, i)) for i in range(40)]
    expected = build().generate(problems, PARAMS)
    engine, waiting, rollouts = build(depth=depth), problems[4:], []
    with start(engine, problems[:4], PARAMS) as stream:
        for rollout in stream:
            rollouts.append(rollout)
            stream.submit([waiting.pop(0)] if waiting else [])
    assert tokens_of(in_order(rollouts)) == tokens_of(expected)
    assert stream._transcript.num_rows <= 3 * (5 + depth)


def test_a_stream_can_be_left_and_gone_on_with(reference):
    """By break, and for a sync between two rollouts."""
    engine = build(depth=1, max_batch=6)
    stream = start(engine, PROBLEMS, PARAMS)
    rollouts = [next(iter(stream))]
    for rollout in stream:
        rollouts.append(rollout)
        engine.sync(MODEL, version=len(rollouts))
        if len(rollouts) == 3:
            break
    rollouts += stream
    assert tokens_of(in_order(rollouts)) == tokens_of(reference)
    assert all(list(c.versions) == sorted(c.versions) for c in completions(rollouts))
    assert max(c.versions[-1] for c in completions(rollouts)) == 3


# Versions


def test_a_resumed_generation_goes_on_with_the_new_weights():
    """Tokens before the sync are the old weights', those after it the new ones'. A rollout has the
    oldest version that sampled any of it: with three rows, that of the first two problems."""
    model, other = copy.deepcopy(MODEL), tiny_llama(seed=1)
    params = SamplingParams(max_tokens=12, group_size=2, seed=2, ignore_eos=True)
    engine = build(model=model, max_batch=3)
    engine.sync(model, version=3)
    generation = start(engine, PROBLEMS, params)
    run(generation, 5)
    engine.sync(other, version=4)
    rollouts = in_order(generation)
    assert [r.version for r in rollouts] == [3, 3, 4, 4, 4]
    assert [c.versions for c in completions(rollouts)] == [(3,) * 5 + (4,) * 7] * 3 + [
        (4,) * 12
    ] * 7
    old, new = (completions(build(model=m).generate(PROBLEMS, params)) for m in (model, other))
    for i, completion in enumerate(completions(rollouts)):
        if i >= 3:
            assert completion.token_ids == new[i].token_ids
            continue
        assert completion.token_ids[:5] == old[i].token_ids[:5]
        assert completion.token_ids[5:] != old[i].token_ids[5:]
        ids = [*PROBLEMS[i // 2].prompt_ids, *completion.token_ids]
        scores = build(model=other).score(ids)[-7:]
        torch.testing.assert_close(torch.tensor(completion.logprobs[5:]), scores, atol=1e-4, rtol=0)


# Order


def test_the_longest_expected_start_first(monkeypatch):
    engine = build(max_batch=2)
    params = SamplingParams(max_tokens=20, seed=4, stop=STOP)
    first = engine.generate(PROBLEMS, params)
    lengths = {r.problem.id: len(r.completions[0].token_ids) for r in first}
    assert len(set(lengths.values())) > 3
    known = [Problem(f"{p.id}@1", p.prompt_ids) for p in PROBLEMS]
    keys, start = [], Rows.start_
    monkeypatch.setattr(
        Rows,
        "start_",
        lambda self, rows, numbers: (
            keys.extend(n[3] for n in numbers),
            start(self, rows, numbers),
        ),
    )
    problems = [*known, Problem("new", (7, 8))]
    rollouts = engine.generate(problems, params)
    names = {request_key(4, p.id, 0): p.id.removesuffix("@1") for p in problems}
    order = [names[key] for key in keys]
    assert order[0] == "new"
    assert [lengths[name] for name in order[1:]] == sorted(lengths.values(), reverse=True)
    assert [r.problem for r in rollouts] == problems


def test_without_more_requests_than_rows_the_order_is_the_callers():
    engine = build()
    for _ in range(2):
        stream = start(engine, PROBLEMS, PARAMS)
        assert [one.problem for one in stream._submitted] == PROBLEMS
        engine.generate(PROBLEMS, PARAMS)


# The transcript


def test_the_transcript_keeps_tokens_apart():
    transcript = Transcript(max_tokens=4)
    assert transcript.open(3, ()) == [0, 1, 2]
    transcript.append(np.array([2, 0]), np.array([7, 5]), np.array([-1.0, -2.0]), version=1)
    transcript.append(np.array([0, 1]), np.array([6, 9]), np.array([-3.0, -4.0]), version=2)
    assert [transcript.token_ids(i) for i in range(3)] == [[5, 6], [9], [7]]
    assert [transcript.logprobs(i) for i in range(3)] == [[-2.0, -3.0], [-4.0], [-1.0]]
    assert [transcript.tail(0, n) for n in (0, 1, 2, 3)] == [[], [6], [5, 6], [5, 6]]
    assert [transcript.versions(i) for i in range(3)] == [[1, 2], [2], [1]]


def test_the_transcript_grows_and_uses_rows_again():
    transcript = Transcript(max_tokens=3)
    transcript.open(2, ())
    one = np.array([0.0])
    transcript.append(np.array([0]), np.array([5]), one, version=1)
    assert transcript.open(2, ()) == [2, 3]
    transcript.append(np.array([3]), np.array([6]), one, version=2)
    assert [transcript.token_ids(i) for i in range(4)] == [[5], [], [], [6]]
    transcript.close(0)
    transcript.close(1)
    assert transcript.is_closed.tolist() == [True, True, False, False]
    assert transcript.open(1, busy={0}) == [4]
    assert transcript.open(1, busy={1}) == [0]
    transcript.append(np.array([0]), np.array([7]), one, version=3)
    assert [transcript.versions(i) for i in range(4)] == [[3], [], [], [2]]
    assert transcript.token_ids(0) == [7]
