"""The files that hold a model's weights: which they are, what their headers say, what they hold.

What needs no torch is seen before torch is imported. A file that is damaged, or was made for
something else, is refused by its name.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError, safe_open

from qurl.errors import ModelError
from qurl.ops.families import local_engine_families

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAMES = (  # in the order in which transformers looks for them
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_FLOATS = ("F64", "F32", "F16", "BF16")
_LONGEST_HEADER = 100_000_000  # bytes; safetensors has the same limit
_CHUNK = 2**22  # numbers that are looked at together

LARGEST_WEIGHT = 1e10
"""No trained model comes near it; larger numbers are damage, and overflow in the first forward."""

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError),
    *(RuntimeError, ImportError, AssertionError, UnpicklingError, zipfile.BadZipFile),
    SafetensorError,
)
"""What transformers, torch and pickle raise about files that are damaged or make no sense."""
UNWRITABLE = (OSError, RuntimeError, SafetensorError, ValueError)
"""A full disk raises any of the first three; transformers refuses with a ValueError."""

NO_WEIGHTS = "it is damaged, or holds Python objects other than weights, which are never loaded"


def find_weights(folder: Path) -> list[Path]:
    """The files of weights that transformers, or our adapters, would read; empty if there are none.

    Raises ModelError if one of several parts is not there.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    names = (ADAPTER_WEIGHTS,) if is_adapter else _NAMES
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        return []
    return _parts(found) if found.name.endswith(".index.json") else [found]


def _parts(index: Path) -> list[Path]:
    """The files that an index names, all of which must be there."""
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{index} has no 'weight_map' that says which file holds which weights")
    for name in table.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not the name of a file beside it")
    files = [index.parent / name for name in sorted(set(table.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(files)} files "
            "are missing); fetch the model again"
        )
    return files


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file of a model holds."""
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        json.dumps(found, ensure_ascii=False).encode()  # a checkpoint writes it again
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds a {type(found).__name__}, not an object")
    return found


def check_headers(files: Sequence[Path]) -> None:
    """Refuse files that are cut off, and codes of a quantized model, which are no weights."""
    headers = {file: _read_header(file) for file in files if file.suffix == ".safetensors"}
    for file, header in headers.items():
        for name, entry in header.items():
            if name.endswith(".weight") and entry["dtype"] not in _FLOATS:
                raise ModelError(
                    f"{file}: {name} is stored as {entry['dtype']}, so the weights are quantized "
                    "already; use the full-precision model, which quant.format quantizes for the "
                    "rollouts"
                )


def _read_header(file: Path) -> Mapping[str, Any]:
    """{name: its dtype, shape and place} of a safetensors file, which must have its full size."""
    remedy = "use an undamaged copy"
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise ModelError(f"{file} is a pointer of Git LFS, not the weights; `git lfs pull`")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > _LONGEST_HEADER:
                raise ModelError(f"{file} cannot be read: it has no header; {remedy}")
            header = dict(json.loads(stream.read(length)))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        size = file.stat().st_size
        types = {entry["dtype"] for entry in header.values()}
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file} cannot be read: {error}; {remedy}") from error
    if size != 8 + length + end or not all(isinstance(kind, str) for kind in types):
        raise ModelError(
            f"{file} cannot be read: it has {size} bytes and needs {8 + length + end}; {remedy}"
        )
    return header


def check_finite(path: str | Path) -> str:
    """Read all weights of a folder in pieces; raise ModelError if a number is not finite."""
    count, largest = 0, {}
    for file, name, piece in _pieces(find_weights(Path(path))):
        if not piece.is_floating_point() or not piece.numel():
            continue
        count += piece.numel()
        peak = float(piece.float().abs().max())
        if not peak < LARGEST_WEIGHT:
            where = f"model.path = {str(path)!r}"
            raise ModelError(describe_broken(where, f"{name} of {file.name}"))
        largest[name] = max(peak, largest.get(name, 0.0))
    note = describe_empty([name for name, peak in largest.items() if peak == 0 and "." in name])
    return f"{count:,} numbers are finite{f'; {note}' if note else ''}"


def describe_broken(where: str, tensor: str) -> str:
    return (
        f"{where}: the weights hold NaN, infinity or numbers beyond {LARGEST_WEIGHT:g} ({tensor}); "
        "use an undamaged copy"
    )


def describe_empty(names: Sequence[str]) -> str:
    """A note about weights that are all 0; empty if there are none."""
    # Some norms, such as Gemma's, add 1 to their weights.
    matrices = [name for name in names if name.endswith(".weight") and "norm" not in name]
    if not matrices:
        return ""
    more = f" and {len(matrices) - 1} others" if matrices[1:] else ""
    return f"all numbers of {matrices[0]}{more} are 0: is the file damaged?"


def check_shapes(path: str | Path, model: Any) -> None:
    """Raise unless the weights of a folder have the shapes of a model, which may be empty."""
    prefix, found = f"{model.base_model_prefix}.", {}
    for file in find_weights(Path(path)):
        if file.suffix == ".safetensors":
            shapes = {name: entry["shape"] for name, entry in _read_header(file).items()}
        else:
            shapes = {name: list(tensor.shape) for name, tensor in _load_bin(file).items()}
        found |= {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    aliases: dict[int, list[str]] = {}  # names of tied weights stand for each other
    for name, weight in model.named_parameters(remove_duplicate=False):
        short = name.removeprefix(prefix)
        aliases.setdefault(id(weight), []).append(short)
        shape = found.get(short)
        if shape is not None and list(shape) != list(weight.shape):
            raise ModelError(
                f"model.path = {str(path)!r}: the weights of {name} have the shape "
                f"{list(shape)}, and config.json gives {list(weight.shape)}"
            )
    missing = [names[0] for names in aliases.values() if not set(names) & set(found)]
    known = {name for names in aliases.values() for name in names}
    # Names that are not known may be those of an older version, which transformers converts.
    if missing and (set(found) <= known or model.config.model_type in local_engine_families()):
        raise ModelError(f"model.path = {str(path)!r}: the weights lack {', '.join(missing[:3])}")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}; use an undamaged copy") from error


def _load_bin(file: Path) -> Mapping[str, Any]:
    import torch

    options = {"map_location": "cpu", "weights_only": True, "mmap": zipfile.is_zipfile(file)}
    try:
        weights = torch.load(file, **options)
    except UNREADABLE as error:
        [reason, *_] = str(error).splitlines() or [type(error).__name__]
        reason = NO_WEIGHTS if isinstance(error, UnpicklingError) else reason
        raise ModelError(f"{file} cannot be read as weights: {reason}") from error
    if not isinstance(weights, dict) or not all(torch.is_tensor(t) for t in weights.values()):
        raise ModelError(
            f"{file} cannot be read as weights: it holds a {type(weights).__name__} that is not a "
            "table of tensors; save model.state_dict()"
        )
    return weights


def _pieces(files: Sequence[Path]) -> Iterator[tuple[Path, str, Any]]:
    """(file, name, piece) of all tensors; of safetensors, only one piece is in memory at a time."""
    for file in files:
        if file.suffix != ".safetensors":
            for name, tensor in _load_bin(file).items():
                for piece in tensor.flatten().split(_CHUNK):
                    yield file, name, piece
            continue
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
