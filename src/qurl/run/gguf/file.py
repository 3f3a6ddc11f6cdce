"""What a GGUF file holds: metadata, tensors and their values.

The header is read here: the reader of the gguf package makes several arrays of every token and
merge, which takes it longer than all weights take. Of version 2 and 3, little-endian:

    file    "GGUF", version: u32, num_tensors: u64, num_fields: u64, fields, tensors, data
    field   key: string, kind: u32, value
    tensor  name: string, num_dims: u32, dims: u64 * num_dims, type: u32, offset: u64
    string  length: u64, UTF-8
    array   kind: u32, length: u64, values

The data begin at the next multiple of the alignment, and each tensor at its offset in them. The
number of columns is the first of its dims.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from qurl.errors import MissingExtra, ModelError

T = TypeVar("T")
R = TypeVar("R")

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Both the name in the file and the model type of transformers."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

FLOAT_BITS = {"F32": 24, "F16": 11, "BF16": 8}
"""Bits of the significand."""


@dataclass(frozen=True)
class GgufTensor:
    """Blocks of weights that share their scales; they lie along the rows."""

    name: str
    type: Any
    shape: tuple[int, ...]
    """As torch has it: rows first."""
    data: np.ndarray
    """The file's bytes; they stay on disk until they are asked for."""

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    def values(self, part: slice) -> np.ndarray:
        """Some of the weights, row after row, in FP32. The slice begins and ends with a block."""
        import gguf

        block_size, num_bytes = gguf.GGML_QUANT_SIZES[self.type]
        data = self.data[part.start // block_size * num_bytes : part.stop // block_size * num_bytes]
        # As one row, because rows are taken apart again, sixteen at a time.
        return gguf.dequantize(data[None], self.type)[0]


@dataclass(frozen=True)
class GgufFile:
    """What a file says about itself, and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

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
        if embedding.shape != head.shape:
            return False

        def squares(part: slice) -> tuple[float, float]:
            a, b = embedding.values(part), head.values(part)
            return _sum_of_squares(a - b), _sum_of_squares(b)

        difference, norm = np.sum(in_threads(squares, parts(head)), axis=0)
        bits = min(resolution(embedding), resolution(head))
        return math.sqrt(difference) <= 4 * 2**-bits * math.sqrt(norm)


def _sum_of_squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


# Reading


def read_gguf(path: Path) -> GgufFile:
    if find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf", f"reading {path}")
    if not path.is_file():
        raise ModelError(f"{path} is not a file (seen from {Path.cwd()})")
    try:
        file = _read(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a GGUF file that can be read to its end; it may be another kind of "
            f"file, or cut off: {error}"
        ) from error
    _check_file(file)
    return file


def _read(path: Path) -> GgufFile:
    with path.open("rb") as stream:
        # Private, and so writable to torch, which warns of an array that is not.
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    header = _Header(data)
    if header.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := header.integer(4)) not in (2, 3):
        raise ValueError(f"version {version:#x} is not 2 or 3, little-endian")
    num_tensors, num_fields = header.integer(8), header.integer(8)
    metadata = _unique(header.field() for _ in range(num_fields))
    infos = [header.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment = {alignment!r} is no power of two")
    start = -(-header.position // alignment) * alignment
    return GgufFile(path, metadata, _unique((i.name, _tensor(data, start, i)) for i in infos))


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


_STRING, _ARRAY = 8, 9
_NUMBERS = {
    **{0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4"},
    **{6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"},
}
"""The types of numpy, by kind of value."""


class _Header:
    """The part of a file before its data, read from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self.data):
            raise ValueError(f"{num_bytes} bytes at {start} lie beyond its {len(self.data)}")
        return self.data[start : self.position]

    def integer(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def string(self) -> str:
        return self.take(self.integer(8)).decode()

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"a value of the unknown kind {kind} ends at {self.position}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def field(self) -> tuple[str, Any]:
        key, kind = self.string(), self.integer(4)
        if kind == _STRING:
            return key, self.string()
        if kind != _ARRAY:
            return key, self.numbers(kind, 1)[0]
        kind, length = self.integer(4), self.integer(8)
        if kind == _STRING:
            return key, [self.string() for _ in range(length)]
        return key, self.numbers(kind, length)

    def tensor_info(self) -> _TensorInfo:
        name = self.string()
        columns_first = [self.integer(8) for _ in range(self.integer(4))]
        return _TensorInfo(name, tuple(columns_first[::-1]), self.integer(4), self.integer(8))


def _tensor(data: mmap.mmap, start: int, info: _TensorInfo) -> GgufTensor:
    import gguf

    kind = gguf.GGMLQuantizationType(info.type)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not info.shape or 0 in info.shape or info.shape[-1] % block_size:
        raise ValueError(f"rows of {info.name}, {info.shape}, are no whole blocks of {kind.name}")
    num_bytes = math.prod(info.shape) // block_size * block_bytes
    if start + info.offset + num_bytes > len(data):
        raise ValueError(f"{info.name} lies beyond its {len(data)} bytes")
    values = np.frombuffer(data, np.uint8, num_bytes, start + info.offset)
    return GgufTensor(info.name, kind, info.shape, values)


def _unique(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in items:
        if name in found:
            raise ValueError(f"{name} comes twice")
        found[name] = value
    return found


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
    for tensor in {tensor.type: tensor for tensor in file.tensors.values()}.values():
        try:
            tensor.values(parts(tensor)[0])
        except NotImplementedError as error:
            raise ModelError(f"{file.path}: {tensor.name} cannot be read: {error}") from error


def vocab_size(file: GgufFile) -> int:
    return file.tensors[EMBEDDING].shape[0]


def tokenizer_list(file: GgufFile, key: str) -> Sequence[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ModelError(f"{file.path} has no tokenizer.ggml.{key}, without which no text is read")
    return values


# Values

_PART = 2**18
"""Weights at a time: whole blocks of any type, and what is made of them fits into a cache."""


def parts(tensor: GgufTensor) -> list[slice]:
    """The weights of a tensor in parts that are worth a thread's while."""
    size = tensor.num_weights
    return [slice(start, min(start + _PART, size)) for start in range(0, size, _PART)]


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Applies the function in as many threads as torch would use, and torch in one per thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(num_threads)


# Bits


def resolution(tensor: GgufTensor) -> float:
    """Bits that tell neighbouring values apart."""
    return FLOAT_BITS.get(tensor.type.name, mean_bits([tensor]))


def mean_bits(tensors: Iterable[GgufTensor]) -> float:
    """Bits per weight, the scales of the blocks included."""
    sizes = [(tensor.data.size, tensor.num_weights) for tensor in tensors]
    return 8 * sum(size for size, _ in sizes) / sum(count for _, count in sizes)
