"""Recipes, data files and model folders that are wrong, or may be, made by hypothesis.

A strategy draws a function that spoils a folder holding a sound recipe (recipe.toml), data file
(data.jsonl) and model (model/); it returns the words to add to the command line.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from models import as_flags
from safetensors.torch import load_file, save_file

from qurl.config import Config

Spoil = Callable[[Path], Sequence[str]]

NASTY_TEXT = st.one_of(
    st.sampled_from(["", " ", "\0", "\ud800", "~", "~nobody/x", "/", ".", "../..", "a" * 5000]),
    st.sampled_from(["none", "auto", "nan", "os:system", "os:nothing", "gym:nothing", "x.jsonl"]),
    st.sampled_from(["{", "%s", "\\boxed{", "\N{DUCK}", "a\nb", "-1", "module:", ":", "::"]),
    st.text(max_size=8),
)
HUGE = st.sampled_from([-1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**64), 10**30])
FLOATS = st.sampled_from([-1.0, 0.0, 5e-324, 1e-30, 1.0, 1.5, 1e30, 1e308])
NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf")])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), HUGE, FLOATS, NASTY_TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(NASTY_TEXT, inner, max_size=3)
    ),
    max_leaves=5,
)


def leaves(section: Any, prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": its default, ...}."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


KEYS = leaves(Config())
RUNNING = {"run_dir", "device", "threads", "model.gradient_checkpointing", "model.compile"}
"""Left alone: they say where the run is made, or take long."""


def add_key(folder: Path, key: str, value: Any) -> None:
    """Put a key into the recipe, in place of what it says there."""
    *sections, name = key.split(".")
    root = json.loads((folder / "recipe.json").read_text())
    node = root
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    (folder / "recipe.toml").write_text(to_toml(root), encoding="utf-8", errors="surrogatepass")


def to_toml(tree: dict[str, Any]) -> str:
    return "\n".join(f"{_quote(name)} = {_value(value)}" for name, value in tree.items())


def _quote(text: str) -> str:
    # JSON writes characters beyond the first plane as two surrogates, which TOML refuses.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quote(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return _quote(value) if isinstance(value, str) else repr(value)


def _wrong_type(default: Any) -> st.SearchStrategy[Any]:
    """Values that no key with this default takes."""
    kinds: list[st.SearchStrategy[Any]] = [st.just({"a": 1}), NOT_FINITE]
    if not isinstance(default, tuple):
        kinds.append(st.just([["x"]]))
    if isinstance(default, str | tuple):
        kinds += [HUGE, st.booleans()]
    elif isinstance(default, bool):
        kinds += [st.just("yes"), HUGE, st.just("")]
    else:
        kinds += [st.just("many"), st.booleans(), st.just("")]
    return st.one_of(kinds)


def _setting(key: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Spoil]:
    def spoil(value: Any) -> Spoil:
        return lambda folder: add_key(folder, key, value) or []

    return values.map(spoil)


def _odd(default: Any) -> st.SearchStrategy[Any]:
    """Values of the right type that few runs have."""
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return HUGE
    if isinstance(default, str):
        return NASTY_TEXT
    if isinstance(default, tuple):
        return st.lists(st.one_of(NASTY_TEXT, HUGE, FLOATS), max_size=3)
    return st.one_of(FLOATS, HUGE)


SETTABLE = {key: value for key, value in KEYS.items() if key not in RUNNING}
TABLES = ("rollout.vllm.options",)
"""Keys that take names and values of all kinds."""
TYPED = {
    key: value
    for key, value in SETTABLE.items()
    if not isinstance(value, dict) and key not in TABLES
}
WRONG_VALUES = st.sampled_from(sorted(TYPED)).flatmap(
    lambda key: _setting(key, _wrong_type(TYPED[key]))
)
UNKNOWN_KEYS = st.builds(
    lambda key, value: lambda folder: add_key(folder, key, value) or [],
    st.sampled_from(["learning_rate", "optim.learning_rate", "a.b.c", "model.scratch.depth"]),
    st.one_of(HUGE, st.just("x"), st.just([])),
)
ODD_VALUES = st.sampled_from(sorted(SETTABLE)).flatmap(
    lambda key: _setting(key, _odd(SETTABLE[key]))
)


SMALL = {
    "steps": 1,
    "model.scratch.warm-start-steps": 1,
    "batch.problems": 2,
    "batch.minibatches": 1,
    "sampling.max-tokens": 2,
    "algo.kl-coef": 0,
}
"""Flags that keep a run short whose recipe says nothing any more."""


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
        return as_flags(SMALL) if "recipe" in name else []

    return spoil


@st.composite
def damages(draw: Any, name: str) -> Spoil:
    """Bytes cut off, changed, put in or repeated somewhere in a file."""
    place, junk = draw(st.floats(0, 1)), draw(st.binary(min_size=1, max_size=20))
    kind = draw(st.sampled_from(["cut", "overwrite", "insert", "BOM", "UTF-16", "twice", "empty"]))

    def change(old: bytes) -> bytes:
        at = int(place * len(old))
        return {
            "cut": old[:at],
            "overwrite": old[:at] + junk + old[at + len(junk) :],
            "insert": old[:at] + junk + old[at:],
            "BOM": b"\xef\xbb\xbf" + old,
            "UTF-16": old[:2000].decode(errors="replace").encode("utf-16"),
            "twice": old + old,
            "empty": b"",
        }[kind]

    return _rewrite(name, change)


DEEP_RECIPES = st.builds(
    lambda depth, kind: _rewrite(
        "recipe.toml",
        lambda old: {
            "list": f"steps = {'[' * depth}{']' * depth}\n".encode() + old,
            "table": f"steps = {'{a=' * depth}1{'}' * depth}\n".encode() + old,
            "key": f"{'a.' * depth}a = 1\n".encode() + old,
            "number": b"steps = 0x" + b"f" * depth + b"\n",
        }[kind],
    ),
    st.sampled_from([10, 900, 5000]),
    st.sampled_from(["list", "table", "key", "number"]),
)

WORDS = st.lists(
    st.one_of(
        st.sampled_from([f"--{key}" for key in KEYS if key not in RUNNING]),
        st.sampled_from(["--", "-h5", "--=", "recipe.toml", "--steps=", "--optim.betas"]),
        NASTY_TEXT,
    ),
    min_size=1,
    max_size=3,
).filter(lambda words: not {"-h", "--help"} & set(words))
FLAGS = WORDS.map(lambda words: lambda folder: words)


def write_rows(rows: Sequence[Any], reward: str = "") -> Spoil:
    def spoil(folder: Path) -> list[str]:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
        return ["--task.reward", reward] if reward else []

    return spoil


GOOD_ROW = {"prompt": "6*7=", "answer": "42"}
BAD_ROWS = st.one_of(
    st.sampled_from(
        [
            *("{", "[]", "1", "null", '"text"', '{"prompt": "6*7="}', '{"answer": "42"}', "{}"),
            *('{"prompt": NaN, "answer": "42"}', '{"prompt": "a", "answer": Infinity}'),
            *("[" * 100_000, '{"prompt": ' + "[" * 100_000, '{"a": ' * 400 + "1" + "}" * 400),
            *('{"prompt": "\\ud800", "answer": "4"}', '{"prompt": "a", "answer": "\\udfff"}'),
            '{"prompt": "6*7=", "answer": ' + "9" * 5000 + "}",
            '{"prompt": "6*7=", "answer": "1", "x": "\\udc00"}',
        ]
    ),
    st.builds(
        lambda name, value: {**GOOD_ROW, name: value},
        st.just("prompt"),
        st.one_of(HUGE, st.booleans(), st.just(""), st.just([1]), st.just([{"role": "user"}])),
    ),
    st.builds(
        lambda value: {**GOOD_ROW, "answer": value},
        st.one_of(st.booleans(), st.just({}), st.just([[]]), st.just({"a": 1})),
    ),
)
BAD_DATA = st.one_of(
    st.builds(
        lambda row, before: write_rows([*[GOOD_ROW] * before, row]), BAD_ROWS, st.integers(0, 3)
    ),
    st.sampled_from([[], [""], ["\ufeff"]]).map(write_rows),
    st.one_of(
        st.sampled_from([{}, {"numbers": [1, 2]}, {"target": 3}, {"numbers": "1 2", "target": 3}]),
        st.builds(
            lambda numbers, target: {"numbers": numbers, "target": target},
            st.sampled_from([[1.5], ["x"], [None], [], {}, [[]], [True]]),
            st.sampled_from(["7", 7, None, "x"]),
        ),
    ).map(lambda columns: write_rows([{**GOOD_ROW, **columns}], reward="countdown")),
)
ODD_DATA = st.one_of(
    st.lists(
        st.one_of(
            st.just(GOOD_ROW),
            st.dictionaries(
                st.sampled_from(["prompt", "question", "answer", "id", "solution", "extra_info"]),
                JSON,
                max_size=4,
            ),
        ),
        min_size=1,
        max_size=3,
    ).map(write_rows),
    damages("data.jsonl"),
)


@st.composite
def other_files(draw: Any) -> Spoil:
    """A data file whose name says another format than it has, or that cannot be read."""
    name = draw(st.sampled_from(["d.json", "d.parquet", "d.jsonl.gz", "d.csv", "d", "d.bin", "no"]))
    junk = draw(st.one_of(st.just(b""), st.binary(max_size=50), st.just(b"PAR1" * 3)))
    is_cut = draw(st.booleans())

    def spoil(folder: Path) -> list[str]:
        content = gzip.compress(json.dumps(GOOD_ROW).encode())[:-9] if is_cut else junk
        if name == "d.jsonl.gz" and not is_cut and not junk:
            content = b"not gzip"
        if name != "no":
            (folder / name).write_bytes(content)
        return ["--task.path", str(folder / name)]

    return spoil


def edit_json(name: str, key: str, value: Any) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        path = folder / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        return []

    return spoil


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        path = folder / "model" / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return []

    return spoil


def _remove(*names: str) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        for name in names:
            (folder / "model" / name).unlink()
        return []

    return spoil


SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"),
)
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def _poison(name: str, value: float) -> Spoil:
    return edit_weights(lambda tensors: tensors[name].view(-1)[3:4].fill_(value))


BAD_MODELS = st.one_of(
    st.builds(
        lambda key, value: edit_json("config.json", key, value),
        st.sampled_from([size for size in SIZES if size != "max_position_embeddings"]),
        st.sampled_from([-1, 0, 7, 10**30, "x", [], {}, True, 1.5]),
    ),
    st.builds(
        lambda key: edit_json("config.json", key, None),
        st.sampled_from(["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]),
    ),
    st.sampled_from(
        [
            edit_json("config.json", "quantization_config", {"quant_method": "gptq", "bits": 4}),
            edit_json("config.json", "quantization_config", None),
            edit_json("config.json", "model_type", "nothing"),
            edit_json("config.json", "model_type", None),
            edit_json("config.json", "model_type", "bert"),
            edit_json("config.json", "hidden_act", "relu"),
            edit_json("config.json", "hidden_act", "nothing"),
            edit_json("tokenizer_config.json", "chat_template", "{{ raise_exception('no') }}"),
            edit_json("tokenizer_config.json", "chat_template", "{% for %}"),
            edit_json("tokenizer_config.json", "chat_template", "{{ messages[7].content }}"),
            edit_json("tokenizer_config.json", "chat_template", "{{ 1 / 0 }}"),
            edit_json("tokenizer_config.json", "chat_template", "{{ nothing() }}"),
            edit_json("tokenizer_config.json", "chat_template", "{# silent #}"),
            _remove("config.json"),
            _remove("model.safetensors"),
            _remove("tokenizer.json"),
            _remove("tokenizer.json", "tokenizer_config.json"),
        ]
    ),
    st.builds(
        _poison,
        st.sampled_from([WEIGHT, "model.norm.weight", "model.embed_tokens.weight"]),
        NOT_FINITE,
    ),
    st.sampled_from(
        [
            edit_weights(lambda tensors: tensors.pop(WEIGHT)),
            edit_weights(lambda t: t.update({WEIGHT: t[WEIGHT][:-1].contiguous()})),
            edit_weights(lambda t: t.update({WEIGHT: t[WEIGHT].T.contiguous()})),
            edit_weights(lambda tensors: tensors.clear()),
        ]
    ),
)
ODD_MODELS = st.one_of(
    st.builds(
        edit_json,
        st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json"]),
        st.sampled_from(
            [
                *SIZES,
                *("eos_token_id", "pad_token_id", "rms_norm_eps", "rope_parameters", "dtype"),
                *(
                    "tie_word_embeddings",
                    "architectures",
                    "auto_map",
                    "attention_bias",
                    "use_cache",
                ),
                *("temperature", "do_sample", "eos_token", "tokenizer_class", "chat_template"),
                *("model_max_length", "added_tokens_decoder", "qurl_uaq", "layer_types"),
            ]
        ),
        JSON,
    ),
    st.sampled_from(
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    ).flatmap(lambda name: damages(f"model/{name}")),
)
