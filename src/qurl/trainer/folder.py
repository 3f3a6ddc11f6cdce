"""What can be seen of a model folder before torch is imported.

A folder that transformers would read with a traceback, a hang or a wrong explanation is refused
here, by the file and the value that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qurl.errors import ModelError
from qurl.trainer.weight_files import ADAPTER_CONFIG, check_headers, find_weights, read_object

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
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_ROPE_SECTIONS = ("rope_parameters", "rope_scaling")


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
        remedy = "give the folder that holds config.json"
        if str(path).endswith(".gguf"):
            remedy = f"make a folder of it with `qurl export --from-gguf {path} OUT`"
        raise ModelError(f"{name} is a file; {remedy}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelError(f"{name} cannot be read; check its permissions")
    folder = Path(path)
    files = {entry.name for entry in folder.iterdir()}
    config_file = ADAPTER_CONFIG if ADAPTER_CONFIG in files else "config.json"
    if config_file not in files:
        raise ModelError(f"{name} has no config.json; give a folder that save_pretrained wrote")
    config = read_object(folder / config_file)
    for other in files.intersection(_OTHER_JSON):
        read_object(folder / other)
    if config_file != ADAPTER_CONFIG:
        _check_config(config, folder / config_file)
    elif "weights" in needs:
        _check_base(config, folder / config_file)
    weights = find_weights(folder) if "weights" in needs else []
    if "weights" in needs and not weights:
        raise ModelError(f"{name} has no weights: no model.safetensors and no pytorch_model.bin")
    if "tokenizer" in needs and not files.intersection(_TOKENIZERS):
        raise ModelError(
            f"{name} has no tokenizer: none of {', '.join(_TOKENIZERS[:4])}; copy the tokenizer "
            "files of the model into it"
        )
    try:
        check_headers(weights)
    except ModelError as error:
        raise ModelError(f"{name} cannot be loaded: {error}") from error


def refuse_adapters(path: str | Path) -> None:
    """Raise ModelError if new adapters would be for a model that itself has some."""
    if Path(path, ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"model.path = {str(path)!r} holds adapters, which the base of new ones would lack; "
            f"merge them with `qurl export {path} OUT --dtype float32`, and set model.path to OUT. "
            "A run that began like this goes on if you also write OUT into its config.json"
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
    for name in _EPSILONS:
        epsilon: Any = config.get(name, 0.0)
        if isinstance(epsilon, int | float) and not 0 <= epsilon <= 1:  # other types: transformers
            raise ModelError(f"{where}: {name} = {str(epsilon)[:40]} must be from 0 to 1")
    sections = (config, *(config.get(name) for name in _ROPE_SECTIONS))
    for section in [s for s in sections if isinstance(s, Mapping)]:
        for name in ("rope_theta", "factor"):
            size: Any = section.get(name, 1.0)
            if isinstance(size, int | float) and not size > 0:
                raise ModelError(f"{where}: {name} = {size:g} must be larger than 0")


def _check_base(config: dict[str, Any], file: Path) -> None:
    """Refuse adapters whose base is gone, which may have been moved."""
    base = config.get(key := "base_model_name_or_path")
    if not isinstance(base, str) or Path(base, ADAPTER_CONFIG).exists():
        raise ModelError(f"{file}: {key} = {base!r} must name the whole model that they adapt")
    check_folder(base, f"{file}: {key}", needs=["weights"])


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
