"""Model folders that are incomplete, damaged or made for something else."""

import json
import shutil

import pytest
import torch
from models import tiny_policy
from safetensors.torch import load_file, save_file

from qurl.config import ModelConfig
from qurl.errors import ModelError
from qurl.trainer.folder import check_finite, check_folder, check_shapes
from qurl.trainer.policy import load_empty_model, load_model, load_policy, load_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "sound"
    tiny_policy().save(folder)
    return folder


@pytest.fixture
def model(sound, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(sound, tmp_path / "model")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder):
    """The reason why a policy is not loaded."""
    with pytest.raises(ModelError) as caught:
        load_policy(folder, ModelConfig(), torch.device("cpu"))
    return str(caught.value)


def test_a_sound_folder(model):
    check_folder(model)
    check_shapes(model, load_empty_model(model))
    assert check_finite(model) == "24,992 numbers are finite"


def test_a_folder_without_a_tokenizer(model):
    for file in model.glob("tokenizer*"):
        file.unlink()
    load_model(model)
    with pytest.raises(ModelError, match=r"has no tokenizer: none of tokenizer.json, .*; copy the"):
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", value) for value in (None, -1, 0, "x", True, 1.5)),
        *(("num_hidden_layers", value) for value in (None, -1, 0, 10**30, [])),
        *(("num_attention_heads", 10**30), ("vocab_size", -5), ("num_key_value_heads", 0)),
    ],
)
def test_sizes_that_no_model_has(model, key, value):
    edit(model / "config.json", **{key: value})
    assert f"config.json: {key} = " in refusal(model)
    with pytest.raises(ModelError, match=f"{key} = .* must be a number from 1 to"):
        check_folder(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantized already"),
        ({"model_type": 7}, "model_type = 7 must be a text"),
        ({"model_type": "nothing"}, "cannot be loaded as a causal LM"),
        ({"hidden_act": "nothing"}, "cannot be loaded as a causal LM"),
        ({"num_attention_heads": 5}, "cannot be loaded as a causal LM"),
        ({"intermediate_size": 65}, "the shapes of its weights are not those that its config.json"),
    ],
)
def test_configs_that_make_no_sense_here(model, change, reason):
    edit(model / "config.json", **change)
    assert reason in refusal(model)


def test_a_model_with_code_of_its_own_is_never_run(model):
    code = "import pathlib; pathlib.Path('ran').touch()"
    (model / "own.py").write_text(code)
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(model / "config.json", model_type="own", auto_map=auto_map)
    reason = refusal(model)
    assert "it brings Python code of its own, which is never run here" in reason
    assert "trust_remote_code" not in reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_that_are_no_numbers(model, value):
    edit_weights(model, lambda tensors: tensors[UP].view(-1)[7:8].fill_(value))
    assert f"the weights hold NaN, infinity or numbers beyond 1e+10 ({UP})" in refusal(model)
    with pytest.raises(ModelError, match=rf"NaN, infinity .* \({UP} of model.safetensors"):
        check_finite(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.update({UP: t[UP].T.contiguous()}), r"have the shape \[32, 64\], and config"),
        (lambda t: t.clear(), "the weights lack "),
        (lambda t: t.pop(UP), "the weights lack layers.1.mlp.up_proj.weight"),
    ],
)
def test_shapes_are_seen_without_loading(model, change, reason):
    edit_weights(model, change)
    with pytest.raises(ModelError, match=reason):
        check_shapes(model, load_empty_model(model))
    refusal(model)


def test_weights_as_a_bin_file(model):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(weights, file)
    assert check_finite(model) == "24,992 numbers are finite"
    load_model(model)
    for content in (b"", b"no pickle", file.read_bytes()[:900]):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read as weights"):
            check_finite(model)
        assert "cannot be loaded as a causal LM" in refusal(model)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 10_000, "\ud800"])
def test_a_config_that_is_no_object(model, content):
    (model / "config.json").write_text(content, errors="surrogatepass")
    with pytest.raises(ModelError, match=r"config.json (cannot be read as JSON|holds a list)"):
        check_folder(model)


def test_a_text_that_a_checkpoint_could_not_write(model):
    edit(model / "tokenizer_config.json", note="\ud800")
    assert "tokenizer_config.json cannot be read as JSON: 'utf-8' codec can't" in refusal(model)


@pytest.mark.parametrize("content", ["", "{}", "null", '{"version": "1.0"}'])
def test_a_tokenizer_that_cannot_be_read(model, content):
    (model / "tokenizer.json").write_text(content)
    assert "cannot be loaded as a causal LM" in refusal(model)


def test_a_tokenizer_that_knows_nothing(model):
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["model"]["vocab"], tree["added_tokens"] = {}, []
    tree["model"]["unk_token"] = "<unk>"
    (model / "tokenizer.json").write_text(json.dumps(tree))
    refusal(model)
