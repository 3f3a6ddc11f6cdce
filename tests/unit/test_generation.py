import copy
import functools
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl.errors import EngineError
from qurl.rollout import build_engine, canary
from qurl.rollout.local import generation as module
from qurl.rollout.local.decoder import Decoder
from qurl.rollout.local.graphs import Rows
from qurl.rollout.local.requests import Transcript
from qurl.rollout.sampler import request_key
from qurl.tasks.tokenizer import build_tokenizer
from qurl.types import Problem, SamplingParams
from tests.models import tiny_llama

MODEL = tiny_llama()
TOKENIZER = build_tokenizer()
PROBLEMS = [Problem(f"p{i}", tuple(range(5, 8 + 4 * i))) for i in range(5)]
STOP = tuple(range(20, 29))
"""Nine of about a hundred tokens end a completion, so that lengths differ."""
PARAMS = SamplingParams(max_tokens=20, group_size=3, seed=2, stop=STOP)


def build(**options):
    return build_engine("local", options.pop("model", MODEL), TOKENIZER, **options)


def start(engine, problems, params):
    stream = engine.stream(params)
    stream.submit(problems)
    return stream


def in_order(rollouts):
    """By the ids of their problems."""
    return sorted(rollouts, key=lambda r: r.problem.id)


def completions(rollouts):
    return [c for r in rollouts for c in r.completions]


def tokens_of(rollouts):
    return [c.token_ids for c in completions(rollouts)]


def largest_gap(a, b) -> float:
    pairs = zip(completions(a), completions(b), strict=True)
    return max(abs(x - y) for c, d in pairs for x, y in zip(c.logprobs, d.logprobs, strict=True))


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


def test_waiting_for_company_saves_prefills_and_changes_no_completion(monkeypatch):
    prefilled = []
    prefill = Decoder.prefill
    monkeypatch.setattr(
        Decoder, "prefill", lambda self, jobs: (prefilled.append(len(jobs)), prefill(self, jobs))
    )
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
    assert [engine.num_steps for engine in engines] == [20, 20]
    token = completions(full[0])[0].token_ids[6]
    end = completions(full[0])[0].token_ids.index(token) + 1
    params = SamplingParams(max_tokens=20, seed=3, stop=[token])
    stopped = [engine.generate(PROBLEMS[:1], params) for engine in engines]
    assert [len(completions(s)[0].token_ids) for s in stopped] == [end, end]
    assert [engine.num_steps - 20 for engine in engines] == [end, end + 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the contract suite does this on the GPU")
def test_the_operations_of_a_gpu_fit_the_loop(monkeypatch):
    """Triton's interpreter stands in for the GPU: row buckets, strided tables, steps in flight."""
    from qurl.rollout.local import engine as engine_module
    from qurl.rollout.local.fused import FusedOps

    monkeypatch.setattr(canary, "_LENGTH", 6)  # the interpreter is slow
    model = tiny_llama(hidden_size=64, intermediate_size=96)
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
    prefilled, prefill = [], Decoder.prefill
    monkeypatch.setattr(
        Decoder, "prefill", lambda self, jobs: (prefilled.extend(jobs), prefill(self, jobs))
    )
    assert engine.generate(PROBLEMS, params) == expected
    assert engine.num_preemptions > 0
    prompts = {tuple(p.prompt_ids[:-1]) for p in PROBLEMS}
    assert {tuple(tokens) for tokens, _ in prefilled} == prompts


# Interruption


def drive(stream, problems, rng: random.Random):
    """Run to the end with stops at random steps, sometimes giving the pages back.

    Problems are submitted and rollouts are taken at random steps too.
    """
    waiting, rollouts = list(problems), []
    while waiting or not stream.is_finished:
        if waiting and rng.random() < 0.5:
            stream.submit([waiting.pop() for _ in range(rng.randrange(1, 1 + len(waiting)))])
        if rng.random() < 0.3:
            rollouts += itertools.islice(stream, 1)
        else:
            stream.run(max_steps=rng.randrange(1, 6))
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
    """Interruptions, resumptions, preemption, late ends and moving rows, all at once."""
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


@pytest.mark.parametrize("depth", [0, 1])
def test_max_steps_counts_decode_steps_and_loses_nothing(reference, depth):
    engine = build(depth=depth)
    generation = start(engine, PROBLEMS, PARAMS)
    assert not generation.run(max_steps=3)
    assert engine.num_steps == 3
    ended = [c for c in completions(reference) if len(c.token_ids) <= 3]
    assert generation.num_tokens == sum(min(len(c.token_ids), 3) for c in completions(reference))
    assert generation.num_completions == len(ended)
    assert generation.run()
    assert in_order(generation) == reference
    assert generation.run()  # and once more, for nothing
    assert generation.num_tokens == sum(len(c.token_ids) for c in completions(reference))


@pytest.mark.parametrize("depth", [0, 1])
def test_interrupt_from_a_callback(reference, depth, monkeypatch):
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.0)
    engine = build(depth=depth)
    generation = start(engine, PROBLEMS, PARAMS)
    calls = []

    def on_progress(num_completions, num_tokens):
        calls.append(num_tokens)
        if len(calls) == 5:
            generation.interrupt()

    engine.on_progress = on_progress
    assert not generation.run()
    assert engine.num_steps == 5
    assert calls[-1] == generation.num_tokens  # what was in flight is counted
    assert generation.run()
    assert in_order(generation) == reference


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("call", ["sync", "generate", "release", "run"])
def test_a_callback_cannot_take_the_pages_away(reference, call, depth):
    engine = build(depth=depth)
    generation = start(engine, PROBLEMS, PARAMS)
    calls = {
        "sync": lambda: engine.sync(MODEL, version=9),
        "generate": lambda: engine.generate(PROBLEMS[:1], PARAMS),
        "release": generation.release,
        "run": generation.run,
    }
    engine.on_progress = lambda *_: calls[call]()
    with pytest.raises(EngineError, match=r"while a generation runs.*on_progress.*interrupt\(\)"):
        generation.run()
    assert engine.version == 0
    engine.on_progress = None
    assert generation.run()
    assert tokens_of(in_order(generation)) == tokens_of(reference)


def test_max_steps_is_a_number_of_steps():
    generation = start(build(), PROBLEMS, PARAMS)
    with pytest.raises(EngineError, match=r"max_steps = -1 must be at least 0, or None"):
        generation.run(max_steps=-1)
    assert not generation.run(max_steps=0)
    assert generation.num_tokens == 0


def test_a_callback_that_always_interrupts_lets_each_run_take_a_step():
    engine = build()
    generation = start(engine, PROBLEMS[:1], PARAMS)
    engine.on_progress = lambda *_: generation.interrupt()
    while not generation.run():
        assert engine.num_steps <= 20 + 1
    assert generation.num_completions == 3


def test_interrupt_from_another_thread():
    params = SamplingParams(max_tokens=40, group_size=8, ignore_eos=True)
    generation = start(build(), PROBLEMS[:2], params)
    timer = threading.Timer(0.02, generation.interrupt)
    timer.start()
    is_finished = generation.run()
    timer.join()
    while not is_finished:
        is_finished = generation.run()
    assert tokens_of(in_order(generation)) == tokens_of(build().generate(PROBLEMS[:2], params))


def test_an_interrupt_before_a_run_stops_it():
    generation = start(build(), PROBLEMS, PARAMS)
    generation.interrupt()
    assert not generation.run()
    assert generation.num_tokens == 0
    assert generation.run()


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


PLACES = ["launch", "read", "append", "complete", "leave", "admit", "prefill", "start_"]


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("countdown", [1, 4])
def test_ctrl_c_anywhere_leaves_the_generation_resumable(
    reference, place, is_after, countdown, monkeypatch
):
    """Tokens in flight are sampled again, and are the same."""
    engine = build(depth=1, max_batch=6)
    generation = start(engine, PROBLEMS, PARAMS)
    generation.run(max_steps=1)
    owner = {
        "launch": engine.stepper,
        "read": engine.stepper,
        "append": generation._transcript,
        "complete": generation,
        "leave": generation._scheduler,
        "admit": generation._scheduler,
        "prefill": engine.stepper.decoder,
        "start_": engine.stepper.rows,
    }[place]
    name = {"complete": "_complete"}.get(place, place)
    bomb = Bomb(getattr(owner, name), countdown, is_after)
    with monkeypatch.context() as patch:
        if place == "prefill":
            patch.setattr(type(owner), name, lambda _, jobs: bomb(jobs))
        else:
            patch.setattr(owner, name, bomb)
        with pytest.raises(KeyboardInterrupt):
            generation.run()
    assert not generation.is_finished
    assert generation.run()
    rollouts = in_order(generation)
    assert tokens_of(rollouts) == tokens_of(reference)
    assert largest_gap(rollouts, reference) < 1e-4


# Pages between generations


def test_another_generation_takes_the_pages_and_both_can_go_on(reference):
    engine = build()
    first = start(engine, PROBLEMS, PARAMS)
    first.run(max_steps=4)
    num_tokens = first.num_tokens
    second = start(engine, PROBLEMS[::-1], PARAMS)
    second.run(max_steps=2)
    assert first.num_tokens == num_tokens
    assert first.run()
    assert second.run()
    assert tokens_of(in_order(first)) == tokens_of(in_order(second)) == tokens_of(reference)


def test_pages_stay_until_they_are_released(monkeypatch):
    engine = build()
    generation = start(engine, PROBLEMS, PARAMS)
    generation.run(max_steps=2)
    assert engine.memory.num_pages > 0
    acquired, acquire = [], engine.memory.acquire
    monkeypatch.setattr(engine.memory, "acquire", lambda n: acquired.append(n) or acquire(n))
    generation.run(max_steps=2)
    assert acquired == []
    generation.release()
    assert engine.memory.num_pages == 0
    generation.run(max_steps=2)
    assert len(acquired) == 1
    generation.run()
    assert engine.memory.num_pages == 0


def test_a_failed_generation_holds_no_memory():
    engine = build(model=copy.deepcopy(MODEL))
    engine.weights.lm_head.data.fill_(torch.nan)
    with pytest.raises(EngineError, match=r"'p0'.*token 0 is nan"):
        engine.generate(PROBLEMS, PARAMS)
    assert engine.memory.num_pages == 0


# Streams


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_batch", [4, 64])
def test_rollouts_come_as_soon_as_their_group_has_finished(reference, depth, max_batch):
    """The first of them when one group has ended, and others go on."""
    engine = build(depth=depth, max_batch=max_batch)
    with start(engine, PROBLEMS, PARAMS) as stream:
        rollouts, num_tokens = [], []
        for rollout in stream:
            rollouts.append(rollout)
            num_tokens.append(stream.num_tokens)
    assert in_order(rollouts) == reference
    assert num_tokens[0] < num_tokens[-1] == sum(len(t) for t in tokens_of(reference))
    assert engine.memory.num_pages == 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_batch", [2, 7, 64])
def test_problems_may_come_later_and_be_longer(reference, depth, max_batch, deterministic):
    """Each problem is longer than those before it, so that the cache has to grow."""
    engine = build(depth=depth, max_batch=max_batch, page_size=4, deterministic=deterministic)
    waiting, rollouts = PROBLEMS[1:], []
    with start(engine, PROBLEMS[:1], PARAMS) as stream:
        stream.run(max_steps=2)
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
    assert stream._num_rows <= 3 * (5 + depth)
    assert stream.num_tokens == sum(len(t) for t in tokens_of(expected))


def test_a_stream_can_be_left_and_gone_on_with(reference):
    """By break, by a sync between two rollouts, and by interrupt from a callback."""
    engine = build(depth=1, max_batch=6)
    stream = start(engine, PROBLEMS, PARAMS)
    rollouts = [next(iter(stream))]
    for rollout in stream:
        rollouts.append(rollout)
        engine.sync(MODEL, version=len(rollouts))
        if len(rollouts) == 3:
            break
    engine.on_progress = lambda *_: stream.interrupt()
    for _ in range(100):
        rollouts += stream
    assert stream.is_finished
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
    generation.run(max_steps=5)
    engine.sync(other, version=4)
    assert generation.run()
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


# Order and progress


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
        stream.run(max_steps=0)
        assert [group.problem for group in stream._submitted] == PROBLEMS
        engine.generate(PROBLEMS, PARAMS)


def test_progress_counts_unfinished_completions_and_is_seldom_told(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock) * 0.1)
    seen = []
    engine = build(on_progress=lambda *counts: seen.append(counts))
    params = SamplingParams(max_tokens=20, group_size=2, ignore_eos=True)
    engine.generate(PROBLEMS[:1], params)
    assert seen[0] == (0, 2)
    assert seen[-1] == (2, 40)
    # A look at the clock is 0.1 s, and telling takes one more: one in five or six steps.
    assert 4 <= len(seen) <= 6


# The transcript


def test_the_transcript_keeps_tokens_apart():
    transcript = Transcript(3, max_tokens=4)
    transcript.append(np.array([2, 0]), np.array([7, 5]), np.array([-1.0, -2.0]), version=1)
    transcript.append(np.array([0, 1]), np.array([6, 9]), np.array([-3.0, -4.0]), version=2)
    assert [transcript.token_ids(i) for i in range(3)] == [[5, 6], [9], [7]]
    assert [transcript.logprobs(i) for i in range(3)] == [[-2.0, -3.0], [-4.0], [-1.0]]
    assert [transcript.tail(0, n) for n in (0, 1, 2, 3)] == [[], [6], [5, 6], [5, 6]]
    assert [transcript.versions(i) for i in range(3)] == [[1, 2], [2], [1]]


def test_the_transcript_grows_and_uses_rows_again():
    transcript = Transcript(2, max_tokens=3)
    one = np.array([0.0])
    transcript.append(np.array([0]), np.array([5]), one, version=1)
    transcript.reserve(3)
    transcript.append(np.array([3]), np.array([6]), one, version=2)
    assert [transcript.token_ids(i) for i in range(4)] == [[5], [], [], [6]]
    transcript.clear(slice(0, 1))
    transcript.append(np.array([0]), np.array([7]), one, version=3)
    assert [transcript.versions(i) for i in range(4)] == [[3], [], [], [2]]
    assert (transcript.token_ids(0), transcript.num_tokens) == ([7], 3)
