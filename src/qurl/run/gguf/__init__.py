"""GGUF: a checkpoint of llama.cpp becomes a plain Hugging Face folder.

The gguf package turns blocks of codes into numbers and knows the names of the weights. All else is
made here from the file's metadata, because a conversion that goes wrong goes wrong silently: a
model with a neighbouring tokenizer, another rope theta or an untied head still talks, only worse.
For the same reason whatever is not known here is refused: an architecture, one of its settings, a
pre-tokenizer, a tensor that found no place in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from qurl.run.export import DTYPES, check_arguments, export_folder
from qurl.run.gguf.file import (
    EMBEDDING,
    FLOAT_BITS,
    HEAD,
    GgufFile,
    GgufTensor,
    mean_bits,
    read_gguf,
)
from qurl.run.gguf.model import load_model, model_config
from qurl.run.gguf.tokenizer import build_tokenizer, check_tokenizer, end_token_ids


def export_gguf(source: Path, target: Path, dtype: str = "bfloat16") -> Path:
    """Write the model, the tokenizer and the origin of a GGUF file to `target`."""
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    check_arguments(target, dtype)
    disable_progress_bar()
    file = read_gguf(source)
    config = model_config(file)
    tokenizer = build_tokenizer(file)
    ends = end_token_ids(file, tokenizer)
    model = load_model(file, config, DTYPES[dtype])
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
    )
    with export_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        check_tokenizer(folder, tokenizer, file)
        (folder / "README.md").write_text(_origin(file, dtype), encoding="utf-8")
    return target


# The model card

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
    by_type: dict[str, list[GgufTensor]] = {}
    for tensor in file.tensors.values():
        by_type.setdefault(tensor.type.name, []).append(tensor)
    bits = mean_bits(file.tensors.values())
    is_quantized = not by_type.keys() <= FLOAT_BITS.keys()
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
        kinds = [file.tensors[name].type.name for name in (EMBEDDING, HEAD)]
        card += _TIED.format(*kinds)
    return card


def _type_row(name: str, tensors: Sequence[GgufTensor]) -> str:
    num_weights = sum(tensor.num_weights for tensor in tensors)
    return f"| {name} | {len(tensors)} | {num_weights} | {mean_bits(tensors):.2f} |"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
