"""Drafts from earlier responses: the index, the windows, and that no token changes."""

import functools
import random

import numpy as np
import pytest
import torch

from qurl.config import build_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.errors import ConfigError, DataError
from qurl.rollout import build_engine, canary
from qurl.rollout.local.drafts import WINDOWS, Drafter, Pace
from qurl.rollout.local.patterns import END, LONGEST_PATTERN, MOST_PLACES, NUM_LEADING, PatternIndex
from qurl.run.assembly import build_actor
from qurl.tasks.tokenizer import build_tokenizer
from qurl.types import Problem, SamplingParams
from tests.models import tiny_llama, tiny_policy

MODEL = tiny_llama()
PROBLEMS = [Problem(f"p{i}", tuple(range(5, 8 + 4 * i))) for i in range(5)]
STOP = tuple(range(20, 29))
"""Nine of about a hundred tokens end a completion, so that lengths differ."""
PARAMS = SamplingParams(max_tokens=20, group_size=3, seed=2, stop=STOP)


def build(model=MODEL, depth=0, tokenizer=None, draft_tokens=192, **options):
    engine = build_engine("local", model, tokenizer, draft_tokens=draft_tokens, **options)
    engine.stepper.depth = depth
    engine.drafter.pace = None  # drafts in every step
    return engine


def responses(rollouts):
    return [[c.token_ids for c in r.completions] for r in rollouts]


def sample(engine, problems, params, earlier):
    with engine.stream(params) as stream:
        stream.submit(problems, (), earlier)
        return sorted(stream, key=lambda r: r.problem.id)


@functools.cache
def without_drafts(quant="none", kv="none", seed=2):
    params = SamplingParams(max_tokens=20, group_size=3, seed=seed, stop=STOP)
    return build_engine("local", MODEL, quant=quant, kv=kv).generate(PROBLEMS, params)


# The index


def brute_force(prompt, texts, tail, length, shortest):
    """The same draft from a list of all places, without any index."""
    known = [[*prompt, END], *([*prompt[-NUM_LEADING:], *text, END] for text in texts)]
    for size in range(min(LONGEST_PATTERN, len(tail)), shortest - 1, -1):
        pattern = tail[-size:]
        places = [
            (text, at + size)
            for text in known
            for at in range(len(text) - size)
            if text[at : at + size] == pattern
        ]
        draft, share = [], 1.0
        while places and len(draft) < length:
            following = [text[at] for text, at in places]
            token = max(sorted(set(following)), key=following.count)
            share *= following.count(token) / len(following)
            if token == END or share < 0.1:
                break
            draft.append(token)
            places = [(text, at + 1) for text, at in places if text[at] == token]
        if draft:
            return draft
    return []


@pytest.mark.parametrize("seed", range(6))
def test_an_index_drafts_what_a_search_through_all_places_finds(seed):
    rng = random.Random(seed)
    vocabulary = rng.choice([2, 3, 6])
    text = lambda most: [rng.randrange(vocabulary) for _ in range(rng.randint(0, most))]  # noqa: E731
    prompt, texts = [0, *text(12)], [text(40) for _ in range(rng.randint(1, 6))]
    responses = [torch.tensor(t, dtype=torch.int32) for t in texts]
    indices = {shortest: PatternIndex(prompt, responses, shortest) for shortest in (3, 4)}
    num_drafts = 0
    for _ in range(150):
        tail, length, shortest = text(9) or [1], rng.randint(1, 16), rng.choice([3, 4])
        draft = indices[shortest].draft(tail, length)
        assert draft == brute_force(prompt, texts, tail, length, shortest)
        num_drafts += bool(draft)
    assert num_drafts > 20


def test_an_index_worked_by_hand():
    """After 1 2 3 4 come 5 (twice) and 6 (once); after 5 come 7 and an end. So 5 has the share 2/3,
    and of the two that tie behind it the end, which is no token, comes first."""
    texts = [[1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    index, index_of_3 = (PatternIndex([9, 9], texts, shortest) for shortest in (4, 3))
    assert len(index.find([1, 2, 3, 4])) == 3
    assert index.draft([1, 2, 3, 4], 16) == [5]
    assert index.draft([2, 3, 4], 16) == []
    assert index_of_3.draft([2, 3, 4], 16) == [5]
    assert index.draft([8, 1, 2, 3, 4, 6], 16) == []
    assert index.draft([9, 9, 1, 2], 16) == [3, 4, 5]


def test_a_text_that_loops_keeps_few_places():
    """Each draft walks through the places of its run: one draft must not read a whole text."""
    index = PatternIndex([0], [[7] * 4096] * 8, 4)
    assert len(index.find([7, 7, 7, 7])) == MOST_PLACES
    assert index.draft([7] * 7, 16) == [7] * 16


def test_a_draft_ends_where_its_share_falls_below_a_tenth():
    """Eleven responses differ in the fifth token: each has a share of 1/11."""
    texts = [[1, 2, 3, 4, 10 + i] for i in range(11)]
    assert PatternIndex([0], texts, 4).draft([0, 1, 2, 3], 16) == [4]
    assert PatternIndex([0], texts[:10], 4).draft([0, 1, 2, 3], 16) == [4, 10]


# Windows


def test_windows_worked_by_hand():
    double, add = WINDOWS["double_halve"], WINDOWS["add_reset"]
    window, seen = 2, []
    for drafted, accepted in [(2, 2), (4, 4), (8, 8), (16, 16), (16, 3), (8, 7), (3, 3), (2, 0)]:
        window = double.resize(window, drafted, accepted)
        seen.append(window)
    assert seen == [4, 8, 16, 16, 8, 4, 2, 2]  # (3, 3): right, but shorter than the window of 4
    window, seen = 2, []
    for drafted, accepted in [(2, 2), (4, 4), (3, 3), (8, 7), (2, 2)]:
        window = add.resize(window, drafted, accepted)
        seen.append(window)
    assert seen == [4, 6, 8, 2, 4]
    assert add.resize(32, 32, 32) == 32


@pytest.mark.parametrize(
    ("num_rows", "room"), [(1, 191), (12, 15), (64, 2), (65, 0), (192, 0), (500, 0)]
)
def test_a_large_batch_has_no_room_for_drafts(num_rows, room):
    """64 sequences with two draft tokens each are 192 tokens; one sequence more is too many."""
    assert Drafter(192, "double_halve").room(num_rows) == room
    assert Drafter(0, "double_halve").room(num_rows) == 0


# Whether drafts pay


def run_steps(drafter, num_steps, num_rows, draft_s, num_tokens):
    """Let a step without drafts take a second; returns how many had drafts."""
    num_drafted = 0
    for _ in range(num_steps):
        has_drafts = drafter.room(num_rows) > 0
        seconds, tokens = (draft_s, num_tokens) if has_drafts else (1.0, 1.0)
        drafter.pace.record(num_rows, seconds, num_tokens=tokens, has_drafts=has_drafts)
        num_drafted += has_drafts
    return num_drafted


def test_drafts_that_take_longer_per_token_end():
    """Sixteen steps of either kind are tried: 3 s for 1.4 tokens are slower than 1 s for one. After
    1024 steps without drafts they are tried again: 16 + 1024 + 16 + 44 steps."""
    drafter = Drafter(192, "double_halve", Pace())
    assert run_steps(drafter, 1100, 40, draft_s=3.0, num_tokens=1.4) == 32
    assert drafter.room(4) > 0, "another size of batch is another question"


def test_drafts_that_save_time_stay():
    """Steps without drafts are tried again too: their time may have changed."""
    drafter = Drafter(192, "double_halve", Pace())
    assert run_steps(drafter, 1100, 40, draft_s=1.2, num_tokens=1.4) == 1100 - 16 - 16
    assert run_steps(drafter, 1100, 40, draft_s=1.6, num_tokens=1.4) < 1100 / 2


def test_a_slow_step_now_and_then_decides_nothing():
    """Capturing a graph takes a hundred times as long as a step."""
    pace = Pace()
    for step in range(16):
        pace.record(8, 100.0 if step < 3 else 1.2, num_tokens=1.4, has_drafts=True)
        pace.record(8, 1.0, num_tokens=1, has_drafts=False)
    assert pace.favours_drafts(8)


def test_a_generation_times_its_steps():
    engine = build()
    engine.drafter.pace = pace = Pace()
    expected = without_drafts()
    assert sample(engine, PROBLEMS, PARAMS, responses(expected)) == expected
    kinds = {kind for (_, kind), seconds in pace._seconds.items() if seconds}
    assert kinds == {True}, "these are too few steps to decide"
    assert all(0 < x < 10 for seconds in pace._seconds.values() for x in seconds)


# No token changes


@pytest.mark.parametrize(
    ("quant", "kv"),
    [("none", "none"), ("int8", "none"), ("fp8", "fp8"), ("fp8-block", "none"), ("none", "fp8")],
)
def test_tokens_and_logprobs_are_those_without_drafts(quant, kv):
    """To the bit, also if the drafts are of other seeds and mostly wrong."""
    expected = without_drafts(quant, kv)
    for seed in (2, 3):
        engine = build(quant=quant, kv=kv)
        earlier = responses(without_drafts(quant, kv, seed))
        assert sample(engine, PROBLEMS, PARAMS, earlier) == expected
        counts = engine.draft_counts
        assert counts.drafted > 0
        if seed == 2:
            assert counts.accepted > 0.9 * counts.drafted
            assert counts.tokens > 2 * counts.rows


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("draft_tokens", [15, 48, 192])
@pytest.mark.parametrize("options", [{"max_batch": 6}, {"page_size": 4, "kv_tokens": 44}])
def test_any_schedule_with_drafts_gives_the_same_tokens(depth, draft_tokens, options):
    """Ragged batches, drafts that stop and start again, steps in flight, preemptions."""
    engine = build(depth=depth, draft_tokens=draft_tokens, **options)
    earlier = [(), *responses(without_drafts())[1:]]
    found, expected = sample(engine, PROBLEMS, PARAMS, earlier), without_drafts()
    assert responses(found) == responses(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            # A preempted request computes its keys again, by prefill.
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    counts = engine.draft_counts
    assert counts.accepted > 0
    if draft_tokens == 15:
        assert counts.draft_steps < counts.steps
    if draft_tokens == 15 and "kv_tokens" in options:
        assert engine.num_preemptions > 0


def test_problems_may_join_while_drafts_are_decoded():
    engine, expected = build(), without_drafts()
    earlier = dict(zip((p.id for p in PROBLEMS), responses(expected), strict=True))
    waiting, found = list(PROBLEMS), []
    with engine.stream(PARAMS) as stream:
        for problem in (waiting.pop(), waiting.pop()):
            stream.submit([problem], (), [earlier[problem.id]])
        for rollout in stream:
            found.append(rollout)
            if waiting:
                problem = waiting.pop()
                stream.submit([problem], (), [earlier[problem.id]])
    assert sorted(found, key=lambda r: r.problem.id) == expected


def test_greedy_decoding_accepts_every_draft_of_the_same_policy():
    params = SamplingParams(max_tokens=30, temperature=0)
    expected = build_engine("local", MODEL).generate(PROBLEMS, params)
    engine = build()
    assert sample(engine, PROBLEMS, params, responses(expected)) == expected
    metrics = engine.draft_counts.metrics()
    assert metrics["draft/accept_frac"] == 1
    assert metrics["draft/tokens_per_step"] > 4
    assert engine.stepper.num_launched <= 8


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_logprobs_are_those_of_scoring_the_sequence(quant):
    params = SamplingParams(max_tokens=20, group_size=3, seed=2)
    engine = build(quant=quant)
    earlier = responses(engine.generate(PROBLEMS, params))
    for rollout in sample(engine, PROBLEMS, params, earlier):
        prompt = rollout.problem.prompt_ids
        for completion in rollout.completions:
            scores = engine.score((*prompt, *completion.token_ids))[len(prompt) - 1 :]
            assert np.allclose(scores, completion.logprobs, atol=1e-4 if quant == "none" else 0.05)
    assert engine.draft_counts.accepted > 50


VOCABULARY = 12


def chi_square(engine, model):
    """Of 2500 pairs of tokens against the exact distribution, with its degrees of freedom.

    The draft is half of the most likely answer and half of an unlikely one.
    """
    problem, count = Problem("p", (5, 6, 7, 8, 9)), 2500
    params = SamplingParams(max_tokens=3, group_size=count, temperature=1.2, ignore_eos=True)
    with torch.no_grad():
        first = (model(torch.tensor([problem.prompt_ids])).logits[0, -1] / 1.2).softmax(-1)
        prompts = torch.tensor([[*problem.prompt_ids, a] for a in range(VOCABULARY)])
        second = (model(prompts).logits[:, -1] / 1.2).softmax(-1)
    best = int(first.argmax())
    earlier = [[best, int(second[best].argmin()), 1]] * 3 + [[best, int(second[best].argmax()), 1]]
    [rollout] = sample(engine, [problem], params, [earlier])
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for completion in rollout.completions:
        counts[tuple(completion.token_ids[:2])] += 1
    expected = first[:, None] * second * count
    is_large = expected >= 5
    rest = [counts[~is_large].sum()], [expected[~is_large].sum()]
    counts, expected = (
        torch.cat([x[is_large], torch.tensor(tail)])
        for x, tail in zip((counts, expected), rest, strict=True)
    )
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def test_frequencies_follow_the_softmax(monkeypatch):
    """A chi-square with n degrees of freedom exceeds n + 4 sqrt(2n) with p < 1e-3. A rule that
    accepts what was not drawn is found out: tokens behind it come from another prefix."""
    model = tiny_llama(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    engine = build(model, max_batch=60)
    statistic, freedom = chi_square(engine, model)
    assert freedom > 60
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    counts = engine.draft_counts
    assert 0.1 < counts.accepted / counts.drafted < 0.9
    monkeypatch.setattr(Drafter, "accept", lambda self, request, draft, drawn: len(drawn))
    statistic, freedom = chi_square(build(model, max_batch=60), model)
    assert statistic > 2 * (freedom + 4 * (2 * freedom) ** 0.5)


# Ends


def one_completion(engine, params, earlier):
    [rollout] = sample(engine, PROBLEMS[:1], params, [earlier])
    return rollout.completions[0]


def test_a_stop_token_inside_a_draft_ends_the_completion():
    free = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    [[tokens]] = responses(build().generate(PROBLEMS[:1], free))
    num_behind = 0
    for end in (4, 9, 17, 23):
        params = SamplingParams(max_tokens=30, seed=3, stop=[tokens[end]])
        length = tokens.index(tokens[end]) + 1
        engine = build()
        completion = one_completion(engine, params, [tokens])
        assert (completion.token_ids, completion.finish) == (tokens[:length], "stop")
        assert len(completion.logprobs) == length
        counts = engine.draft_counts
        assert counts.tokens == length
        num_behind += counts.accepted + counts.rows - length
    assert num_behind > 4  # accepted drafts went on behind the end


def test_a_stop_string_inside_a_draft_ends_the_completion():
    tokenizer = build_tokenizer()
    free = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    [[tokens]] = responses(build().generate(PROBLEMS[:1], free))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    params = SamplingParams(max_tokens=30, seed=3, stop=[text[6:8]])
    plain = build(tokenizer=tokenizer).generate(PROBLEMS[:1], params)[0].completions[0]
    assert one_completion(build(tokenizer=tokenizer), params, [tokens]) == plain
    assert plain.finish == "stop"
    assert len(plain.token_ids) < 30


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 11])
def test_the_longest_length_cuts_a_draft(max_tokens):
    free = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    [[tokens]] = responses(build().generate(PROBLEMS[:1], free))
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
    engine = build()
    completion = one_completion(engine, params, [tokens])
    assert (completion.token_ids, completion.finish) == (tokens[:max_tokens], "length")
    counts = engine.draft_counts
    assert counts.tokens == counts.accepted + counts.rows == max_tokens


# Engines and recipes


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below does this on the GPU")
def test_the_operations_of_a_gpu_take_drafts(monkeypatch):
    """Triton's interpreter stands in for the GPU; tokens of one row follow each other in a step."""
    from qurl.rollout.local import engine as engine_module
    from qurl.rollout.local.fused import FusedOps

    monkeypatch.setattr(canary, "_LENGTH", 6)  # the interpreter is slow
    model = tiny_llama(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    params = SamplingParams(max_tokens=3, group_size=2, seed=1, ignore_eos=True)
    problems = [Problem("p", (5, 6, 7, 8, 9))]
    expected = build(model, quant="int8", kv="fp8").generate(problems, params)
    weights = functools.partial(engine_module.Weights, native_codes=True)
    monkeypatch.setattr(engine_module, "Weights", weights)
    monkeypatch.setattr(engine_module, "choose_ops", FusedOps)
    engine = build(model, quant="int8", kv="fp8", depth=1, page_size=4, draft_tokens=12)
    engine.stepper.is_bucketed = True
    found = sample(engine, problems, params, responses(expected))
    assert responses(found) == responses(expected)
    pairs = zip(found[0].completions, expected[0].completions, strict=True)
    gaps = [abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    assert max(gaps) < 1e-4
    assert engine.draft_counts.accepted > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["none", "fp8"])
@pytest.mark.parametrize("quant", ["none", "int8", "fp8"])
def test_drafts_change_no_token_of_a_deterministic_gpu(quant, kv):
    model = tiny_llama(hidden_size=128, intermediate_size=256).cuda()
    options = {"quant": quant, "kv": kv, "deterministic": True}
    expected = build_engine("local", model, **options).generate(PROBLEMS, PARAMS)
    engine = build_engine("local", model, draft_tokens=64, **options)
    assert sample(engine, PROBLEMS, PARAMS, responses(expected)) == expected
    assert engine.draft_counts.accepted > 0
    assert any(is_drafted for *_, is_drafted in engine.stepper._graphs)


def test_without_drafts_earlier_responses_are_ignored():
    engine = build(draft_tokens=0)
    assert sample(engine, PROBLEMS, PARAMS, [[[10**9]]] * 5) == without_drafts()
    assert engine.draft_counts is None


@pytest.mark.parametrize("token", [-1, 10**6])
def test_earlier_responses_of_another_model_are_refused(token):
    with pytest.raises(DataError, match=r"'p1': an earlier response has tokens from .* vocabulary"):
        sample(build(), PROBLEMS, PARAMS, [[], [[5, 6], [7, token]], [], [], []])


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"draft_window = 'wide' is not one of double_halve, add"):
        build(draft_window="wide")
    with pytest.raises(ConfigError, match="draft_tokens = -1 must be at least 0"):
        build(draft_tokens=-1)


def histospec(**sections):
    tree = {"rollout": {"drafts": "histospec"}, "sampling": {"keep_responses": True}}
    return build_config({key: tree.get(key, {}) | sections.get(key, {}) for key in tree | sections})


@pytest.mark.parametrize(
    ("sections", "mistake"),
    [
        ({"rollout": {"engine": "vllm"}}, "needs rollout.engine = 'local', not 'vllm'"),
        ({"rollout": {"engine": "hf"}}, "needs rollout.engine = 'local', not 'hf'"),
        ({"sampling": {"keep_responses": False}}, "set sampling.keep_responses = true"),
        ({"rollout": {"episode": "json:loads"}}, "tokens of tools in its responses"),
        ({"systems": {"histospec": {"step_tokens": 2}}}, "step_tokens = 2 has no room for a draft"),
    ],
)
def test_recipes_that_cannot_draft_are_refused(sections, mistake):
    assert any(mistake in found for found in find_mistakes(histospec(**sections)))


def test_the_keys_of_a_recipe_reach_the_engine():
    config = histospec(systems={"histospec": {"step_tokens": 48, "window": "add_reset"}})
    assert find_mistakes(config) == []
    drafter = build_actor(config, tiny_policy(), "int8").drafter
    assert (drafter.step_tokens, drafter.window) == (48, WINDOWS["add_reset"])
    assert build_actor(build_config({}), tiny_policy(), "int8").drafter.step_tokens == 0
    unused = build_config({"systems": {"histospec": {"step_tokens": 48}}})
    assert any("systems.histospec.step_tokens is not used" in w for w in find_warnings(unused))
