"""Exported folders are plain: no UAQ, the wished dtype, the tokenizer beside the weights."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from models import tiny_llama, tiny_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl.cli import main
from qurl.errors import CheckpointError, ConfigError, ModelError
from qurl.quant import quantize, rescale_
from qurl.quant.linear import projections
from qurl.rollout import build_engine
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


def test_others_may_read_the_folder_if_the_umask_lets_them(run, tmp_path):
    mask = os.umask(0o027)
    try:
        path = export(run, tmp_path / "out")
    finally:
        os.umask(mask)
    assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o640


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


def test_what_trainers_and_the_hub_keep_beside_a_model_stays_there(tmp_path, original):
    """Optimizers of transformers' Trainer, its checkpoints, the cache of a download; and OUT."""
    source = tmp_path / "model"
    original.save(source)
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin", "model.gguf"):
        (source / name).write_text("large")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / "LICENSE").write_text("free")
    (source / ".cache").mkdir()
    (source / "checkpoint-8").mkdir()
    names = {path.name for path in export(source, source / "out").iterdir()}
    assert names == {
        *("README.md", "LICENSE", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_an_existing_target_is_left_alone(run, tmp_path):
    folder, file = tmp_path / "full", tmp_path / "file"
    folder.mkdir()
    (folder / "precious").write_text("keep me")
    file.write_text("keep me too")
    (tmp_path / "link").symlink_to("nowhere")  # a folder cannot replace it
    for target in (folder, file, tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"{target} exists and is no empty folder"):
            export(run, target)
    assert [p.name for p in folder.iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    assert export(run, tmp_path / "empty") == tmp_path / "empty"


def test_the_current_folder_is_no_target(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["export", str(run), "."]) == 2
    assert "OUT = . has no name of its own; give that of a new folder" in capsys.readouterr().err


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


# Under UAQ, for other frameworks


def test_a_model_is_rescaled_and_comes_back(tmp_path, original):
    """The scale survives a trainer that loads and saves the folder with transformers."""
    original.save(tmp_path / "model")
    assert main(["rescale", str(tmp_path / "model"), str(tmp_path / "scaled")]) == 0
    scaled = load(tmp_path / "scaled")
    assert scaled.config.qurl_uaq["scale"] == 1.5
    assert {p.dtype for p in scaled.parameters()} == {torch.float32}
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(scaled.state_dict()[name], original.model.state_dict()[name] / 1.5)
    torch.testing.assert_close(logits(scaled), logits(original.model), atol=1e-4, rtol=1e-5)
    scaled.save_pretrained(tmp_path / "trained")
    assert main(["export", str(tmp_path / "trained"), str(tmp_path / "plain")]) == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    expected = original.model.state_dict()[name].to(torch.bfloat16)
    assert torch.equal(plain.state_dict()[name], expected)
    assert not hasattr(plain.config, "qurl_uaq")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--scale", "x"], "--scale x is not a number"),
        (["--scale", "0"], "--scale 0.0 must be finite and positive"),
        (["--scale", "nan"], "--scale nan must be finite and positive"),
    ],
)
def test_bad_scales_are_refused(tmp_path, original, capsys, flags, error):
    original.save(tmp_path / "model")
    assert main(["rescale", str(tmp_path / "model"), str(tmp_path / "out"), *flags]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sampling_defaults_that_some_transformers_cannot_write_are_repaired(tmp_path, original):
    """Up to 5.10 at least, it reads a temperature without do_sample and refuses to write it."""
    original.save(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"temperature": 0.6}')
    assert main(["rescale", str(tmp_path / "model"), str(tmp_path / "scaled")]) == 0
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "plain")]) == 0
    for name in ("scaled", "plain"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert written["temperature"] == 0.6
        assert written["do_sample"] is True


def test_nothing_is_rescaled_twice(tmp_path, original, capsys):
    rescale_(original.model)
    original.save(tmp_path / "model")
    assert main(["rescale", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    assert "UAQ was applied already" in capsys.readouterr().err


# Quantized folders


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_quantized_codes_are_the_engines_own(run, tmp_path, quant):
    """UAQ stays: the codes are those of the trained weights, rounded to the dtype first."""
    path = export(run, tmp_path / "out", "bfloat16", quant)
    stored = load_file(path / "model.safetensors")
    trained = load(run / "checkpoints/step-000010/policy").to(torch.bfloat16)
    engine = build_engine("local", trained, quant=quant, compute_dtype=torch.bfloat16)
    engine.sync(trained, version=0)
    names = dict(projections(trained))
    assert len(names) == 14
    for name in names:
        layer, module = int(name.split(".")[2]), name.rpartition(".")[2]
        weight = engine.weights.layers[layer].views[module].weight
        assert stored[f"{name}.weight"].dtype == (
            torch.int8 if quant == "int8" else torch.float8_e4m3fn
        )
        assert torch.equal(stored[f"{name}.weight"].float(), weight.codes.float())
        assert stored[f"{name}.weight_scale"].dtype == torch.float32
        assert torch.equal(stored[f"{name}.weight_scale"], weight.scale)
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert len(stored) == len(trained.state_dict()) + 14


@pytest.mark.parametrize(
    ("quant", "format", "kind"),
    [("int8", "int-quantized", "int"), ("fp8", "float-quantized", "float")],
)
def test_the_format_is_that_of_compressed_tensors(run, tmp_path, quant, format, kind):
    path = export(run, tmp_path / "out", quant=quant)
    described = json.loads((path / "config.json").read_text())["quantization_config"]
    coded = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**coded, "strategy": "channel", "dynamic": False},
        "input_activations": {**coded, "strategy": "token", "dynamic": True},
    }
    assert described == {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def test_layers_in_full_precision_stay_so(run, tmp_path, original, monkeypatch):
    tiny_policy(model=tiny_llama(num_hidden_layers=3)).save(run / "checkpoints/step-000020/policy")
    recipe = {"steps": 20, "run_dir": "x", "algo": {}, "quant": {"full_layers": 1}}
    (run / "config.json").write_text(json.dumps(recipe))
    monkeypatch.chdir(run / "checkpoints")  # the path names no folder of the run
    path = export(Path("step-000020"), tmp_path / "out", quant="int8")
    stored = load_file(path / "model.safetensors")
    dtypes = [stored[f"model.layers.{i}.mlp.up_proj.weight"].dtype for i in range(3)]
    assert dtypes == [torch.bfloat16, torch.int8, torch.bfloat16]
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(ignored) == 2 * 7 + 1
    assert {"lm_head", "model.layers.0.mlp.up_proj"} <= set(ignored)


@pytest.mark.parametrize(("kept", "factor"), [("frozen", 2.0), ("dynamic", 1.0)])
def test_scales_that_the_run_keeps_are_exported(run, tmp_path, original, kept, factor):
    checkpoint, name = run / "checkpoints/step-000020", "model.layers.0.mlp.up_proj"
    original.save(checkpoint / "policy")
    weight = original.model.get_parameter(f"{name}.weight").detach().to(torch.bfloat16)
    coded = quantize(weight, "int8")
    torch.save({"scales": {name: 2.0 * coded.scale}}, checkpoint / "state.pt")
    recipe = {"steps": 20, "run_dir": "x", "algo": {}, "quant": {"format": "int8", "scales": kept}}
    (run / "config.json").write_text(json.dumps(recipe))
    stored = load_file(export(run, tmp_path / "out", quant="int8") / "model.safetensors")
    assert torch.equal(stored[f"{name}.weight_scale"], factor * coded.scale)
    codes = quantize(weight, "int8", scale=factor * coded.scale).codes
    assert torch.equal(stored[f"{name}.weight"], codes)


def test_other_formats_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="--quant 'int4' is not one of none, int8, fp8"):
        export(run, tmp_path / "out", quant="int4")
    assert main(["export", "--from-gguf", "x.gguf", str(tmp_path / "out"), "--quant", "int8"]) == 2
    assert not (tmp_path / "out").exists()


# Model card


def test_the_card_says_how_it_was_trained_and_how_well_it_does(run, tmp_path):
    (run / "config.json").write_text(
        json.dumps(
            {
                "steps": 40,
                "run_dir": "secret/place",
                "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
                "algo": {"name": "dapo", "objective": "acr"},
                "quant": {"format": "int8"},
                "task": {"path": "secret/data.jsonl", "name": "gsm8k"},
            }
        )
    )
    score = {
        "eval/full/accuracy": 0.25,
        "eval/full/accuracy_low": 0.2,
        "eval/full/accuracy_high": 0.3,
    }
    after = {**score, "eval/full/accuracy": 0.5}
    rows = [{"step": -1, **score}, {"step": 8, "reward/mean": 1}, {"step": 9, **after}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["export", str(run), str(tmp_path / "my-model"), "--quant", "int8"])
    card = (tmp_path / "my-model" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert front["tags"] == ["qurl", "reinforcement-learning", "dapo", "w8a8-int8"]
    assert "| steps | 10 of 40 |" in card
    assert "| algo.objective | acr |" in card
    assert "| full, after 10 steps | 50.0% (from 25.0%; 95 % interval 20.0% to 30.0%) |" in card
    assert 'LLM("my-model")' in card
    assert "secret" not in card


def test_the_card_of_an_older_checkpoint_has_its_own_accuracy(run, tmp_path, original):
    original.save(run / "initial")
    recipe = {"steps": 40, "run_dir": "x", "algo": {}}
    (run / "config.json").write_text(json.dumps(recipe))
    keys = [f"eval/full/accuracy{end}" for end in ("", "_low", "_high")]
    rows = [{"step": s, **dict.fromkeys(keys, x)} for s, x in ((-1, 0.2), (0, 0.3), (9, 0.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source, done, score in (
        ("initial", 0, "after 0 steps | 20.0% (from 20.0%"),
        ("checkpoints/step-000001", 1, "after 1 steps | 30.0% (from 20.0%"),
        ("checkpoints/step-000010", 10, "after 10 steps | 50.0% (from 20.0%"),
    ):
        card = (export(run / source, tmp_path / str(done)) / "README.md").read_text()
        assert f"| steps | {done} of 40 |" in card
        assert score in card


def test_a_card_without_a_run(tmp_path, original):
    original.save(tmp_path / "policy")
    card = (export(tmp_path / "policy", tmp_path / "out") / "README.md").read_text()
    assert "A causal language model, trained by reinforcement learning with QuRL" in card
    assert "## Training" not in card
    assert "UAQ is folded back" in card
