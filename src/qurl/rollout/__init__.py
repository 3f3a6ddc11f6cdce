"""Rollout engines: the quantized actor."""

from __future__ import annotations

from typing import Any

from torch import nn

from qurl.rollout.engine import Engine, Stream, generate

__all__ = ["Engine", "Stream", "build_engine", "generate"]


def build_engine(
    kind: str, model: nn.Module, tokenizer: Any = None, *, quant: str = "none", **options: Any
) -> Engine:
    """An engine of the given kind, synchronised with `model` as version 0.

    `tokenizer=None` works when prompts and results are token ids: texts come back empty.
    `compute_dtype`, an option of all engines, is the trainer's: weights are rounded to it before
    they are quantized, or without it to the dtype in which the engine would hold them.
    """
    if kind == "local":
        from qurl.rollout.local import LocalEngine

        return LocalEngine(model, tokenizer, quant=quant, **options)
    if kind == "hf":
        from qurl.rollout.hf import HFEngine

        return HFEngine(model, tokenizer, quant=quant, **options)
    if kind == "vllm":
        from qurl.rollout.vllm import VllmEngine

        return VllmEngine(model, tokenizer, quant=quant, **options)
    raise ValueError(f"engine {kind!r} is not one of local, hf, vllm")
