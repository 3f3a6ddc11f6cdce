"""The configuration and the weights of transformers, from a GGUF file."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from qurl.errors import ModelError
from qurl.gguf.file import EMBEDDING, HEAD, GgufFile, resolution, vocab_size

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
    is_implied = head_dim == default and file.architecture != "qwen3"  # whose own default is 128
    return {} if is_implied else {"head_dim": head_dim}


def _decimal(value: float) -> float:
    """What was written before it became a 32-bit float: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))


# Weights


def load_model(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    """A plain model with the file's weights, all of them; for saving only."""
    from transformers import AutoModelForCausalLM

    weights = _load_weights(file, config, dtype)
    if file.has_duplicate_head:
        embedding, head = file.tensors[EMBEDDING], file.tensors[HEAD]
        is_head_finer = resolution(head) > resolution(embedding)
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
