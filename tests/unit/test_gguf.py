"""GGUF files of tiny models, written here, become the folders of the models they were made from."""

import json
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from qurl.cli import main
from qurl.errors import MissingExtra, ModelError
from qurl.rollout.stop import eos_ids
from qurl.run.export import export_gguf

gguf = pytest.importorskip("gguf", reason="needs the gguf extra")
pytest.importorskip("accelerate", reason="needs the gguf extra")

Q8_0 = gguf.GGMLQuantizationType.Q8_0

# A vocabulary

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool_call>",)
TEXT = """The baker sold 1234 loaves in 2024, and 2024 more in 2025. She'd sold 120 on 12 days.
How many loaves does she sell a day?\n
   It's 12 + 12 = 24; 100% of them, they'll say.
  12\n\nx ==\n 120...\nThe 120   loaves\t12!?\n 3.5 loaves; 3.5 days   1234567 12345 $12\n"""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def vocabulary():
    """Tokens, merges and types. It was trained on uncut text, so that every cut matters."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    tokens += [*USER_DEFINED, "Ġunmerged", "[PAD0]", "[PAD1]"]  # no merges lead to the second
    kinds = {
        **dict.fromkeys(CONTROL, 3),
        **dict.fromkeys(USER_DEFINED, 4),
        "[PAD0]": 5,
        "[PAD1]": 5,
    }
    merges = [tuple(m) for m in state["merges"]]
    return tokens, merges, [kinds.get(token, 1) for token in tokens]


# Models and files

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family="llama", **changes):
    config, model = FAMILIES[family]
    shape = {
        "vocab_size": len(vocabulary()[0]),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "qwen3":
        shape["head_dim"] = 128  # transformers takes no other from such a file
    torch.manual_seed(0)
    model = model(config(**(shape | changes))).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases begin as ones and zeros, which hide mistakes
            parameter.data = 0.5 + torch.rand_like(parameter)
    return model


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def file_tensors(model):
    """What llama.cpp's converter stores: its names, and for Llama its order of rotary pairs."""
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        value = weight.numpy()
        if model.config.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = value.shape[0] // model.config.head_dim
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        tensors[f"{prefix}{NAMES[stem]}.{kind}"] = np.ascontiguousarray(value)
    return tensors


def write_gguf(path, model, *, types=None, without="?", also=None, **extra):
    """A GGUF file of the model; `types` are the GGML types of some tensors, the others are F32.

    `without` leaves out tensors whose names begin with it, `also` adds some.
    """
    config, (tokens, merges, kinds) = model.config, vocabulary()
    name = config.model_type
    fields = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": CHAT,
    }
    if name == "qwen3":
        fields |= {f"{name}.attention.{kind}_length": config.head_dim for kind in ("key", "value")}
    writer = gguf.GGUFWriter(path, name)
    adders = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in (fields | extra).items():
        adders[type(value)](key, value)
    for key, value in (file_tensors(model) | (also or {})).items():
        if key.startswith(without):
            continue
        kind = (types or {}).get(key)
        stored = value if kind is None else gguf.quantize(value, kind)
        writer.add_tensor(key, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(tmp_path):
    """Writes a model as GGUF and exports it; returns the model and tokenizer of the folder."""

    def convert(model=None, dtype="float32", **options):
        path = write_gguf(tmp_path / "tiny.gguf", model or tiny_model(), **options)
        folder = export_gguf(path, tmp_path / "out", dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return model, AutoTokenizer.from_pretrained(folder)

    return convert


# Weights and tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_to_the_bit(converted, family, is_tied):
    expected = tiny_model(family, tie_word_embeddings=is_tied)
    model, _ = converted(expected)
    assert model.config.model_type == family
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_quantized_weights(converted):
    name = "model.layers.1.mlp.down_proj.weight"
    expected = tiny_model().state_dict()[name]
    model, _ = converted(dtype="bfloat16", types={"blk.1.ffn_down.weight": Q8_0})
    found = model.state_dict()[name]
    assert found.dtype == torch.bfloat16
    assert 1e-3 < (found - expected).norm() / expected.norm() < 1e-2


def test_tokenizer(converted):
    """The merges and the split of the file, special tokens whole, its chat template."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, tokenizer = converted()
    tokens, _, _ = vocabulary()
    text = "<|im_start|>She'd 120<|im_end|>"
    words = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)
    assert words == ["<|im_start|>", "She", "'d", "Ġ", "1", "2", "0", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(words) == [tokens.index(word) for word in words]
    assert tokenizer.chat_template == CHAT
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_turn_may_end_otherwise_than_the_file_says(converted):
    """EOS (0) ends a text; the template tells what ends a turn (2)."""
    model, tokenizer = converted(**{"tokenizer.ggml.eos_token_id": 0})
    assert model.generation_config.eos_token_id == [0, 2]
    assert eos_ids(model, tokenizer) == {0, 2}


def test_a_split_that_transformers_does_not_know_is_warned_about(converted):
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre = 'smollm'.*as for GPT-2"):
        converted(**{"tokenizer.ggml.pre": "smollm"})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"also": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs.weight"),  # Llama 3
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
    ],
)
def test_scaled_positions_are_warned_about(converted, options, name):
    with pytest.warns(UserWarning, match=rf"rotary positions are scaled \({name}\); replace"):
        converted(**options)


# Refusals


def test_weights_that_the_file_lacks_are_not_made_up(converted, tmp_path):
    """A part of a split file has the settings of the whole model."""
    with pytest.raises(ModelError, match=r"lack model.layers.1.input_layernorm.*, join them with"):
        converted(without="blk.1.")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_that_fails_is_named(converted):
    template = "{{ raise_exception('no assistants') }}"
    with pytest.raises(ModelError, match=r"tiny\.gguf cannot be read .*no assistants"):
        converted(**{"tokenizer.chat_template": template})


def test_files_that_are_no_gguf(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match=rf"there is no file {path} \(seen from "):
            export_gguf(path, tmp_path / "out")
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    for content in (b"no model", path.read_bytes()[:20_000]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"tiny\.gguf cannot be read as a GGUF model"):
            export_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("qurl.run.export.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"'gguf'.*qurl-rl\[gguf\]"):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


def test_the_command(tmp_path, capsys, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--from-gguf", "tiny.gguf", "a/out", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "a/out\n"
    assert (tmp_path / "a/out/model.safetensors").exists()
    assert main(["export", "--from-gguf", "tiny.gguf", "a/out"]) == 2
    assert "a/out exists and is no empty folder" in capsys.readouterr().err
    assert main(["export", "--from-gguf", "tiny.gguf"]) == 2
    assert "expected --from-gguf FILE.gguf OUT, got tiny.gguf" in capsys.readouterr().err
    assert main(["export", "tiny.gguf", "b"]) == 1
    assert "converted by `qurl export --from-gguf tiny.gguf b`" in capsys.readouterr().err
    assert main(["export", "b", "--from-gguf"]) == 2
    assert "expected --from-gguf FILE.gguf OUT, got b" in capsys.readouterr().err
    assert main(["export", "--from-gguf", "tiny.gguf", "b", "--dtype", "int8"]) == 2
    assert "--dtype 'int8' is not one of" in capsys.readouterr().err
