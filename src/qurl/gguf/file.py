"""What a GGUF file holds: metadata, tensors and their bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from qurl.errors import MissingExtra, ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Both the name in the file and the model type of transformers."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

FLOAT_BITS = {"F32": 24, "F16": 11, "BF16": 8}
"""Bits of the significand."""


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
        bits = min(resolution(embedding), resolution(head))
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
    num_rows, num_tokens = vocab_size(file), len(tokenizer_list(file, "tokens"))
    if num_tokens > num_rows:
        raise ModelError(f"{file.path} has {num_tokens} tokens, but embeds only {num_rows}")


def vocab_size(file: GgufFile) -> int:
    return int(file.tensors[EMBEDDING].shape[1])  # the file's shapes are [columns, rows]


def tokenizer_list(file: GgufFile, key: str) -> Sequence[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ModelError(f"{file.path} has no tokenizer.ggml.{key}, without which no text is read")
    return values


def _rows(tensor: Any, chunk: int = 8192) -> Iterator[np.ndarray]:
    """The values of a matrix, some rows at a time."""
    import gguf

    for start in range(0, len(tensor.data), chunk):
        yield gguf.dequantize(tensor.data[start : start + chunk], tensor.tensor_type)


def resolution(tensor: Any) -> float:
    """Bits that tell neighbouring values apart."""
    return FLOAT_BITS.get(tensor.tensor_type.name, mean_bits([tensor]))


def mean_bits(tensors: Iterable[Any]) -> float:
    """Bits per weight, the scales of the blocks included."""
    sizes = [(int(tensor.n_bytes), int(tensor.n_elements)) for tensor in tensors]
    return 8 * sum(size for size, _ in sizes) / sum(count for _, count in sizes)
