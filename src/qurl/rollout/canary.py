"""After each sync, trainer and engine score a fixed prompt, so that a bad copy is noticed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import EngineError, SyncError
from qurl.ops.device import default_dtype
from qurl.quant import get_format
from qurl.quant.kv import KVRounding
from qurl.quant.linear import full_precision
from qurl.quant.shipment import Chunk, Packing, Shipment
from qurl.rollout.engine import Engine, context_length, token_logprobs

_LENGTH = 32


def canary_ids(model: Any, length: int | None = None) -> list[int]:
    """A fixed prompt, spread over the vocabulary."""
    length, vocabulary = length or _LENGTH, model.get_input_embeddings().num_embeddings
    longest = context_length(model.config) or length
    return [(i * 2654435761 + 1) % vocabulary for i in range(min(length, longest))]


def canary_bound(quant: str, *dtypes: torch.dtype, kv: str = "none") -> float:
    """Largest mean |log-prob gap| that rounding of weights and cache explains.

    `dtypes` are those of the engine and of the trainer's model.
    """
    if bounds := [get_format(name).canary_bound for name in (quant, kv) if name != "none"]:
        return max(bounds)
    # In BF16 a logit of 16 has a last bit of 0.125, and RL makes logits larger.
    return 0.01 if set(dtypes) == {torch.float32} else 1.0


@torch.no_grad()
def score_with(model: Any, token_ids: Sequence[int], quant: str = "none") -> Tensor:
    """Log-probs [T - 1] of tokens 1.. given their prefix, by the model's own forward.

    `quant` is the engine's: a model that computes in codes does so only for a quantized engine.
    Keys and values are not rounded: their scales may be those of an earlier sync.
    """
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    # A compiled model would be compiled again for this one short prompt.
    eager = torch.compiler.set_stance("force_eager")
    with evaluating(model, quant), full_precision(model, KVRounding), eager:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return token_logprobs(logits, ids[0, 1:])


class ModelShipment:
    """The weights of a model at hand."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.dtype = model, product_dtype(model)

    def pack(self, packing: Packing) -> Iterator[Chunk]:
        return packing.pack(self.model)

    def score(self, token_ids: Sequence[int], quant: str) -> Tensor:
        return score_with(self.model, token_ids, quant)


def as_shipment(source: nn.Module | Shipment) -> Shipment:
    return ModelShipment(source) if isinstance(source, nn.Module) else source


class Yardstick:
    """An engine's own gaps so far, by path, which say what a sound copy looks like.

        bound = max(0.1, 8 x the largest gap that passed)

    A sync moves the weights by a step, so a sound copy's gap follows that of the last, and a fault
    is a jump: broken copies in vLLM had 10 to 70 times the gap of a sound one, all below the fixed
    bound. Sound FP8 copies in the demo's first steps had up to 4.4 times the largest gap so far.
    The first gap alone cannot be the measure: training moved it from 0.004 to 0.06 in the demo.
    What creeps (a copy that is never updated) is for checksums and rows that are compared.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def bound(self, path: str) -> float:
        """Largest gap to expect; infinite as long as none has passed."""
        return max(0.1, 8 * self._largest[path]) if path in self._largest else math.inf

    def keep(self, path: str, gap: float) -> None:
        self._largest[path] = max(gap, self._largest.get(path, 0.0))


def verify(
    trainer: Tensor,
    engine: Tensor,
    *,
    bound: float,
    version: int,
    path: str = "",
    yardstick: Yardstick | None = None,
) -> float:
    """The mean |log-prob gap| of the canary prompt; raises if it exceeds the bound.

    `path` says how the engine computed its log-probs.
    """
    gap = (trainer.cpu() - engine.cpu()).abs().mean().item()
    bound = min(bound, yardstick.bound(path)) if yardstick else bound
    if math.isfinite(gap) and gap <= bound:
        if yardstick:
            yardstick.keep(path, gap)
        return gap
    failed = f"sync of version {version} failed on the canary prompt{path and f' {path}'}"
    if not trainer.isfinite().all():
        raise SyncError(
            f"{failed}: the trainer's own log-probs are not finite, so its weights hold NaN or "
            "infinity, or overflow. In the first sync the model at model.path is at fault; "
            "later, the updates since the last checkpoint, and a lower optim.lr may help"
        )
    cause = f"mean |log-prob gap| = {gap:.4g} exceeds {bound:.3g}"
    if not math.isfinite(gap):
        cause = "the engine's log-probs are not finite"
    raise SyncError(
        f"{failed}: {cause}; the engine's copy does not compute what the trainer's model does, and "
        "sampling from it would train on garbage"
    )


def check_copy(engine: Engine, model: Any, quant: str, version: int) -> float:
    """`verify` for an engine that did not do it itself, through its `score`."""
    device, ids = next(model.parameters()).device, canary_ids(model)
    bound = canary_bound(quant, default_dtype(device), product_dtype(model))
    expected, scores = score_with(model, ids, quant), engine.score(ids)
    if not isinstance(scores, Tensor) or scores.shape != expected.shape:
        found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise EngineError(
            f"score of the engine returned {found} for {len(ids)} tokens; it must return a tensor "
            f"[{len(expected)}], the log-probs of all tokens but the first"
        )
    return verify(expected, scores, bound=bound, version=version)


def product_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a model multiplies outside of a trainer: BF16 if any weight is."""
    dtypes = [parameter.dtype for parameter in model.parameters()]
    return torch.bfloat16 if torch.bfloat16 in dtypes else dtypes[0]


@contextmanager
def evaluating(model: nn.Module, quant: str = "none") -> Iterator[None]:
    """Evaluation mode, in the precision of `quant`; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    first, dtype = next(model.parameters()), product_dtype(model)
    # Masters in BF16 leave the embedding in FP32, and with it what the first layer reads.
    mixed = torch.autocast(first.device.type, dtype, enabled=first.dtype != dtype)
    model.eval()
    try:
        with full_precision(model) if quant == "none" else nullcontext(), mixed:
            yield
    finally:
        for module, mode in modes:
            module.training = mode
