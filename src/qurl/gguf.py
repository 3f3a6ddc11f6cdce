"""GGUF: a checkpoint of llama.cpp becomes a plain Hugging Face folder.

transformers reads the weights. The configuration, the tokenizer and the end tokens are made here
from the file's metadata, because a conversion that goes wrong there goes wrong silently: a model
with a neighbouring tokenizer, another rope theta or an untied head still talks, only worse. For the
same reason whatever is not known here is refused: an architecture, one of its settings, a
pre-tokenizer, a tensor that found no place in the model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from qurl.errors import ConfigError, MissingExtra, ModelError
from qurl.quant.export import DTYPES, check_free, staged_folder

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Both the name in the file and the model type of transformers."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

_FLOAT_BITS = {"F32": 24, "F16": 11, "BF16": 8}
"""Bits of the significand."""


def export_gguf(source: Path, target: Path, dtype: str = "bfloat16") -> Path:
    """Write the model, the tokenizer and the origin of a GGUF file to `target`."""
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_free(target)
    disable_progress_bar()
    file = read_gguf(source)
    config = model_config(file)
    tokenizer = build_tokenizer(file)
    ends = end_token_ids(file, tokenizer)
    model = _load_model(file, config, DTYPES[dtype])
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
    )
    with staged_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _check_tokenizer(folder, tokenizer, file)
        (folder / "README.md").write_text(_origin(file, dtype), encoding="utf-8")
    return target


# The file


@dataclass(frozen=True)
class GgufFile:
    """What a file says about itself; its tensors stay on disk until they are asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    def setting(self, key: str, default: float | None = None) -> Any:
        """A number of the architecture; without a default it must be there."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, (int, float)):
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} = {value!r}; one number was expected"
            )
        return value

    def token(self, kind: str) -> int | None:
        """The id of the file's `kind` token, such as bos or eos."""
        return self.metadata.get(f"tokenizer.ggml.{kind}_token_id")

    @cached_property
    def has_duplicate_head(self) -> bool:
        """Whether embedding and head are one matrix, tied once, that was quantized twice.

        Then they differ by what the coarser of their types rounds away: with b bits, a few 2^-b of
        the norm. Two matrices that have nothing in common differ by more than all of it.
        """
        if HEAD not in self.tensors:
            return False
        embedding, head = self.tensors[EMBEDDING], self.tensors[HEAD]
        if tuple(embedding.shape) != tuple(head.shape):
            return False
        difference = norm = 0.0
        for a, b in zip(_rows(embedding), _rows(head), strict=True):
            difference += float(np.square(a - b, dtype=np.float64).sum())
            norm += float(np.square(b, dtype=np.float64).sum())
        bits = min(_resolution(embedding), _resolution(head))
        return math.sqrt(difference) <= 4 * 2**-bits * math.sqrt(norm)


def read_gguf(path: Path) -> GgufFile:
    for package in ("gguf", "accelerate"):  # transformers loads no GGUF file without accelerate
        if find_spec(package) is None:
            raise MissingExtra(package, "gguf", f"reading {path}")
    import gguf

    if not path.is_file():
        raise ModelError(f"{path} is not a file (seen from {Path.cwd()})")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ModelError(
            f"{path} is not a GGUF file that can be read to its end; it may be another kind of "
            f"file, or cut off: {error}"
        ) from error
    file = GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    _check_file(file)
    return file


def _check_file(file: GgufFile) -> None:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of several; join them with llama-gguf-split")
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {EMBEDDING}: it holds no language model")
    num_rows, num_tokens = _vocab_size(file), len(_tokenizer_list(file, "tokens"))
    if num_tokens > num_rows:
        raise ModelError(f"{file.path} has {num_tokens} tokens, but embeds only {num_rows}")


def _vocab_size(file: GgufFile) -> int:
    return int(file.tensors[EMBEDDING].shape[1])  # the file's shapes are [columns, rows]


def _rows(tensor: Any, chunk: int = 8192) -> Iterator[np.ndarray]:
    """The values of a matrix, some rows at a time."""
    import gguf

    for start in range(0, len(tensor.data), chunk):
        yield gguf.dequantize(tensor.data[start : start + chunk], tensor.tensor_type)


def _resolution(tensor: Any) -> float:
    """Bits that tell neighbouring values apart."""
    return _FLOAT_BITS.get(tensor.tensor_type.name, _mean_bits([tensor]))


def _mean_bits(tensors: Iterable[Any]) -> float:
    """Bits per weight, the scales of the blocks included."""
    sizes = [(int(tensor.n_bytes), int(tensor.n_elements)) for tensor in tensors]
    return 8 * sum(size for size, _ in sizes) / sum(count for _, count in sizes)


# Configuration

_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
"""Those that a file must have. The heads of the keys might be left out, by the format; but then
transformers would leave the rows of Llama's queries and keys in the file's order."""
_OTHER_SETTINGS = (
    *("attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length"),
    *("rope.dimension_count", "rope.freq_base", "vocab_size"),
)


def model_config(file: GgufFile) -> Any:
    """The configuration of transformers, from settings that are all understood."""
    from transformers import AutoConfig

    known = {f"{file.architecture}.{key}" for key in (*_SETTINGS.values(), *_OTHER_SETTINGS)}
    ours = {key for key in file.metadata if key.startswith(f"{file.architecture}.")}
    if unknown := sorted(ours - known):
        raise ModelError(
            f"{file.path} sets {', '.join(unknown)}, which would be lost: only a plain "
            f"{file.architecture} model can be converted"
        )
    settings = {name: file.setting(key) for name, key in _SETTINGS.items()}
    return AutoConfig.for_model(
        file.architecture,
        **settings,
        **_head_dim(file, settings["hidden_size"] // settings["num_attention_heads"]),
        vocab_size=_vocab_size(file),
        rms_norm_eps=_decimal(file.setting("attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _decimal(file.setting("rope.freq_base", 10000.0)),
        },
        tie_word_embeddings=HEAD not in file.tensors or file.has_duplicate_head,
        bos_token_id=file.token("bos"),
        eos_token_id=file.token("eos"),
        pad_token_id=file.token("padding"),
    )


def _head_dim(file: GgufFile, default: int) -> dict[str, int]:
    """The width of a head, where it is not the one that transformers would take."""
    head_dim = file.setting("attention.key_length", default)
    widths = (
        head_dim,
        file.setting("attention.value_length", default),
        file.setting("rope.dimension_count", head_dim),
    )
    if len(set(widths)) > 1:
        raise ModelError(
            f"{file.path}: keys, values and the rotary embedding have different widths: {widths}"
        )
    is_implied = head_dim == default and file.architecture != "qwen3"  # whose own default is 128
    return {} if is_implied else {"head_dim": head_dim}


def _decimal(value: float) -> float:
    """What was written before it became a 32-bit float: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))


# Weights


def _load_model(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A plain model with the file's weights, all of them; for saving only."""
    from transformers import AutoModelForCausalLM

    weights = _load_weights(file, config, dtype)
    if file.has_duplicate_head:
        embedding, head = file.tensors[EMBEDDING], file.tensors[HEAD]
        is_head_finer = _resolution(head) > _resolution(embedding)
        finer = weights["lm_head.weight" if is_head_finer else "model.embed_tokens.weight"]
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] = finer
    # The loaded model counts as quantized, and transformers saves no such model.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # transformers has taken any shape
        raise ModelError(f"{file.path}: its weights do not fit its settings: {error}") from error
    model.tie_weights()
    _check_all_used(file, model)
    return model


def _load_weights(file: GgufFile, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    import transformers
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer ones would rather keep the blocks packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)  # type: ignore[attr-defined]
    config = copy.deepcopy(config)
    config.tie_word_embeddings = HEAD not in file.tensors  # of two copies, both are wanted
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.path.parent,
            gguf_file=file.path.name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{file.path}: its weights cannot be loaded: {error}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise ModelError(f"{file.path} lacks weights of {', '.join(missing[:3])}")
    return dict(model.state_dict())


def _check_all_used(file: GgufFile, model: Any) -> None:
    """The loader drops a tensor that it does not know, so the weights are counted."""
    stored = sum(int(tensor.n_elements) for tensor in file.tensors.values())
    if file.has_duplicate_head:
        stored -= int(file.tensors[HEAD].n_elements)
    used = sum(parameter.numel() for parameter in model.parameters())
    if stored != used:
        layers = [name for name in file.tensors if not name.startswith("blk.")]
        raise ModelError(
            f"{file.path} holds {stored} weights, but the model made of it {used}: some tensor was "
            f"not understood (outside of the layers there are {', '.join(layers)})"
        )


# Tokenizer

_CONTROL, _USER_DEFINED = 3, 4

_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""What transformers calls them, and the file."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE cuts a text before it merges."""

    steps: Sequence[Any]
    normalizer: Any = None
    ignores_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges make of it."""
    adds_bos: bool = False
    """Where the file does not say."""


def _split(numbers: str) -> Sequence[Any]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return (
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer([_GPT2]),
    "smollm": PreTokenizer([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "qwen2": PreTokenizer(_split(r"\p{N}"), normalizer=normalizers.NFC()),
    "llama-bpe": PreTokenizer(_split(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`, each as in the tokenizer.json of the models that it is named after."""


def build_tokenizer(file: GgufFile) -> Any:
    """The tokenizer of transformers, from the file's vocabulary, merges and chat template."""
    from transformers import PreTrainedTokenizerFast

    named = {f"{name}_token": _named_token(file, kind) for name, kind in _NAMED_TOKENS.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(file),
        clean_up_tokenization_spaces=False,
        model_max_length=file.setting("context_length"),
        **named,
    )
    tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level_bpe(file: GgufFile) -> Tokenizer:
    cut = _pre_tokenizer(file)
    vocabulary = {token: id for id, token in enumerate(_tokenizer_list(file, "tokens"))}
    try:
        model = models.BPE(vocabulary, _merges(file), ignore_merges=cut.ignores_merges)
    except Exception as error:  # the bindings raise nothing more specific
        raise ModelError(f"{file.path}: tokens and merges do not fit together: {error}") from error
    tokenizer = Tokenizer(model)
    if cut.normalizer is not None:
        tokenizer.normalizer = cut.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(cut.steps))
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, file)
    _add_first_and_last(tokenizer, file, cut)
    return tokenizer


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    kind, name = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model = {kind!r}; only gpt2, a byte-level BPE, is known"
        )
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is not one of "
            f"{', '.join(PRE_TOKENIZERS)}; with a wrong one the model would read other tokens than "
            "it was trained on"
        )
    return PRE_TOKENIZERS[str(name)]


def _add_whole_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Tokens that are found in a text before anything else: `<|im_end|>`, `<tool_call>`."""
    tokens = _tokenizer_list(file, "tokens")
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(tokens[id], special=is_special, normalized=False)
                for id in _ids_of_type(file, kind)
            ]
        )


def _add_first_and_last(tokenizer: Tokenizer, file: GgufFile, cut: PreTokenizer) -> None:
    """The tokens that every text gets, unless it is asked for without."""

    def added(kind: str, default: bool) -> list[str]:
        is_added = file.metadata.get(f"tokenizer.ggml.add_{kind}_token", default)
        return [token] if is_added and (token := _named_token(file, kind)) else []

    first, last = added("bos", cut.adds_bos), added("eos", False)
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*first, *last}],
        )


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    return [(a, b) for a, _, b in (m.partition(" ") for m in _tokenizer_list(file, "merges"))]


def _tokenizer_list(file: GgufFile, key: str) -> Sequence[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ModelError(f"{file.path} has no tokenizer.ggml.{key}, without which no text is read")
    return values


def _ids_of_type(file: GgufFile, kind: int) -> list[int]:
    types = _tokenizer_list(file, "token_type")
    if len(types) != (num_tokens := len(_tokenizer_list(file, "tokens"))):
        raise ModelError(f"{file.path} has {num_tokens} tokens, but {len(types)} token types")
    return [id for id, type in enumerate(types) if type == kind]


def _named_token(file: GgufFile, kind: str) -> str | None:
    id, tokens = file.token(kind), _tokenizer_list(file, "tokens")
    if id is not None and id >= len(tokens):
        raise ModelError(f"{file.path}: {kind} token {id} is not one of its {len(tokens)} tokens")
    return None if id is None else tokens[id]


# End tokens

_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")


def end_token_ids(file: GgufFile, tokenizer: Any) -> list[int]:
    """Ends of a sequence, a turn and a text; the one that the file calls EOS comes first.

    The chat template is asked as well, because files exist whose EOS ends a text but no turn.
    """
    ids = [file.token("eos"), file.token("eot"), file.token("eom"), _turn_end(file, tokenizer)]
    ends = tokenizer.convert_tokens_to_ids(list(_ENDS_OF_TEXT))
    ids += [id for id in ends if id in _ids_of_type(file, _CONTROL)]
    found = list(dict.fromkeys(id for id in ids if id is not None))
    if not found:
        raise ModelError(
            f"{file.path} names no token that ends a text (tokenizer.ggml.eos_token_id)"
        )
    return found


def _turn_end(file: GgufFile, tokenizer: Any) -> int | None:
    """The control token that the chat template writes after an assistant's words."""
    if not tokenizer.chat_template:
        return None
    words = "QuRL"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        raise ModelError(f"{file.path}: its chat template fails: {error}") from error
    rest = tokenizer(text.partition(words)[2], add_special_tokens=False).input_ids
    return rest[0] if rest and rest[0] in _ids_of_type(file, _CONTROL) else None


# What was written

_PROBES = (
    "In 2024,  she'd sold 1234567 of 3.5 apples!\n\n  Why?\t(12 / 4) == 3\r\n",
    "def f(x):\n    return x ** 2  # 100%\n",
    "naïve café, Über, 中文, русский, 日本語 ١٢٣ ½ Ⅷ e\u0301 🙂",
)


def _check_tokenizer(folder: Path, built: Any, file: GgufFile) -> None:
    """What others will load is the file's own; some classes of transformers rebuild theirs."""
    from transformers import AutoTokenizer

    written: Any = AutoTokenizer.from_pretrained(folder)
    tokens = _tokenizer_list(file, "tokens")
    if len(written) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens became {len(written)}")
    for id, token in enumerate(written.convert_ids_to_tokens(range(len(tokens)))):
        if token != tokens[id]:
            raise ModelError(f"{file.path}: token {id} became {token!r}, and was {tokens[id]!r}")
    merges = json.loads(written.backend_tokenizer.to_str())["model"]["merges"]
    if [tuple(merge) for merge in merges] != _merges(file):
        raise ModelError(f"{file.path}: the merges of the written tokenizer are not the file's")
    if written.chat_template != file.metadata.get("tokenizer.chat_template"):
        raise ModelError(f"{file.path}: the chat template of the written tokenizer is another one")
    whole = " 12".join(token.content for token in built.added_tokens_decoder.values())
    for text in (*_PROBES, whole):
        if (ids := written(text).input_ids) != (expected := built(text).input_ids):
            raise ModelError(f"{file.path}: written, {text!r} is read as {ids}, not as {expected}")


_CARD = """\
# {name}

Made from a GGUF file by `qurl export --from-gguf`. {warning}

| | |
|---|---|
| file | `{file}` |
| sha256 | `{sha256}` |
| architecture | {architecture} |
| licence | {license} |
| bits per weight in the file | {bits:.2f} |
| written as | {dtype} |

| GGML type | tensors | weights | bits per weight |
|---|---|---|---|
{types}
"""
_WARNING = (
    "The weights had {bits:.2f} bits on average in it, and what that rounded away is lost: this is "
    "not the original checkpoint."
)
_TIED = """
The file holds the embedding twice, as {} for the input and as {} for the output. Both
are copies of one tied matrix. It is tied here again, and the finer copy is used.
"""


def _origin(file: GgufFile, dtype: str) -> str:
    """A model card: where the weights come from, and what they went through."""
    by_type: dict[str, list[Any]] = {}
    for tensor in file.tensors.values():
        by_type.setdefault(tensor.tensor_type.name, []).append(tensor)
    bits = _mean_bits(file.tensors.values())
    is_quantized = not by_type.keys() <= _FLOAT_BITS.keys()
    card = _CARD.format(
        name=file.metadata.get("general.name", file.path.stem),
        warning=_WARNING.format(bits=bits) if is_quantized else "Its weights were not quantized.",
        file=file.path.name,
        sha256=_sha256(file.path),
        architecture=file.architecture,
        license=file.metadata.get("general.license", "not stated in the file"),
        bits=bits,
        dtype=dtype,
        types="\n".join(_type_row(name, by_type[name]) for name in sorted(by_type)),
    )
    if file.has_duplicate_head:
        kinds = [file.tensors[name].tensor_type.name for name in (EMBEDDING, HEAD)]
        card += _TIED.format(*kinds)
    return card


def _type_row(name: str, tensors: Sequence[Any]) -> str:
    num_weights = sum(int(tensor.n_elements) for tensor in tensors)
    return f"| {name} | {len(tensors)} | {num_weights} | {_mean_bits(tensors):.2f} |"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
