"""A vLLM engine that starts without weights, and gets them from elsewhere."""

import pytest
import test_engines as contract
import torch
from conftest import OPTIONS

from qurl.errors import EngineError
from qurl.rollout.canary import ModelShipment
from qurl.rollout.group.worker import EngineSpec
from qurl.types import Problem, SamplingParams

pytest.importorskip("vllm")
contract.SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
PARAMS = SamplingParams(max_tokens=6, seed=1, group_size=2, temperature=0.0)
PROBLEMS = [Problem(str(i), [1, 2, 3 + i], "") for i in range(3)]


def tokens(rollouts):
    return [[c.token_ids for c in rollout.completions] for rollout in rollouts]


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_an_engine_of_a_group_samples_what_it_was_sent(engines, quant):
    model = contract.own_model()
    options = {"max_batch": 64, "options": OPTIONS, "compute_dtype": torch.float32}
    setup = (model.config, model.generation_config, None, quant, options, "cpu")
    engine = EngineSpec("vllm", *setup).build(torch.device("cpu"))
    try:
        with pytest.raises(EngineError, match="no weights have arrived yet"):
            engine.generate(PROBLEMS, PARAMS)
        assert engine.sync(ModelShipment(model), version=3).verified
        found = engine.generate(PROBLEMS, PARAMS)
        assert {rollout.version for rollout in found} == {3}
        expected = engines.build("vllm", model, quant, compute_dtype=torch.float32)
        again = expected.generate(PROBLEMS, PARAMS)
        for ours, theirs in zip(found, again, strict=True):
            assert [c.token_ids for c in ours.completions] == [
                c.token_ids for c in theirs.completions
            ]
    finally:
        engine.close()


def test_scales_are_fp32_whatever_the_model_is():
    """vLLM loads a model with its dtype as torch's default, and INT8 kernels of GPUs want FP32."""
    from qurl.integrations.vllm import CodesMethod

    layer, before = torch.nn.Module(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        CodesMethod()._register(layer, (8, 4), torch.bfloat16, lambda *_: None)
    finally:
        torch.set_default_dtype(before)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (torch.int8, torch.float32)
