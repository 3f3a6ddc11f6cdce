"""`qurl export`: a Hugging Face folder from a trained policy, plain or quantized, or from GGUF.

`qurl rescale` writes one under UAQ, for frameworks that train a folder.

A quantized folder has the format of compressed-tensors, which vLLM loads:

    X.weight         the codes [N, K] of `qurl.quant.quantize`, INT8 or FP8 E4M3
    X.weight_scale   [N, 1] FP32, one per output channel
    config.json      quantization_config: the format, and the layers that are not quantized
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import ConfigError, MissingExtra, ModelError
from qurl.quant import quantize
from qurl.quant.linear import check_quantizable, quantized_projections
from qurl.quant.scaling import rescale_, uaq_scale, unscale_
from qurl.run.card import read_run, write_card
from qurl.run.checkpoint import find_policy, load_frozen_scales, save_folder, staged_folder
from qurl.trainer.policy import load_model, load_tokenizer
from qurl.trainer.weight_files import ADAPTER_CONFIG

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUANTS = ("none", "int8", "fp8")
BINARIES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Weights, and what trainers keep beside a model, such as optimizer.pt."""
SCHEMES = {  # what compressed-tensors calls our formats
    "int8": ("int-quantized", "int"),
    "fp8": ("float-quantized", "float"),
}


def export(source: Path, target: Path, dtype: str = "bfloat16", quant: str = "none") -> Path:
    """Write the policy of a run (its newest checkpoint) or of one checkpoint, with a model card.

    Adapters are merged. A plain model has UAQ undone. A quantized one keeps it, because its codes
    are the engine's own: those of the weights in `dtype`, as they were trained.
    """
    _check_arguments(target, dtype)
    if quant not in QUANTS:
        raise ConfigError(f"--quant {quant!r} is not one of {', '.join(QUANTS)}")
    if source.is_file():
        raise ModelError(
            f"{source} is a file, not a run or a checkpoint; a GGUF file is converted by "
            f"`qurl export --from-gguf {source} {target}`"
        )
    policy = find_policy(source)
    model = load_model(policy, "RUN|CHECKPOINT")
    if uaq_scale(model) != 1.0 and quant == "none":
        unscale_(model)
    with staged_folder(target) as folder:
        model.to(DTYPES[dtype])
        state = None
        if quant != "none":
            recipe, scales = read_run(policy)[1], None
            if recipe.get("quant.scales") == "frozen" and recipe.get("quant.format") == quant:
                scales = load_frozen_scales(policy.parent)
            state = _compress_(model, quant, recipe.get("quant.full_layers", 0), scales or {})
        model.save_pretrained(folder, state_dict=state)
        write_card(folder, policy, target.name, quant)
        # The saved tokenizer; but no weights, index or adapters, nor a trainer's state and folders.
        for path in policy.iterdir():
            is_binary = not set(path.suffixes).isdisjoint(BINARIES)  # or an index of such
            is_left = is_binary or path.name == ADAPTER_CONFIG or path.is_dir()
            if not (folder / path.name).exists() and not is_left:
                shutil.copy2(path, folder / path.name)
    return target


def rescale(source: str, target: Path, scale: float) -> Path:
    """Write a model, from a folder or the hub, under UAQ and in FP32; `export` folds it back."""
    _check_arguments(target, "float32")
    if not 0 < scale < math.inf:
        raise ConfigError(f"--scale {scale} must be finite and positive; the paper uses 1.5")
    model, tokenizer = load_model(source, "MODEL"), load_tokenizer(source)
    rescale_(model, scale)
    return save_folder(target, model, tokenizer)


def _compress_(
    model: Any, quant: str, full_layers: int, scales: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights with projections as codes; `model.config` gets the description."""
    check_quantizable(model)
    state, kept = model.state_dict(), dict(model.named_modules())
    for name, layer in quantized_projections(model, full_layers):
        q = quantize(layer.weight.detach(), quant, scale=scales.get(name))
        state[f"{name}.weight"], state[f"{name}.weight_scale"] = q.codes, q.scale
        del kept[name]
    plain = [name for name, layer in kept.items() if isinstance(layer, nn.Linear)]
    model.config.quantization_config = describe_codes(quant, plain)
    return state


def describe_codes(quant: str, plain: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of compressed-tensors; the `plain` layers are not quantized."""
    format, kind = SCHEMES[quant]
    coded = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**coded, "strategy": "channel", "dynamic": False},
                "input_activations": {**coded, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": list(plain),
    }


def export_gguf(source: Path, target: Path, dtype: str = "bfloat16") -> Path:
    """Write the model and tokenizer of a llama.cpp file, as transformers reads them.

    Generation also stops where the chat template ends a turn. Nothing else is repaired: a tied
    embedding stored twice becomes an untied head, the tokenizer may split text differently, and
    rotary positions are not scaled.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_arguments(target, dtype)
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise MissingExtra(missing[0], "gguf", f"reading {source}")
    if not source.is_file():
        raise ModelError(f"there is no file {source} (seen from {Path.cwd()}); give a GGUF file")
    from gguf import GGUFReader

    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**place)
        load: Any = AutoModelForCausalLM.from_pretrained
        model, info = load(**place, dtype=DTYPES[dtype], output_loading_info=True)
        ends = dict.fromkeys((tokenizer.eos_token_id, *_turn_end(tokenizer)))
    except Exception as error:  # a damaged file makes the readers raise almost anything
        raise ModelError(f"{source} cannot be read as a GGUF model: {error!r}") from error
    if missing := sorted(info["missing_keys"]):  # they are random numbers now
        raise ModelError(
            f"{source}: the weights lack {', '.join(missing[:3])}; if the file is one of several "
            "parts, join them with llama.cpp's `llama-gguf-split --merge`"
        )
    if quantizer := getattr(model, "hf_quantizer", None):  # the weights are plain numbers by now
        quantizer.remove_quantization_config(model)
    reader = GGUFReader(source)
    rope = getattr(model.config, "rope_parameters", None) or {}
    if (scaling := _rope_scaling(reader)) and rope.get("rope_type", "default") == "default":
        message = (
            f"{source}: transformers does not read how its rotary positions are scaled "
            f"({scaling}); replace rope_parameters in the exported config.json by what the "
            "original model's has"
        )
        warnings.warn(message, stacklevel=2)
    rule = reader.get_field("tokenizer.ggml.pre")
    is_gpt2 = getattr(tokenizer.backend_tokenizer.pre_tokenizer, "use_regex", False)
    if is_gpt2 and rule and rule.contents() not in ("gpt-2", "default"):
        message = (
            f"{source}: transformers does not know tokenizer.ggml.pre = {rule.contents()!r} and "
            "splits text as for GPT-2; replace the exported tokenizer with the original model's"
        )
        warnings.warn(message, stacklevel=2)
    model.generation_config.eos_token_id = [end for end in ends if end is not None]
    return save_folder(target, model, tokenizer)


def _rope_scaling(reader: Any) -> str:
    """The tensor or key, if any, by which a GGUF file says that rotary positions are scaled."""
    names = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            names.append(name)
    return next(iter(names), "")


def _turn_end(tokenizer: Any) -> list[int]:
    """The added token, if any, that the chat template writes after an assistant's words."""
    if not tokenizer.chat_template:
        return []
    turns = [{"role": role, "content": "QuRL"} for role in ("user", "assistant")]
    text = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("QuRL")[2]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return [id for id in ids[:1] if id in tokenizer.added_tokens_decoder]


def _check_arguments(target: Path, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not target.name:  # this folder: a shell would stay in the one that is replaced
        raise ConfigError(f"OUT = {target} has no name of its own; give that of a new folder")
    is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if (target.exists() or target.is_symlink()) and not is_empty:
        raise ConfigError(f"{target} exists and is no empty folder; choose another one")
