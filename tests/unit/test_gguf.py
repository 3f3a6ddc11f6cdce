"""GGUF files of tiny models, written here, become the folders of the models they were made from."""

import hashlib
import json
import random
import shutil
import sys
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
import regex
import torch
from models import full_disk
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from qurl.cli import main
from qurl.config import ModelConfig
from qurl.errors import CheckpointError, ConfigError, MissingExtra, ModelError
from qurl.rollout.stop import eos_ids
from qurl.run.gguf import export_gguf
from qurl.run.gguf.file import GgufTensor, in_threads, parts, read_gguf
from qurl.run.gguf.tokenizer import PRE_TOKENIZERS
from qurl.trainer.policy import load_policy

gguf = pytest.importorskip("gguf", reason="needs the gguf extra")

Q8_0, Q5_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0

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
each_family = pytest.mark.parametrize("family", FAMILIES)


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
        shape["head_dim"] = 32
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


def write_gguf(path, model, *, types=None, tensors=None, extra=None, drop=(), architecture=None):
    """A GGUF file of the model; `types` are the GGML types of some tensors, the others are F32."""
    config, (tokens, merges, kinds) = model.config, vocabulary()
    name = architecture or config.model_type
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
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.chat_template": CHAT,
    }
    if config.model_type == "qwen3":
        fields |= {f"{name}.attention.{kind}_length": config.head_dim for kind in ("key", "value")}
    fields |= extra or {}
    writer = gguf.GGUFWriter(path, name)
    for key, value in fields.items():
        if key not in drop:
            add_field(writer, key, value)
    for key, value in (file_tensors(model) | (tensors or {})).items():
        if key not in drop:
            kind = (types or {}).get(key)
            stored = value if kind is None else gguf.quantize(value, kind)
            writer.add_tensor(key, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer, key, value):
    adders = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


@pytest.fixture
def converted(tmp_path):
    """Writes a file, exports it and gives the folder."""

    def convert(model=None, dtype="float32", **options):
        path = write_gguf(tmp_path / "tiny.gguf", model or tiny_model(), **options)
        return export_gguf(path, tmp_path / "out", dtype)

    return convert


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@torch.no_grad()
def logits(model):
    return model(torch.arange(40)[None]).logits


# The file, against the reader of the gguf package


def test_fields_of_every_kind(tmp_path):
    path, kinds = tmp_path / "tiny.gguf", gguf.GGUFValueType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for kind in set(kinds) - {kinds.STRING, kinds.ARRAY, kinds.BOOL}:
        writer.add_key_value(f"a.{kind.name}", 3, kind)
    for kind in (kinds.INT8, kinds.INT16, kinds.INT32, kinds.INT64, kinds.FLOAT32, kinds.FLOAT64):
        writer.add_key_value(f"b.{kind.name}", -2, kind)
    writer.add_bool("c.true", True)
    writer.add_bool("c.false", False)
    writer.add_string("d.text", "naïve 中文\n")
    writer.add_string("d.empty", "")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "é"])
    writer.add_array("e.integers", [1, -2, 2**31 - 1])
    writer.add_array("e.floats", [0.5, -1e-3])
    writer.add_array("e.bools", [True, False])
    writer.add_tensor("odd", np.arange(7, dtype=np.float32))  # the next one begins after a gap
    writer.add_tensor("token_embd.weight", np.arange(32, dtype=np.float16).reshape(4, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found, reader = read_gguf(path), gguf.GGUFReader(path)
    expected = {
        name: field.contents() for name, field in reader.fields.items() if "GGUF." not in name
    }
    assert found.metadata == expected
    assert len(expected) > 20
    assert found.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        ours = found.tensors[tensor.name]
        assert ours.shape == tensor.data.shape
        assert ours.type == tensor.tensor_type
        assert ours.data.tobytes() == tensor.data.tobytes()


def can_be_read(kind):
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind for kind in gguf.GGMLQuantizationType if can_be_read(kind)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes are no sensible scales
def test_parts_of_a_tensor_are_the_whole(monkeypatch, kind):
    monkeypatch.setattr("qurl.run.gguf.file._PART", 512)
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, num_columns = 33, 768
    data = np.random.default_rng(0).integers(
        0, 256, (num_rows, num_columns // block_size * num_bytes), dtype=np.uint8
    )
    tensor = GgufTensor("x", kind, (num_rows, num_columns), data.reshape(-1))
    found = np.concatenate([tensor.values(part) for part in parts(tensor)])
    assert len(parts(tensor)) == 50, "49 whole ones and a half"
    assert found.dtype == np.float32
    assert found.tobytes() == gguf.dequantize(data, kind).tobytes()


def test_threads_of_torch_are_given_back():
    before = torch.get_num_threads()
    assert in_threads(lambda item: (item, torch.get_num_threads()), range(3)) == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda item: 1 // item, [0])
    assert torch.get_num_threads() == before


# Weights


@each_family
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_to_the_bit(converted, family, is_tied):
    model = tiny_model(family, tie_word_embeddings=is_tied)
    found = load(converted(model))
    assert found.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    assert torch.equal(logits(found), logits(model))
    shares = found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    assert shares == is_tied


@each_family
def test_configuration(converted, family):
    model = tiny_model(family)
    found = load(converted(model)).config
    ours = {"architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
    ours |= {"_name_or_path", "initializer_range"}
    expected = {k: v for k, v in model.config.to_dict().items() if k not in ours}
    assert {k: v for k, v in found.to_dict().items() if k not in ours} == expected
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 0)


def test_rope_theta_may_be_left_out(converted):
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    found = load(converted(model, drop=("llama.rope.freq_base",)))
    assert torch.equal(logits(found), logits(model))


def rounded(value, kind):
    return gguf.dequantize(gguf.quantize(np.asarray(value), kind), kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights(converted, dtype):
    """Blocks lie along the rows, so that the file's order of rows changes nothing."""
    model = tiny_model()
    matrices = [name for name, value in file_tensors(model).items() if value.ndim == 2]
    found = load(
        converted(model, str(dtype).removeprefix("torch."), types=dict.fromkeys(matrices, Q8_0))
    )
    assert {p.dtype for p in found.parameters()} == {dtype}
    changed = 0
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        if parameter.ndim == 2:
            parameter.data = torch.from_numpy(rounded(before, Q8_0))
            changed += not torch.equal(parameter, before)
        assert torch.equal(found.state_dict()[name], parameter.to(dtype)), name
    assert changed == len(matrices) == 15


@pytest.mark.parametrize("kinds", [(Q5_0, Q8_0), (Q8_0, Q5_0)])
@pytest.mark.parametrize("part", [2**8, 2**18])
def test_a_tied_matrix_that_is_stored_twice_is_tied_again(converted, monkeypatch, kinds, part):
    monkeypatch.setattr("qurl.run.gguf.file._PART", part)
    model = tiny_model("qwen2")
    embedding = model.model.embed_tokens.weight.detach().numpy()
    types = dict(zip(("token_embd.weight", "output.weight"), kinds, strict=True))
    folder = converted(model, tensors={"output.weight": embedding}, types=types)
    found = load(folder)
    assert found.config.tie_word_embeddings
    assert torch.equal(found.lm_head.weight, torch.from_numpy(rounded(embedding, Q8_0)))
    assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()
    assert "The file holds the embedding twice" in (folder / "README.md").read_text()


def test_a_head_that_is_near_the_embedding_is_another_matrix(converted):
    """A head that was trained away from the embedding by more than rounding explains."""
    model = tiny_model(tie_word_embeddings=False)
    embedding = model.model.embed_tokens.weight.detach()
    model.lm_head.weight.data = embedding + 0.1 * 0.2 * torch.randn_like(embedding)
    folder = converted(model, types=dict.fromkeys(("token_embd.weight", "output.weight"), Q8_0))
    found = load(folder)
    assert not found.config.tie_word_embeddings
    for weight in ("lm_head.weight", "model.embed_tokens.weight"):
        expected = torch.from_numpy(rounded(model.state_dict()[weight], Q8_0))
        assert torch.equal(found.state_dict()[weight], expected)
    assert "twice" not in (folder / "README.md").read_text()


def test_the_policy_loads(converted):
    model = tiny_model("qwen3")
    policy = load_policy(converted(model), ModelConfig(), torch.device("cpu"))
    assert torch.equal(logits(policy.model), logits(model))
    assert policy.tokenizer.decode(policy.tokenizer.encode("12 loaves")) == "12 loaves"


# Tokenizer: against a byte-level BPE in plain Python, cut by the expressions of llama.cpp

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "qwen2": (rf"(?:{CONTRACTIONS})|{WORDS}|\p{{N}}|{OTHERS}",),
    "llama-bpe": (rf"(?:{CONTRACTIONS})|{WORDS}|\p{{N}}{{1,3}}|{OTHERS}",),
}


def cut(text, pattern):
    """The matches and what lies between them."""
    return [piece for piece in regex.split(f"({pattern})", text) if piece]


def merge(word, ranks):
    parts = list(word)
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def byte_alphabet():
    """GPT-2's: printable bytes are themselves, the others the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def reference_encode(text, pre, vocabulary):
    tokens, merges, kinds = vocabulary
    ids = {token: id for id, token in enumerate(tokens)}
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    alphabet = byte_alphabet()
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)]
    found = []
    for section in cut(text, "|".join(regex.escape(t) for t in sorted(whole, key=len)[::-1])):
        if section in whole:
            found.append(ids[section])
            continue
        pieces = [section]
        for pattern in CUTS[pre]:
            pieces = [part for piece in pieces for part in cut(piece, pattern)]
        for piece in pieces:
            word = "".join(alphabet[byte] for byte in piece.encode())
            is_taken_whole = pre == "llama-bpe" and word in ids
            found += [ids[part] for part in ([word] if is_taken_whole else merge(word, ranks))]
    return found


FRAGMENTS = (
    *(
        "2024",
        "12",
        "120",
        "3.5",
        "1234567",
        "$",
        "%",
        "  ",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "   ",
    ),
    *("loaves", " The", " unmerged", "She'd", "IT'LL", "they'll", "it's", "(x)", "==", "...", "!?"),
    *("é", "naïve", "中文", "²", "½", "🙂", "_", "<|im_end|>", "<tool_call>", "<|im_", "[PAD0]"),
)


def texts(count=300):
    draw = random.Random(0)
    return [TEXT, *("".join(draw.choices(FRAGMENTS, k=draw.randint(1, 12))) for _ in range(count))]


@pytest.fixture
def tokenizer(tmp_path):
    """Exports a file whose metadata is `extra` otherwise, and gives its tokenizer."""

    def make(**extra):
        model = tiny_model(num_hidden_layers=1)
        named = {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
        path = write_gguf(tmp_path / "tiny.gguf", model, extra=named)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return AutoTokenizer.from_pretrained(export_gguf(path, tmp_path / "out"))

    return make


def test_every_pre_tokenizer_has_a_reference():
    assert CUTS.keys() == PRE_TOKENIZERS.keys()
    read = {pre: [reference_encode(text, pre, vocabulary()) for text in texts()] for pre in CUTS}
    for pre, other in combinations(CUTS, 2):
        assert sum(a != b for a, b in zip(read[pre], read[other], strict=True)) > 10


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_read_as_the_reference_reads_them(tokenizer, pre):
    found = tokenizer(pre=pre)
    for text in texts():
        ids = found(text, add_special_tokens=False).input_ids
        assert ids == reference_encode(text, pre, vocabulary()), text
        assert found.decode(ids) == text


def test_characters_are_composed_where_the_original_does_it(tokenizer):
    assert tokenizer(pre="qwen2")("e\u0301").input_ids == tokenizer(pre="qwen2")("é").input_ids
    assert tokenizer(pre="smollm")("e\u0301").input_ids != tokenizer(pre="smollm")("é").input_ids


def test_vocabulary_and_special_tokens(tokenizer):
    found, (tokens, _, _) = tokenizer(), vocabulary()
    assert len(found) == len(tokens)
    assert found.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert found.convert_tokens_to_ids(tokens) == list(range(len(tokens)))
    special = (found.bos_token, found.eos_token, found.pad_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    ids = found("<|im_start|>12<tool_call><|im_end|>").input_ids
    assert found.decode(ids, skip_special_tokens=True) == "12<tool_call>"
    assert found.model_max_length == 512


def test_chat_template(tokenizer):
    found = tokenizer()
    assert found.chat_template == CHAT
    turns = [{"role": "user", "content": "12?"}]
    text = found.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n"


def test_first_and_last_tokens(tokenizer):
    plain = tokenizer(pre="qwen2")("12").input_ids
    assert tokenizer(pre="llama-bpe")("12").input_ids[0] == 1, "Llama 3 begins every text with BOS"
    assert tokenizer(pre="llama-bpe", add_bos_token=False)("12").input_ids[0] != 1
    both = tokenizer(pre="qwen2", add_bos_token=True, add_eos_token=True)
    assert both("12").input_ids == [1, *plain, 2]
    assert both("12", add_special_tokens=False).input_ids == plain


# End tokens


def ends(folder):
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.pad_token_id == 0
    return model.generation_config.eos_token_id, eos_ids(model, tokenizer)


def test_generation_ends_at_the_end_of_a_turn_and_of_a_text(converted):
    assert ends(converted()) == ([2, 0], {2, 0})


def test_a_turn_may_end_otherwise_than_the_file_says(converted):
    """EOS ends a text; the template tells what ends a turn."""
    extra = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 1}
    assert ends(converted(extra=extra)) == ([0, 1, 2], {0, 1, 2})


def test_without_a_chat_template_the_file_is_believed(converted):
    extra = {"tokenizer.ggml.eos_token_id": 1}
    assert ends(converted(extra=extra, drop=("tokenizer.chat_template",))) == ([1, 0], {1, 0})


def test_a_file_without_end_is_refused(converted):
    _, _, kinds = vocabulary()
    extra = {"tokenizer.ggml.token_type": [1, *kinds[1:]]}
    drop = ("tokenizer.chat_template", "tokenizer.ggml.eos_token_id")
    with pytest.raises(ModelError, match="names no token that ends a text"):
        converted(extra=extra, drop=drop)


# The origin


def test_the_readme_tells_the_origin(converted, tmp_path):
    model = tiny_model()
    folder = converted(model, types={"blk.0.ffn_up.weight": Q8_0}, extra={"general.name": "Tiny 0"})
    text = (folder / "README.md").read_text()
    assert text.startswith("# Tiny 0\n")
    digest = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    assert f"| sha256 | `{digest}` |" in text
    assert "| file | `tiny.gguf` |" in text
    num_weights = sum(p.numel() for p in model.parameters())
    assert f"| F32 | 19 | {num_weights - 96 * 64} | 32.00 |" in text
    assert f"| Q8_0 | 1 | {96 * 64} | 8.50 |" in text
    mean = (32 * (num_weights - 96 * 64) + 8.5 * 96 * 64) / num_weights
    assert f"| bits per weight in the file | {mean:.2f} |" in text
    assert "this is not the original checkpoint" in text.replace("\n", " ")


def test_the_readme_of_plain_weights(converted):
    text = (converted() / "README.md").read_text()
    assert "Its weights were not quantized." in text
    assert "not the original" not in text


# Refusals: each names the file and leaves nothing behind


@pytest.fixture
def refused(tmp_path):
    def check(message, path=None, **options):
        path = path or write_gguf(
            tmp_path / "tiny.gguf", tiny_model(num_hidden_layers=1), **options
        )
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ModelError, match=message) as caught:
            export_gguf(path, tmp_path / "out")
        assert str(path) in str(caught.value)
        assert sorted(tmp_path.iterdir()) == before

    return check


def test_other_files(refused, tmp_path):
    refused("is not a file", path=tmp_path / "nowhere.gguf")
    refused("is not a file", path=tmp_path)
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"GGUF" + bytes(100), b"\xff" * 1000):
        (tmp_path / "other.gguf").write_bytes(content)
        refused("other.gguf is not a GGUF file", path=tmp_path / "other.gguf")


def test_a_file_that_is_cut_off_anywhere(refused, tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model(num_hidden_layers=1)).read_bytes()
    draw = random.Random(0)
    lengths = [len(whole) - 1, len(whole) // 2, *(draw.randrange(20000) for _ in range(20))]
    for length in lengths:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused("cut off", path=tmp_path / "cut.gguf")


def test_a_file_that_is_not_sound(refused, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(num_hidden_layers=1))
    whole = path.read_bytes()

    def refused_with(message, old, new):
        assert len(old) == len(new)
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        refused(message, path=path)

    refused_with("version 0x3000000 is not 2 or 3", b"GGUF\3\0\0\0", b"GGUF\0\0\0\3")
    refused_with("eos_token_id comes twice", b"ggml.bos_token_id", b"ggml.eos_token_id")
    refused_with("attn_q.weight comes twice", b"attn_k.weight", b"attn_q.weight")
    refused_with("unknown kind 77", b"block_count\4", b"block_count\x4d")
    refused_with("can't decode", b"context_length", b"context_lengt\xff")
    name, matrix = b"blk.0.attn_q.weight\2\0\0\0", b"\x40" + bytes(7)
    refused_with("are no whole blocks", name + matrix, name + bytes(8))
    refused_with("lies beyond its", name + matrix, name + matrix[:-2] + b"\1\0")


def test_what_is_not_known_is_refused(refused):
    refused("architecture 'mamba' is not one of llama, qwen2, qwen3", architecture="mamba")
    refused("tokenizer.ggml.pre = 'tekken' is not one", extra={"tokenizer.ggml.pre": "tekken"})
    refused("tokenizer.ggml.pre = None", drop=("tokenizer.ggml.pre",))
    refused("ggml.model = 'llama'; only gpt2", extra={"tokenizer.ggml.model": "llama"})
    refused("llama.rope.scaling.type, which", extra={"llama.rope.scaling.type": "yarn"})
    refused("llama.expert_count, which", extra={"llama.expert_count": 8})
    refused("different widths: \\(16, 16, 8\\)", extra={"llama.rope.dimension_count": 8})
    refused("one part of several", extra={"split.count": 2})
    integers = {"blk.0.ffn_norm.weight": np.ones(64, dtype=np.int8)}
    refused("blk.0.ffn_norm.weight cannot be read: .*I8", tensors=integers)


def test_what_is_missing_is_named(refused):
    refused("no tensor token_embd.weight", drop=("token_embd.weight",))
    refused("lacks weights of model.layers.0.mlp.up_proj.weight", drop=("blk.0.ffn_up.weight",))
    for key in ("llama.block_count", "llama.attention.head_count_kv"):
        refused(f"{key} = None; one number", drop=(key,))
    for key in ("tokens", "merges", "token_type"):
        refused(f"no tokenizer.ggml.{key}", drop=(f"tokenizer.ggml.{key}",))


def test_what_does_not_fit_is_refused(refused):
    freqs = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    refused("some tensor was not understood \\(rope_freqs.weight\\)", tensors=freqs)
    further = {"blk.1.ffn_up.weight": np.ones((96, 64), dtype=np.float32)}
    refused("not understood \\(blk.1.ffn_up.weight\\)", tensors=further)
    wide = {"blk.0.ffn_up.weight": np.ones((96, 32), dtype=np.float32)}
    refused("do not fit its settings: blk.0.ffn_up.weight is \\(96, 32\\), and not", tensors=wide)
    odd = {f"llama.attention.{kind}_length": 15 for kind in ("key", "value")}
    refused("heads are 15 wide", extra=odd)
    refused("token 9999 is not one of its", extra={"tokenizer.ggml.eos_token_id": 9999})
    refused("merges do not fit", extra={"tokenizer.ggml.merges": ["Ġ nothing"]})
    refused("token types", extra={"tokenizer.ggml.token_type": [1, 1]})
    short = {"token_embd.weight": np.ones((300, 64), dtype=np.float32)}
    refused("tokens, but embeds only 300", tensors=short)
    refused(
        "its chat template fails", extra={"tokenizer.chat_template": "{{ raise_exception('no') }}"}
    )


def test_twins_in_the_vocabulary_are_refused(refused):
    tokens = [*vocabulary()[0][:-1], "[PAD0]"]
    refused("tokens became", extra={"tokenizer.ggml.tokens": tokens})


def test_a_tokenizer_that_changes_when_it_is_loaded_is_refused(refused, monkeypatch):
    """A class of transformers that puts its own pre-tokenizer in place of the saved one."""
    load = AutoTokenizer.from_pretrained

    def rebuilt(folder):
        tokenizer = load(folder)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        return tokenizer

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", rebuilt)
    refused("is read as")


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    with full_disk(20_000), pytest.raises(CheckpointError, match="out cannot be written"):
        export_gguf(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"'gguf'.*qurl-rl\[gguf\]"):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


# The command


def test_the_command(tmp_path, capsys, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--from-gguf", "tiny.gguf", "a/out", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "a/out\n"
    assert torch.equal(logits(load(tmp_path / "a/out")), logits(tiny_model()))
    assert main(["export", "--from-gguf", "tiny.gguf", "a/out"]) == 2
    assert "a/out exists and is no empty folder" in capsys.readouterr().err
    assert main(["export", "--from-gguf", "tiny.gguf"]) == 2
    assert "expected --from-gguf FILE.gguf OUT, got tiny.gguf" in capsys.readouterr().err
    assert main(["export", "b", "--from-gguf"]) == 2
    assert "expected --from-gguf FILE.gguf OUT, got b" in capsys.readouterr().err
    assert main(["export", "--from-gguf", "tiny.gguf", "b", "--dtype", "int8"]) == 2
    assert "--dtype 'int8' is not one of" in capsys.readouterr().err


def test_an_existing_target_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep me")
    with pytest.raises(ConfigError, match="exists and is no empty folder"):
        export_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]
