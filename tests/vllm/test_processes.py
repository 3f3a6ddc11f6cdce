"""vLLM in processes of its own: one, and two that share each layer. Imports take minutes."""

import pytest
import test_engines as contract
import torch
from conftest import OPTIONS
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qurl.errors import SyncError
from qurl.rollout import build_engine
from qurl.types import SamplingParams

pytest.importorskip("vllm")
contract.SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def started():
    """Builds engines, and ends their processes."""
    engines = []

    def start(model, **options):
        options = {"max_batch": 8, "options": OPTIONS} | options
        engines.append(build_engine("vllm", model, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def move_(model) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter += 0.5 * parameter.std() * noise


def gaps_and_tokens(engine, model):
    """Of the first copy and of two updates."""
    params = SamplingParams(max_tokens=8, group_size=2, seed=3, ignore_eos=True)
    gaps, tokens = [engine.canary_gap], []
    for version in (1, 2):
        move_(model)
        gaps.append(engine.sync(model, version=version).canary_gap)
        rollouts = engine.generate(contract.make_problems(3), params)
        tokens.append(contract.tokens_of(rollouts))
        assert [r.version for r in rollouts] == [version] * 3
    return gaps, tokens


def test_a_process_of_its_own(started):
    model = contract.own_model()
    engine = started(model, own_process=True)
    gaps, _ = gaps_and_tokens(engine, model)
    assert max(gaps) < 1e-4
    wrap = engine._wrap
    engine._wrap = lambda chunk, path: {**wrap(chunk, path), "checksums": {"nothing": [0, 0]}}
    with pytest.raises(SyncError, match="did not arrive as they were sent"):
        engine.sync(model, version=3)
    engine._wrap = wrap
    assert engine.sync(model, version=3).canary_gap < 1e-4


def test_two_ranks(started, monkeypatch):
    """The largest value of a row of o_proj and down_proj may be on the other rank.

    Codes that come from outside are of whole rows, so a scale of half a row would show.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    found = []
    for options in ({"tensor_parallel": 2}, {"tensor_parallel": 2, "online": True}, {}):
        model = contract.own_model()
        found.append(gaps_and_tokens(started(model, quant="int8", **options), model))
    codes, online, one = found
    assert codes == online
    assert codes[0] == pytest.approx(one[0], rel=0.2)  # activations have a scale for each rank


def test_experts_that_a_reload_garbles(started):
    """vLLM on a CPU packs experts when it loads them first, and not again."""
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape |= {"head_dim": 32, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**(contract.SHAPE | shape))
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    engine = started(model, dtype=torch.bfloat16, own_process=True)
    assert engine.canary_gap < 0.2  # from a folder, by the names of a saved model
    move_(model)
    with pytest.raises(SyncError, match=r"mean \|log-prob gap\| = .* exceeds") as caught:
        engine.sync(model, version=1)
    print(caught.value)
