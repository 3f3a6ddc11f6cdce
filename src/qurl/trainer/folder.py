"""What can be seen of a model folder before torch is imported, and whether its weights are numbers.

A folder that transformers would read with a traceback, a hang or a wrong explanation is refused
here, by the file and the value that is wrong.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from qurl.errors import ModelError
from qurl.ops.families import local_engine_families

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "vocab.model"),
)
_OTHER_JSON = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_SIZES = {  # the largest that is believed; transformers would build a list of 10^30 layers
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
}
_OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
_CHUNK = 2**22  # numbers that are looked at together

LARGEST_WEIGHT = 1e10
"""No trained model comes near it; larger numbers are damage, and overflow in the first forward."""

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError),
    *(RuntimeError, ImportError, AssertionError, UnpicklingError, zipfile.BadZipFile),
)
"""What transformers, torch and pickle raise about files that are damaged or make no sense."""


def check_folder(
    path: str | Path, key: str = "model.path", *, needs: Sequence[str] = ("weights", "tokenizer")
) -> None:
    """Raise ModelError if a folder cannot hold a model and what it `needs`; hub names pass."""
    name = f"{key} = {str(path)!r}"
    if not os.path.exists(path):
        # A hub name is `owner/name`.
        if str(path).count("/") > 1 or str(path).startswith((".", "/", "~")):
            raise ModelError(f"{name} does not exist (seen from {Path.cwd()})")
        return
    if not os.path.isdir(path):
        raise ModelError(f"{name} is a file; give the folder that holds config.json")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelError(f"{name} cannot be read; check its permissions")
    folder = Path(path)
    files = {entry.name for entry in folder.iterdir()}
    config_file = ADAPTER_CONFIG if ADAPTER_CONFIG in files else "config.json"
    if config_file not in files:
        raise ModelError(f"{name} has no config.json; give a folder that save_pretrained wrote")
    config = _read_object(folder / config_file)
    for other in files.intersection(_OTHER_JSON):
        _read_object(folder / other)
    if config_file != ADAPTER_CONFIG:
        _check_config(config, folder / config_file)
    if "weights" in needs and not any(file.endswith(_WEIGHTS) for file in files):
        raise ModelError(f"{name} has no weights: no .safetensors and no .bin file")
    if "tokenizer" in needs and not files.intersection(_TOKENIZERS):
        raise ModelError(
            f"{name} has no tokenizer: none of {', '.join(_TOKENIZERS[:4])}; copy the tokenizer "
            "files of the model into it"
        )


def _check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that no model has."""
    for name, largest in _SIZES.items():
        value: Any = config.get(name)
        if name not in config or (value is None and name in _OPTIONAL):
            continue
        if isinstance(value, list) and value:
            continue  # one size for each layer; transformers knows which models have them
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            is_huge = isinstance(value, int) and abs(value) > largest
            shown = f"{value:#x}"[:40] if is_huge else repr(value)[:100]
            raise ModelError(f"{where}: {name} = {shown} must be a number from 1 to {largest}")


def _check_config(config: dict[str, Any], file: Path) -> None:
    if "quantization_config" in config or "compression_config" in config:
        given = config.get("quantization_config") or config.get("compression_config")
        method = given.get("quant_method", "unknown") if isinstance(given, dict) else given
        raise ModelError(
            f"{file}: the weights are quantized already (quantization_config, {method!r}); use the "
            "full-precision model, which quant.format quantizes for the rollouts"
        )
    if not isinstance(config.get("model_type", ""), str):
        raise ModelError(f"{file}: model_type = {config['model_type']!r} must be a text")
    _check_sizes(config, str(file))
    if isinstance(nested := config.get("text_config"), dict):
        _check_sizes(nested, f"{file}, text_config")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        json.dumps(found, ensure_ascii=False).encode()  # a checkpoint writes it again
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds a {type(found).__name__}, not an object")
    return found


def check_finite(path: str | Path, key: str = "model.path") -> str:
    """Read all weights of a folder in pieces; raise ModelError if a number is not finite."""
    count = 0
    for file, name, piece in _pieces(Path(path)):
        if not piece.is_floating_point():
            continue
        count += piece.numel()
        if not bool((piece.float().abs() < LARGEST_WEIGHT).all()):
            raise ModelError(describe_broken(f"{key} = {str(path)!r}", f"{name} of {file.name}"))
    return f"{count:,} numbers are finite"


def describe_broken(where: str, tensor: str) -> str:
    return (
        f"{where}: the weights hold NaN, infinity or numbers beyond {LARGEST_WEIGHT:g} ({tensor}); "
        "use an undamaged copy"
    )


def check_shapes(path: str | Path, model: Any, key: str = "model.path") -> None:
    """Raise unless the weights of a folder have the shapes of a model, which may be empty."""
    prefix, found = f"{model.base_model_prefix}.", {}
    files = list(Path(path).glob("*.safetensors"))
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name.removeprefix(prefix)] = tensors.get_slice(name).get_shape()
    if not files:  # a .bin file, whose shapes are not known without reading all of it
        return
    aliases: dict[int, list[str]] = {}  # names of tied weights stand for each other
    for name, weight in model.named_parameters(remove_duplicate=False):
        short = name.removeprefix(prefix)
        aliases.setdefault(id(weight), []).append(short)
        shape = found.get(short)
        if shape is not None and list(shape) != list(weight.shape):
            raise ModelError(
                f"{key} = {str(path)!r}: the weights of {name} have the shape {list(shape)}, and "
                f"config.json gives {list(weight.shape)}"
            )
    missing = [names[0] for names in aliases.values() if not set(names) & set(found)]
    known = {name for names in aliases.values() for name in names}
    # Names that are not known may be those of an older version, which transformers converts.
    if missing and (set(found) <= known or model.config.model_type in local_engine_families()):
        raise ModelError(f"{key} = {str(path)!r}: the weights lack {', '.join(missing[:3])}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}; use an undamaged copy") from error


def _pieces(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """(file, name, piece) of all tensors; only one piece is in memory at a time."""
    import torch

    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                shape = part.get_shape()
                if not shape:
                    yield file, name, tensors.get_tensor(name)
                    continue
                width = max(1, _CHUNK * shape[0] // max(1, prod(shape)))
                for start in range(0, shape[0], width):
                    yield file, name, part[start : start + width]
    for file in () if files else sorted(folder.glob("*.bin")):
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except UNREADABLE as error:
            raise ModelError(
                f"{file} cannot be read as weights: {str(error).splitlines()[0]}"
            ) from error
        for name, tensor in weights.items():
            for piece in tensor.flatten().split(_CHUNK):
                yield file, name, piece
