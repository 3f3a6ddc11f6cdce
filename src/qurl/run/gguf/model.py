"""The configuration and the weights of transformers, from a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qurl.errors import ModelError
from qurl.run.gguf.file import (
    EMBEDDING,
    HEAD,
    GgufFile,
    GgufTensor,
    in_threads,
    parts,
    resolution,
    vocab_size,
)

# Configuration

_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
"""Those that a file must have; by the format the heads of the keys might be left out, but no
converter does."""
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
        vocab_size=vocab_size(file),
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
    if head_dim % 2:
        raise ModelError(f"{file.path}: heads are {head_dim} wide, and cannot be rotated in pairs")
    is_implied = head_dim == default and file.architecture != "qwen3"  # whose own default is 128
    return {} if is_implied else {"head_dim": head_dim}


def _decimal(value: float) -> float:
    """What was written before it became a 32-bit float: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))


# Weights


def load_model(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A plain model with the file's weights, all of them; for saving only."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    sources = _sources(file, config, shapes)
    _check_sources(file, sources, shapes)
    used = set(sources.values())
    stored = _load([tensor for tensor in file.tensors.values() if tensor.name in used], dtype)
    weights = {name: stored[source] for name, source in sources.items()}
    if file.architecture == "llama":
        weights |= _in_halves(weights, config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _sources(file: GgufFile, config: Any, names: Iterable[str]) -> dict[str, str]:
    """The tensor of the file that each weight of the model is made of."""
    import gguf

    architecture = gguf.MODEL_ARCH[file.architecture.upper()]
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    sources = {name: known.get_name(name, (".weight", ".bias")) or name for name in names}
    if config.tie_word_embeddings:
        copies = [file.tensors[name] for name in (EMBEDDING, HEAD) if name in file.tensors]
        finest = max(copies, key=resolution).name
        sources |= {"model.embed_tokens.weight": finest, "lm_head.weight": finest}
    return sources


def _check_sources(
    file: GgufFile, sources: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Every weight has its tensor, of its shape, and every tensor its weight."""
    if missing := [name for name, source in sources.items() if source not in file.tensors]:
        raise ModelError(f"{file.path} lacks weights of {', '.join(sorted(missing)[:3])}")
    for name, source in sources.items():
        if (found := file.tensors[source].shape) != shapes[name]:
            raise ModelError(
                f"{file.path}: its weights do not fit its settings: {source} is {found}, and not "
                f"{shapes[name]}"
            )
    unused = file.tensors.keys() - sources.values()
    if file.has_duplicate_head:
        unused -= {EMBEDDING, HEAD}
    if unused:
        raise ModelError(
            f"{file.path} holds more than the model made of it: some tensor was not understood "
            f"({', '.join(sorted(unused)[:3])})"
        )


def _load(tensors: Sequence[GgufTensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The values of the tensors, by name."""
    weights = {tensor.name: torch.empty(tensor.shape, dtype=dtype) for tensor in tensors}

    def fill(item: tuple[GgufTensor, slice]) -> None:
        tensor, part = item
        weights[tensor.name].view(-1)[part] = torch.from_numpy(tensor.values(part))

    in_threads(fill, [(tensor, part) for tensor in tensors for part in parts(tensor)])
    return weights


def _in_halves(weights: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Llama's queries and keys as transformers rotates them.

    Each head has pairs of rows that rotate together. In the file they are neighbours, as
    x0 y0 x1 y1 ..., and for transformers they lie half a head apart, as x0 x1 ... y0 y1 ...
    """
    return {
        name: weight.view(-1, config.head_dim // 2, 2, weight.shape[1])
        .transpose(1, 2)
        .reshape(weight.shape)
        for name, weight in weights.items()
        if name.endswith(("q_proj.weight", "k_proj.weight"))
    }
