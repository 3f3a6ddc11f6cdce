"""What a sync sends to vLLM, without vLLM."""

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qurl.config import ModelConfig, build_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.errors import ConfigError, MissingExtra, ModelError
from qurl.quant import get_format, quantize, shipment
from qurl.quant.linear import projections
from qurl.quant.shipment import Packing, checksums, mismatches, save_chunk, saved_weights
from qurl.rollout import build_engine
from qurl.rollout.local.receive import Receiver
from qurl.rollout.vllm.engine import VllmEngine
from qurl.rollout.vllm.start import shared_memory
from tests.models import SHAPE, tiny_llama, tiny_policy

INT8 = get_format("int8")


def packed(model, **options):
    [chunk] = Packing(torch.float32, **options).pack(model)
    return chunk


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("is_tied", [False, True])
def test_names_are_those_of_a_saved_model(is_tied, tmp_path):
    model = tiny_llama(tie_word_embeddings=is_tied)
    expected = saved(model, tmp_path)
    found = packed(model)
    assert_close(found, expected, rtol=0, atol=0)
    assert ("lm_head.weight" in found) == (not is_tied)
    untied = packed(model, unties=True)
    assert torch.equal(untied["lm_head.weight"], model.lm_head.weight)


def test_experts_are_taken_apart_as_in_a_saved_model(tmp_path):
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SHAPE | shape)))
    expected = saved(model, tmp_path)
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in expected
    found = packed(model)
    assert_close(found, expected, rtol=0, atol=0)


def test_adapters_are_merged():
    policy = tiny_policy().adapt_(ModelConfig(lora_rank=2), seed=0)
    for _, layer in projections(policy.model):
        torch.nn.init.ones_(layer.parametrizations.weight[0].B)
    found = dict(saved_weights(policy.model))
    assert not any("parametrizations" in name for name in found)
    assert found.keys() == dict(saved_weights(tiny_llama())).keys()
    for name, layer in projections(policy.model):
        assert torch.equal(found[f"{name}.weight"], layer.weight)


def test_projections_are_sent_as_codes_of_what_the_trainer_computes_with():
    model = tiny_llama()
    chunk = packed(model, format=INT8, sends_codes=True, compute_dtype=torch.bfloat16)
    for name, layer in projections(model):
        expected = quantize(layer.weight.detach().bfloat16(), INT8)
        assert torch.equal(chunk[f"{name}.weight"], expected.codes)
        assert torch.equal(chunk[f"{name}.weight_scale"], expected.scale)
    assert torch.equal(chunk["lm_head.weight"], model.lm_head.weight)  # not rounded
    online = packed(model, format=INT8, compute_dtype=torch.bfloat16)
    rounded = model.model.layers[0].mlp.up_proj.weight.bfloat16().float()
    assert torch.equal(online["model.layers.0.mlp.up_proj.weight"], rounded)


def test_chunks_are_bounded(monkeypatch):
    model = tiny_llama()
    monkeypatch.setattr(shipment, "CHUNK_BYTES", 2**13)
    chunks = list(Packing(torch.float32).pack(model))
    assert len(chunks) > 3
    assert [name for chunk in chunks for name in chunk] == list(dict(saved_weights(model)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_checksums_see_changed_values_and_moved_rows(dtype):
    tensor = (40 * torch.randn(6, 10, generator=torch.Generator().manual_seed(0))).to(dtype)
    changed = tensor.clone()
    changed[2, 3] += 1
    others = [changed, tensor.roll(1, 0), tensor.roll(1, 1), tensor.flip(0), -tensor]
    sums = checksums({str(i): t for i, t in enumerate((tensor, *others))})
    assert len(set(map(tuple, sums.values()))) == 6
    alike = checksums({"0": tensor.clone(), "1": tensor.T.contiguous().T})
    assert list(alike.values()) == 2 * [sums["0"]]
    moved = torch.zeros(61, dtype=dtype)[1:].view(6, 10).copy_(tensor)
    assert checksums({"0": moved}) == {"0": sums["0"]}, "wherever it lies in memory"
    assert checksums({}) == {}


def test_what_did_not_arrive_is_named(tmp_path):
    chunk = {"a": torch.ones(3), "b": torch.ones(2, 2), "tied": torch.tensor(1.0)}
    sums = checksums(chunk)
    save_chunk({**chunk, "tied": chunk["a"][0]}, tmp_path / "chunk")
    assert mismatches(load_file(tmp_path / "chunk"), sums) == []
    assert mismatches({**chunk, "b": 2 * chunk["b"]}, sums) == ["b"]
    assert mismatches({"b": chunk["b"], "tied": chunk["tied"]}, sums) == ["a"]


def test_vllm_gets_copies_since_it_keeps_parts_of_a_layer_longer_than_a_chunk_is_lent(tmp_path):
    engine: Any = SimpleNamespace(_is_remote=False)
    chunk = {"weight": torch.arange(6.0)}
    given = VllmEngine._wrap(engine, chunk, tmp_path)
    chunk["weight"].zero_()
    chunk.clear()
    assert torch.equal(given["weights"]["weight"], torch.arange(6.0))


def test_what_another_process_loaded_outlives_the_next_chunk(tmp_path):
    engine: Any = SimpleNamespace(_is_remote=True)
    path = tmp_path / "chunk.safetensors"
    first = load_file(VllmEngine._wrap(engine, {"a": torch.ones(4096)}, path)["path"])
    VllmEngine._wrap(engine, {"b": torch.zeros(4096)}, path)
    assert bool((first["a"] == 1).all())


def test_shared_memory_without_room_for_chunks_is_not_used(monkeypatch):
    """As in a container, by default."""
    monkeypatch.setattr("os.access", lambda *_: True)
    for free, folder in ((2**26, None), (2**34, "/dev/shm")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        assert shared_memory() == folder


def test_our_engine_lets_go_of_a_chunk_before_it_asks_for_the_next(monkeypatch):
    """The memory may be the sender's."""
    monkeypatch.setattr(shipment, "CHUNK_BYTES", 2000)
    model, num_chunks = tiny_llama(), 0
    engine: Any = build_engine("local", model, None, quant="int8")

    def lend(packing):
        nonlocal num_chunks
        for packed in packing.pack(model):
            chunk = {name: tensor.clone() for name, tensor in packed.items()}
            lent = [weakref.ref(tensor) for tensor in chunk.values()]
            num_chunks += 1
            yield chunk
            chunk.clear()
            assert [reference() for reference in lent] == [None] * len(lent)

    receiver = Receiver(model, engine.weights, full_layers=0)
    receiver.load_(SimpleNamespace(pack=lend))
    receiver.check(0)
    assert num_chunks > 3


def test_vllm_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"rollout.engine = 'vllm' needs .*qurl-rl\[vllm\]"):
        build_engine("vllm", tiny_llama())


def test_formats_and_options_that_the_engine_refuses():
    with pytest.raises(ConfigError, match=r"'int4' is not one of vLLM's: none, int8, int8 online"):
        build_engine("vllm", tiny_llama(), quant="int4")
    with pytest.raises(ConfigError, match=r"options.dtype = 'half' is set by QuRL itself"):
        build_engine("vllm", tiny_llama(), options={"dtype": "half"})
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with pytest.raises(ModelError, match="keeps its experts in one tensor"):
        build_engine("vllm", Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SHAPE | shape))), quant="int8")


@pytest.mark.parametrize(
    ("tree", "mistake"),
    [
        ({"rollout": {"vllm": {"tensor_parallel": 2}}}, "needs rollout.engine = 'vllm'"),
        ({"quant": {"format": "fp8-block"}}, "has none, int8 and fp8"),
        ({"quant": {"kv": "fp8"}}, "quant.kv = 'fp8' needs rollout.engine = 'local'"),
        ({"quant": {"format": "int8", "full_layers": 1}}, "quant.full_layers does not go"),
        ({"quant": {"format": "int8", "unified": True}}, "quant.unified does not go"),
        ({"rollout": {"engine": "vllm", "deterministic": True}}, "rollout.deterministic does not"),
        (
            {"rollout": {"engine": "vllm", "vllm": {"online": True}}, "quant": {"format": "fp8"}},
            "rollout.vllm.online = true needs quant.format = 'int8'",
        ),
    ],
)
def test_recipes_that_are_refused(tree, mistake):
    tree = tree if "rollout" in tree else {"rollout": {"engine": "vllm"}, **tree}
    assert any(mistake in found for found in find_mistakes(build_config(tree)))


def test_keys_that_do_nothing_are_named():
    unused = find_warnings(build_config({"rollout": {"vllm": {"own_process": True}}}))
    assert any("rollout.vllm.own_process is not used" in warning for warning in unused)
    unused = find_warnings(build_config({"rollout": {"engine": "vllm", "kv_tokens": 64}}))
    assert any("rollout.kv_tokens = 64 is not used" in warning for warning in unused)
