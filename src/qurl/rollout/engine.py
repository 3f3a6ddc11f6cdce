"""What an engine is: it holds the quantized copy of the policy and samples from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from qurl.types import Problem, Rollout, SamplingParams, SyncReport


class Engine(Protocol):
    """The actor's side of the loop."""

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into the engine, in place, and verify the copy."""
        ...

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """`params.group_size` completions of each problem, in order.

        The randomness of a request depends on the parameters and the problem's id alone, so that
        its tokens do not change with what else is in the batch, up to the rounding of the hardware.
        """
        ...


def build_engine(
    kind: str, model: nn.Module, tokenizer: Any = None, *, quant: str = "none", **options: Any
) -> Engine:
    """An engine of the given kind, synchronised with `model` as version 0.

    `tokenizer=None` works when prompts and results are token ids: texts come back empty.
    `compute_dtype`, an option of all engines, is the trainer's: weights are rounded to it before
    they are quantized. Without it, they are rounded to the dtype in which the engine itself would
    hold them.
    """
    if kind == "local":
        from qurl.rollout.local import LocalEngine

        return LocalEngine(model, tokenizer, quant=quant, **options)
    if kind == "hf":
        from qurl.rollout.hf import HFEngine

        return HFEngine(model, tokenizer, quant=quant, **options)
    raise ValueError(f"engine {kind!r} is not one of local, hf")
