"""The budget of a recipe, counted by hand for the model made from scratch."""

import pytest
import torch
from models import tiny_llama

import qurl.run.budget
from qurl.config import build_config
from qurl.errors import ConfigError
from qurl.run.budget import describe_budget, measure_model, memory_rows
from qurl.tasks.tokenizer import build_tokenizer


def recipe(**sections):
    return build_config(
        {
            "steps": 7,
            "device": "cpu",
            "model": {"scratch": {"hidden_size": 32, "layers": 2, "heads": 4}, "logits_chunk": 10},
            "task": {"max_prompt_tokens": 20},
            "batch": {"problems": 3, "minibatches": 4, "epochs": 2},
            "sampling": {"max_tokens": 12, "group_size": 5},
        }
        | sections
    )


def test_the_scratch_model_by_hand():
    """V = 100, H = 32, two layers. A layer: q, k, v, o of H^2 and gate, up, down of 4 H^2.

    projections  2 * 16 * 32^2           = 32768
    embeddings   2 * 100 * 32            =  6400
    norms        2 * 2 * 32 + 32         =   160
    cache        K and V, 2 layers of 32 =   128 numbers a token
    """
    size = measure_model(recipe())
    assert len(build_tokenizer()) == size.vocabulary == 100
    assert size.num_quantized == 32_768
    assert size.num_parameters == 32_768 + 6_400 + 160
    assert size.kv_numbers_per_token == 128


def test_a_saved_model_is_measured_without_its_weights(tmp_path):
    """Width 32, MLP 64, 4 heads of 8 and 2 of them for K and V: a layer has 3 * 1024 + 6 * 1024."""
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    size = measure_model(recipe(model={"path": str(tmp_path)}))
    assert size.num_quantized == 2 * 9 * 1024
    assert size.kv_numbers_per_token == 2 * 2 * 2 * 8


def test_memory_on_a_cpu_by_hand():
    """The engine shares all but the projections, whose codes it keeps as FP32 numbers."""
    config = recipe()
    assert memory_rows(config, measure_model(config)) == {
        "policy, FP32": 4 * 39_328,
        "gradients": 4 * 39_328,
        "AdamW": 8 * 39_328,
        "engine weights": 4 * 32_768,
        "KV cache, full": 4 * 128 * 32 * 15,
        "logits of one chunk": (4 + 4) * 10 * 100,
    }


@pytest.mark.parametrize(("format", "narrow"), [("none", 2), ("int8", 1), ("fp8-block", 1)])
def test_memory_on_a_gpu_by_hand(monkeypatch, format, narrow):
    monkeypatch.setattr(qurl.run.budget, "pick_device", lambda _: torch.device("cuda"))
    config = recipe(quant={"format": format})
    rows = memory_rows(config, measure_model(config))
    assert rows["engine weights"] == narrow * 32_768 + 2 * (6_400 + 160)
    assert rows["KV cache, full"] == 2 * 128 * 32 * 15


def test_reference_and_critic_cost_memory():
    config = recipe(algo={"name": "ppo", "advantage": "gae", "kl_coef": 0.1})
    rows = memory_rows(config, measure_model(config))
    assert rows["reference"] == 4 * 39_328
    assert rows["critic and its AdamW"] == 16 * 39_328


def test_the_cache_is_as_large_as_asked_for_or_needed():
    small = recipe(rollout={"max_batch": 4})
    assert memory_rows(small, measure_model(small))["KV cache, full"] == 4 * 128 * 32 * 4
    fixed = recipe(rollout={"kv_tokens": 1000})
    assert memory_rows(fixed, measure_model(fixed))["KV cache, full"] == 4 * 128 * 1000


def test_the_text_holds_the_token_budget():
    """3 problems x 5 = 15 sequences of 12 tokens; 4 mini-batches x 2 epochs in each of 7 steps."""
    lines = [" ".join(line.split()) for line in describe_budget(recipe()).splitlines()]
    assert "sequences per step 15 (3 problems x 5)" in lines
    assert "sampled per step at most 180" in lines
    assert "updates per step 8" in lines
    assert "updates in the run 56" in lines
    config = recipe(batch={"problems": 3000, "minibatches": 4})
    total = sum(memory_rows(config, measure_model(config)).values()) / 2**30
    assert f"total {total:.3f}" in " ".join(describe_budget(config).split())


def test_a_model_that_is_not_there_is_said_to_be_unknown(tmp_path):
    text = describe_budget(recipe(model={"path": str(tmp_path / "nowhere")}))
    assert f"unknown: {tmp_path / 'nowhere'} is not reachable here" in text
    assert "updates in the run" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ConfigError, match="device = 'cuda', but torch sees no GPU"):
        describe_budget(recipe(device="cuda"))
