"""Engines with wrong log-probs are not timed: the trainer's forward computes them again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qurl.bench.workload import Setup, Workload
from qurl.errors import EngineError
from qurl.quant import dequantize, get_format, quantize
from qurl.quant.linear import projections
from qurl.rollout.canary import canary_bound
from qurl.rollout.engine import token_logprobs
from qurl.trainer.head import apply_head, autocast
from qurl.trainer.policy import hidden_states
from qurl.types import Completion, Problem

NUM_CHECKED = 4  # completions, spread over the batch
NUM_PARTS = 4  # of the completions, each of which must be right: errors may begin at some length
RELATIVE_BOUND = 0.9
"""Largest gap as a share of the spread of the log-probs. Rounding to 8 bits gives up to 0.67 on
random weights (FP8, 7B), log-probs of other tokens give about 1.3. W4A4 gives up to 1.2, so it is
exempt."""
LOGITS_CHUNK = 1024

Groups = Sequence[Sequence[Completion]]


def logprob_gap(model: Any, setup: Setup, problems: Sequence[Problem], groups: Groups) -> float:
    """Mean |log-prob difference| to the model; raises if it is larger than rounding explains."""
    pairs = [(p, c) for p, group in zip(problems, groups, strict=True) for c in group]
    chosen = pairs[:: max(1, len(pairs) // NUM_CHECKED)][:NUM_CHECKED]
    expected = torch.stack([score_completion(model, p, c).cpu() for p, c in chosen])
    sampled = torch.tensor([c.logprobs for _, c in chosen])
    gaps = (expected - sampled).abs()  # [completions, T]
    worst = max(part.mean().item() for part in [*gaps, *gaps.chunk(NUM_PARTS, dim=1)])
    quant = "none" if rounds_weights_only(setup.quant) else setup.quant
    bound = canary_bound(quant, next(model.parameters()).dtype)
    if setup.quant != "int4":
        # Random weights predict almost nothing: even log-probs of other tokens lie within the
        # format's bound, but not within their own spread.
        spread = (expected - expected.mean()).abs().mean().item()
        bound = min(bound, RELATIVE_BOUND * spread)
    # max() may drop a NaN, so ask for finite gaps as well.
    if not (gaps.isfinite().all() and worst <= bound):
        raise EngineError(
            f"{setup}: log-probs differ from the trainer's forward by {worst:.4g} on average, "
            f"more than the {bound:.4g} that rounding explains; engines with wrong log-probs are "
            "not timed"
        )
    return gaps.mean().item()


def rounds_weights_only(quant: str) -> bool:
    return quant != "none" and get_format(quant).is_weight_only


@contextmanager
def as_sampled(model: Any, quant: str) -> Iterator[None]:
    """The model with the weights that the engine multiplies, if it rounds nothing else.

    Its log-probs must then be the engine's, as in full precision. Those of the model itself are too
    far from them in 4 bits to tell anything, with random weights.
    """
    layers = [layer for _, layer in projections(model)] if rounds_weights_only(quant) else []
    weights = [layer.weight.data for layer in layers]
    try:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.data = dequantize(quantize(weight, quant)).to(weight.dtype)
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.data = weight


@torch.no_grad()
def score_completion(model: Any, problem: Problem, completion: Completion) -> Tensor:
    """log pi [T] of a completion's tokens, by the model's own forward at temperature 1."""
    parameter = next(model.parameters())
    ids = torch.tensor([[*problem.prompt_ids, *completion.token_ids]], device=parameter.device)
    first = len(problem.prompt_ids)
    # FP32 between the layers, as with the trainer's FP32 weights; autocast products stay BF16.
    widen = model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].float())
    with widen, autocast(parameter.device, parameter.dtype):
        states = hidden_states(model, ids, parameter.dtype)[0, first - 1 : -1]  # [T, H]
        pieces = zip(states.split(LOGITS_CHUNK), ids[0, first:].split(LOGITS_CHUNK), strict=True)
        scores = [token_logprobs(apply_head(model, piece), targets) for piece, targets in pieces]
    return torch.cat(scores)


def check_completions(groups: Groups, workload: Workload) -> None:
    """Raise unless there are as many tokens as asked for, with finite log-probs."""
    lengths = [len(c.token_ids) for group in groups for c in group]
    if lengths != [workload.new_tokens] * workload.num_sequences:
        raise EngineError(
            f"{workload.num_sequences} completions of {workload.new_tokens} tokens were asked for, "
            f"and {len(lengths)} with {sum(lengths)} tokens in all came back"
        )
    if not all(math.isfinite(x) for group in groups for c in group for x in c.logprobs):
        raise EngineError("the engine sampled tokens whose log-probs are not finite")
