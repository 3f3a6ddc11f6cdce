"""The memory and tokens that a recipe needs, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qurl.config import Config
from qurl.objectives import ADVANTAGES, Advantage
from qurl.ops.device import pick_device
from qurl.quant.formats import get_format
from qurl.quant.linear import PROJECTIONS
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.scratch import build_tiny_llama

GIB = 1024**3


@dataclass(frozen=True)
class ModelSize:
    num_parameters: int
    num_quantized: int
    """Parameters of the projections, which the engine holds in codes."""
    kv_numbers_per_token: int
    vocabulary: int


def describe_budget(config: Config) -> str:
    """Token and memory budget as text."""
    sequences = config.batch.problems * config.sampling.group_size
    lines = [
        "",
        "tokens",
        f"  sequences per step      {sequences} ({config.batch.problems} problems"
        f" x {config.sampling.group_size})",
        f"  sampled per step        at most {sequences * config.sampling.max_tokens:,}",
        f"  updates per step        {config.updates_per_step}",
        f"  updates in the run      {config.steps * config.updates_per_step:,}",
        f"memory (GiB) on {pick_device(config.device)}",
    ]
    try:
        size = measure_model(config)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        lines.append(f"  unknown: {config.model.path} is not reachable here ({reason})")
        return "\n".join(lines)
    rows = memory_rows(config, size)
    lines += [f"  {name:<24}{numbers / GIB:10.3f}" for name, numbers in rows.items()]
    lines.append(f"  {'total':<24}{sum(rows.values()) / GIB:10.3f}  and activations")
    return "\n".join(lines)


def memory_rows(config: Config, size: ModelSize) -> dict[str, float]:
    """Bytes by use, without activations, which depend on batch.microbatch_tokens."""
    is_cuda = pick_device(config.device).type == "cuda"
    is_coded = is_cuda and config.quant.format != "none"  # a CPU holds codes as FP32
    wide = 2 if is_cuda else 4  # the engine's full precision
    narrow = get_format(config.quant.format).dtype.itemsize if is_coded else wide
    parameters, num_quantized = size.num_parameters, size.num_quantized
    unquantized = parameters - num_quantized if is_cuda else 0  # shared on a CPU
    num_sequences = config.batch.problems * config.sampling.group_size
    longest = config.task.max_prompt_tokens + config.sampling.max_tokens
    tokens = config.rollout.kv_tokens or longest * min(config.rollout.max_batch, num_sequences)
    kv_bytes = 1 if config.quant.kv == "fp8" else wide
    has_critic = ADVANTAGES.get(config.algo.advantage, Advantage()).needs_critic
    rows = {
        "policy, FP32": 4.0 * parameters,
        "gradients": 4.0 * parameters,
        "AdamW": 8.0 * parameters,
        "reference": 4.0 * parameters * (config.algo.kl_coef > 0),
        "critic and its AdamW": 16.0 * parameters * has_critic,
        "engine weights": float(narrow * num_quantized + wide * unquantized),
        "engine of evaluations": float(wide * parameters * (is_cuda and config.has_full_engine)),
        "KV cache, full": float(kv_bytes * size.kv_numbers_per_token * tokens),
        # The logits in FP32, and their gradients in compute precision.
        "logits of one chunk": (4.0 + wide) * config.model.logits_chunk * size.vocabulary,
    }
    return {name: number for name, number in rows.items() if number}


def measure_model(config: Config) -> ModelSize:
    """Count parameters on the meta device: no weights are read or made."""
    with torch.device("meta"):
        if config.model.path == "scratch":
            model: Any = build_tiny_llama(config.model.scratch, build_tokenizer())
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path))
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSize(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_quantized=sum(
            p.numel()
            for name, p in model.named_parameters()
            if p.dim() >= 2 and any(part in PROJECTIONS for part in name.split("."))
        ),
        kv_numbers_per_token=2 * text.num_hidden_layers * heads * head_dim,
        vocabulary=text.vocab_size,
    )
