"""The tokenizer of transformers and the end tokens, from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from qurl.errors import ModelError
from qurl.run.gguf.file import GgufFile, tokenizer_list

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
    vocabulary = {token: id for id, token in enumerate(tokenizer_list(file, "tokens"))}
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
    tokens = tokenizer_list(file, "tokens")
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
    return [(a, b) for a, _, b in (m.partition(" ") for m in tokenizer_list(file, "merges"))]


def _ids_of_type(file: GgufFile, kind: int) -> list[int]:
    types = tokenizer_list(file, "token_type")
    if len(types) != (num_tokens := len(tokenizer_list(file, "tokens"))):
        raise ModelError(f"{file.path} has {num_tokens} tokens, but {len(types)} token types")
    return [id for id, type in enumerate(types) if type == kind]


def _named_token(file: GgufFile, kind: str) -> str | None:
    id, tokens = file.token(kind), tokenizer_list(file, "tokens")
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


# The check of what was written

_PROBES = (
    "In 2024,  she'd sold 1234567 of 3.5 apples!\n\n  Why?\t(12 / 4) == 3\r\n",
    "def f(x):\n    return x ** 2  # 100%\n",
    "naïve café, Über, 中文, русский, 日本語 ١٢٣ ½ Ⅷ e\u0301 🙂",
)


def check_tokenizer(folder: Path, built: Any, file: GgufFile) -> None:
    """What others will load is the file's own; some classes of transformers rebuild theirs."""
    from transformers import AutoTokenizer

    written: Any = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer_list(file, "tokens")
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
