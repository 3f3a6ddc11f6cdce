"""The contract of tests/contract/test_engines.py over vLLM, in each of its formats."""

import functools

import pytest
import test_engines as contract
import torch
from conftest import can_multiply_int8

from qurl.quant.linear import projections
from qurl.types import SamplingParams

pytest.importorskip("vllm")
FORMATS = {
    "none": ("none", {}),
    "int8 by codes": ("int8", {}),
    "int8 online": ("int8", {"online": True}),
    "fp8": ("fp8", {}),
}
# Attention on a CPU wants heads of 32 channels.
contract.SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(params=FORMATS)
def quant(request, engines, monkeypatch):
    """A format; engines that the contract builds are vLLM's, in this format."""
    quant, options = FORMATS[request.param]
    build = functools.partial(engines.build, **options)
    monkeypatch.setattr(
        contract,
        "build",
        lambda kind, model, _=None, tokenizer=None: build(kind, model, quant, tokenizer),
    )
    return quant


ANY_FORMAT = [
    contract.test_groups_differ_and_are_reproducible,
    contract.test_problems_can_be_submitted_while_a_stream_runs,
    contract.test_ids_may_repeat,
    contract.test_a_problem_may_have_a_limit_of_its_own,
    contract.test_ends,
    contract.test_modes_of_the_trainers_modules_are_left_alone,
    contract.test_no_problems_no_rollouts,
    contract.test_refusals_name_the_problem,
    contract.test_a_copy_that_was_refused_is_not_sampled_from,
    contract.test_canary_refuses_weights_that_are_not_finite,
]


@pytest.mark.parametrize("promise", ANY_FORMAT, ids=lambda test: test.__name__)
def test_promises(promise, quant):
    promise("vllm")


def test_sync_follows_the_trainer(quant):
    contract.test_sync_follows_the_trainer("vllm", quant)


def test_log_probs_are_those_of_the_dense_reference(quant):
    if quant == "int8" and not can_multiply_int8():
        pytest.skip("this CPU's INT8 product is inexact in vLLM")
    contract.test_logprobs_equal_the_dense_reference("vllm", quant, "llama", "cpu")


@pytest.mark.parametrize("quant", ["none"], indirect=True)
class TestFullPrecision:
    """What the format cannot change, or noise of codes would hide."""

    @pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
    def test_greedy(self, quant, name):
        contract.test_greedy_equals_transformers("vllm", name, "cpu")

    def test_score(self, quant):
        contract.test_score_equals_the_dense_reference("vllm", quant, "cpu")

    def test_batches(self, quant):
        contract.test_results_do_not_depend_on_the_batch("vllm", quant)

    def test_frequencies(self, quant):
        contract.test_frequencies_follow_the_softmax("vllm")

    @pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.6, 0), (0.8, 4)])
    def test_filters(self, quant, top_p, top_k):
        contract.test_filters_are_kept_and_logprobs_are_renormalised("vllm", top_p, top_k)

    @pytest.mark.parametrize("where", ["generation_config", "tokenizer"])
    def test_eos(self, quant, where):
        contract.test_every_source_of_eos_ends_a_completion("vllm", where)


def test_codes_and_online_quantization_are_the_same_numbers(engines):
    model = contract.own_model()
    params = SamplingParams(max_tokens=8, group_size=2, seed=1)
    sampled = [
        engines.build("vllm", model, "int8", **options).generate(contract.make_problems(3), params)
        for options in ({}, {"online": True})
    ]
    assert contract.tokens_of(sampled[0]) == contract.tokens_of(sampled[1])
    assert contract.largest_gap(*sampled) == 0


def test_codes_are_fewer_bytes(engines):
    model = contract.own_model()
    sizes = [
        engines.build("vllm", model, quant, **options).sync(model, version=1).bytes
        for quant, options in (("int8", {}), ("int8", {"online": True}))
    ]
    numbers = sum(m.weight.numel() for _, m in projections(model))
    assert sizes[1] - sizes[0] == pytest.approx(3 * numbers, rel=0.05)  # FP32 on a CPU


def test_a_stream_goes_on_over_a_sync(engines):
    """Unfinished completions start over: all of their tokens are of one version."""
    model = contract.own_model()
    engine, problems = engines.build("vllm", model), contract.make_problems(2)
    params = SamplingParams(max_tokens=9, group_size=2, seed=1)
    with engine.stream(params) as stream:
        stream.submit(problems[:1])
        first = next(iter(stream))
        stream.submit(problems[1:])
        with torch.no_grad():
            model.lm_head.weight *= 1.5
        engine.sync(model, version=5)
        second = next(iter(stream))
    assert (first.version, second.version) == (0, 5)
    assert {v for c in second.completions for v in c.versions} == {5}
    assert contract.tokens_of([second]) == contract.tokens_of(engine.generate(problems[1:], params))
