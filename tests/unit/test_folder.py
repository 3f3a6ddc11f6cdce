"""Model folders that are incomplete, damaged or made for something else."""

import json
import shutil

import pytest
import torch
from models import tiny_policy
from safetensors.torch import load_file, save_file

from qurl.config import ModelConfig
from qurl.errors import ModelError
from qurl.trainer.folder import check_folder
from qurl.trainer.policy import load_empty_model, load_model, load_policy, load_tokenizer
from qurl.trainer.weight_files import check_finite, check_shapes

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


def test_a_file_is_no_folder(tmp_path):
    for name, remedy in (("a.gguf", "`qurl export --from-gguf .*a.gguf OUT`"), ("a.bin", "folder")):
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=rf"{name}' is a file; .*{remedy}"):
            check_folder(tmp_path / name)


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


def to_bin(folder, change=lambda weights: weights, **options):
    """Replace the weights by a .bin file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(weights), folder / "pytorch_model.bin", **options)


def test_a_bin_file_of_the_old_format(model):
    to_bin(model, _use_new_zipfile_serialization=False)
    assert check_finite(model) == "24,992 numbers are finite"
    load_model(model)


def test_shapes_of_a_bin_file(model):
    to_bin(model, lambda weights: weights | {UP: weights[UP][:-1]})
    with pytest.raises(ModelError, match=r"have the shape \[63, 32\], and config.json gives"):
        check_shapes(model, load_empty_model(model))
    refusal(model)


@pytest.mark.parametrize("wrap", [lambda weights: [1, 2], lambda weights: {"state_dict": weights}])
def test_a_bin_file_that_holds_something_else(model, wrap):
    to_bin(model, wrap)
    with pytest.raises(ModelError, match=r"that is not a table of tensors; save model.state"):
        check_finite(model)
    refusal(model)


def test_a_bin_file_that_would_run_code(model):
    to_bin(model, lambda weights: {"weights": shutil.rmtree})
    with pytest.raises(ModelError, match="Python objects other than weights, which are never load"):
        check_finite(model)
    assert "weights_only" not in refusal(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_without_their_description_are_not_taken_for_weights(model, dtype):
    edit_weights(model, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    with pytest.raises(ModelError, match=f"{UP} is stored as .*, so the weights are quantized"):
        check_folder(model)
    assert "the weights are quantized already" in refusal(model)


def test_a_pointer_in_place_of_the_weights(model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"is a pointer of Git LFS, not the weights; `git lfs pu"):
        check_folder(model)


def test_a_download_that_broke_off(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: it has \d+ bytes and"):
        check_folder(model)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({UP: "model-2.safetensors"}, "names model-2.safetensors, which is not there"),
        ({UP: "../model.safetensors"}, "'../model.safetensors', which is not the name of a file"),
        ({}, "has no 'weight_map'"),
        (None, "has no 'weight_map'"),
    ],
)
def test_an_index_of_files_that_are_not_there(model, table, reason):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(ModelError, match=reason):
        check_folder(model)


def test_weights_that_are_all_zero_get_a_word(model):
    edit_weights(model, lambda tensors: tensors[UP].zero_())
    note = f"all numbers of {UP} are 0: is the file damaged?"
    assert check_finite(model).endswith(note)
    assert load_policy(model, ModelConfig(), torch.device("cpu")).notes == (note,)


@pytest.mark.parametrize("value", [-1e-6, 2, 1e300])
def test_an_epsilon_that_no_norm_has(model, value):
    edit(model / "config.json", rms_norm_eps=value)
    with pytest.raises(ModelError, match=r"rms_norm_eps = .* must be from 0 to 1"):
        check_folder(model)


@pytest.mark.parametrize("name", ["rope_theta", "factor"])
@pytest.mark.parametrize("value", [0, -1e4, float("nan")])
@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_positions_that_turn_by_no_angle(model, section, name, value):
    """The log-probs would be NaN, which the first sync blames on the weights."""
    edit(model / "config.json", **{section: {"rope_type": "linear", name: value}})
    with pytest.raises(ModelError, match=rf"config.json: {name} = .* must be larger than 0"):
        check_folder(model)
