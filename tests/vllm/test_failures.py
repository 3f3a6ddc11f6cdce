"""Failures of vLLM that raise nothing, brought about on purpose: each must end in a SyncError.

Met in real vLLM: INT8 scales freed under their kernel, experts garbled by a reload (see
test_processes.py), a prefix cache of older weights, and weights that stay as they were.
"""

import pytest
import test_engines as contract
import torch

from qurl.errors import EngineError, SyncError
from qurl.types import SamplingParams

pytest.importorskip("vllm")
from qurl.integrations.vllm import CodesMethod, Receiver

contract.SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def move_(model, share: float = 0.5) -> None:
    """Change all weights by a share of their size."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter += share * parameter.std() * noise


def refusal(engine, model) -> str:
    """What a sync is refused with; the engine must not be sampled from then."""
    with pytest.raises(SyncError) as caught:
        engine.sync(model, version=3)
    with pytest.raises(EngineError, match="sync again"):
        engine.generate(contract.make_problems(1), SamplingParams(max_tokens=2))
    return str(caught.value)


@pytest.fixture(params=["none", "int8"])
def engine(request, engines):
    return engines.build("vllm", contract.own_model(), request.param)


@pytest.fixture
def model():
    model = contract.own_model()
    move_(model)
    return model


def test_a_sound_sync_passes(engine, model):
    assert engine.sync(model, version=3).canary_gap < 0.2


def test_scales_that_are_freed_under_their_kernel(engines, model, monkeypatch):
    """A reload leaves oneDNN with the address of scales that vLLM gives back. Ours are kept; here
    their memory is used for something else."""
    # An engine of its own: its cache keeps keys that are not finite, and is not used again.
    engine = engines.build("vllm", contract.own_model(), "int8", max_batch=2)
    finalize = Receiver._finalize

    def finalize_and_reuse(receiver):
        finalize(receiver)
        for layer in receiver.model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, CodesMethod):
                assert method._scale.data_ptr() != layer.weight_scale.data_ptr()
                method._scale.data.fill_(torch.nan)

    monkeypatch.setattr(Receiver, "_finalize", finalize_and_reuse)
    assert "not finite" in refusal(engine, model)


def test_a_prefix_cache_of_older_weights(engines, monkeypatch):
    kind, config, extra = contract.MODELS["llama"]
    model = kind(config(**(contract.SHAPE | extra | {"max_position_embeddings": 512}))).eval()
    engine = engines.build("vllm", model)
    prompt = contract.Problem("long", tuple(i % contract.V for i in range(300)))
    params = SamplingParams(max_tokens=1, temperature=0)
    engine.generate([prompt], params)
    move_(model)
    engine.sync(model, version=1)
    [sampled] = engine.generate([prompt], params)[0].completions
    expected = contract.dense_logprobs(model, prompt, sampled.token_ids)
    assert sampled.logprobs[0] == pytest.approx(expected.item(), abs=1e-4)
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    move_(model)
    assert "128 tokens of the canary prompt from a prefix cache" in refusal(engine, model)
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
    assert "did not empty its prefix cache" in refusal(engine, model)


def test_weights_that_arrive_damaged(engine, model, monkeypatch):
    wrap = engine._wrap

    def damage(chunk, path):
        update = wrap(chunk, path)
        update["weights"] = dict(update["weights"])
        name = "model.layers.1.mlp.down_proj.weight"
        update["weights"][name] = update["weights"][name].roll(1, 0)
        return update

    monkeypatch.setattr(engine, "_wrap", damage)
    assert "layers.1.mlp.down_proj.weight and 0 more tensors did not arrive" in refusal(
        engine, model
    )


class Stale:
    """Makes vLLM load older weights, and say that it loaded the new ones."""

    def __init__(self, engine, monkeypatch, is_stale) -> None:
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        model = worker.weight_transfer_engine.model
        load = model.load_weights
        [old] = engine.packing.pack(contract.own_model())

        def load_some(weights):
            return load((name, old[name] if is_stale(name) else new) for name, new in weights)

        monkeypatch.setattr(model, "load_weights", load_some)


def test_a_layer_that_is_not_loaded(engine, model, monkeypatch):
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    receiver = worker.weight_transfer_engine
    load = receiver.model.load_weights
    monkeypatch.setattr(
        receiver.model,
        "load_weights",
        lambda weights: load((n, w) for n, w in weights if "layers.1.mlp.down" not in n),
    )
    assert "loaded no weights into model.layers.1.mlp.down_proj" in refusal(engine, model)


def test_weights_that_stay_and_can_be_read(engine, model, monkeypatch):
    """However little they should have moved."""
    model = contract.own_model()
    move_(model, 1e-5)
    Stale(engine, monkeypatch, lambda name: "norm" in name)
    assert "norm.weight in vLLM is not what was sent" in refusal(engine, model)


def test_weights_that_stay_in_a_packed_layout(engine, model, monkeypatch):
    """oneDNN hides them, but a large step is a jump of the gap, below the fixed bound of INT8."""
    Stale(engine, monkeypatch, lambda name: name.endswith("proj.weight"))
    message = refusal(engine, model)
    assert "exceeds" in message
    gap = float(message.partition("gap| = ")[2].partition(" ")[0])
    assert gap < 2.0
