"""Exported folders are plain: no UAQ, the wished dtype, the tokenizer beside the weights."""

import json

import pytest
import torch
from models import tiny_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl.errors import CheckpointError, ConfigError, ModelError
from qurl.quant import rescale_
from qurl.run.export import export, find_policy

IDS = torch.arange(4, 24)[None]


@pytest.fixture
def original():
    return tiny_policy()


@pytest.fixture
def run(tmp_path, original):
    """A run with two checkpoints; the newest holds `original` under UAQ."""
    folder = tmp_path / "run" / "checkpoints"
    tiny_policy(seed=5).save(folder / "step-000001" / "policy")
    scaled = tiny_policy()
    rescale_(scaled.model, 1.5, o_proj=True)
    scaled.save(folder / "step-000010" / "policy")
    (tmp_path / "run" / "config.json").write_text("{}")
    return tmp_path / "run"


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def load(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def test_uaq_is_folded_back(run, tmp_path, original):
    scaled = load(run / "checkpoints/step-000010/policy")
    gap = (
        (
            scaled.state_dict()["model.layers.0.self_attn.q_proj.weight"]
            - original.model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
        )
        .abs()
        .max()
    )
    assert gap > 0.1, "the checkpoint is scaled"
    path = export(run, tmp_path / "out", "float32")
    exported = load(path)
    for name, weight in original.model.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name], weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits(exported), logits(original.model), atol=1e-4, rtol=1e-5)
    assert "qurl_uaq" not in json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype(run, tmp_path, original, dtype):
    path = export(run, tmp_path / "out", dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert json.loads((path / "config.json").read_text())["dtype"] == dtype
    expected = original.model.to(getattr(torch, dtype)).model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, expected)


def test_the_tokenizer_comes_along(run, tmp_path, original):
    path = export(run, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(path).encode("1+2=") == original.tokenizer.encode("1+2=")


def test_one_checkpoint_or_one_policy_can_be_exported(run, tmp_path):
    old = run / "checkpoints" / "step-000001"
    for i, source in enumerate((old, old / "policy")):
        exported = load(export(source, tmp_path / str(i), "float32"))
        torch.testing.assert_close(logits(exported), logits(tiny_policy(seed=5).model))


def test_sharded_weights_leave_no_index_behind(run, tmp_path, original):
    policy = run / "checkpoints/step-000020/policy"
    original.model.save_pretrained(policy, max_shard_size="50KB")
    original.tokenizer.save_pretrained(policy)
    assert (policy / "model.safetensors.index.json").exists()
    path = export(run, tmp_path / "out", "float32")
    assert [p.name for p in path.glob("*.safetensors*")] == ["model.safetensors"]
    torch.testing.assert_close(logits(load(path)), logits(original.model))


def test_an_existing_target_is_left_alone(run, tmp_path):
    folder, file = tmp_path / "full", tmp_path / "file"
    folder.mkdir()
    (folder / "precious").write_text("keep me")
    file.write_text("keep me too")
    for target in (folder, file):
        with pytest.raises(ConfigError, match=f"{target} exists and is no empty folder"):
            export(run, target)
    assert [p.name for p in folder.iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    assert export(run, tmp_path / "empty") == tmp_path / "empty"


def test_bad_sources_and_dtypes(run, tmp_path):
    with pytest.raises(ConfigError, match="--dtype 'int8' is not one of float32, bfloat16"):
        export(run, tmp_path / "out", "int8")
    empty = tmp_path / "empty"
    for source in (empty, tmp_path / "nowhere"):
        empty.mkdir(exist_ok=True)
        (empty / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="neither a run with a checkpoint nor a checkpo"):
            find_policy(source)
    assert not (tmp_path / "out").exists()


def test_weights_without_a_tokenizer_are_exported_too(tmp_path, original):
    original.model.save_pretrained(tmp_path / "bare")
    assert not list(export(tmp_path / "bare", tmp_path / "out").glob("tokenizer*"))


def test_incomplete_weights_are_not_made_up(tmp_path):
    folder = tmp_path / "policy"
    tiny_policy().save(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights lack model\.layers\.0\.self_attn\.q_proj"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
