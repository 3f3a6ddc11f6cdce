"""The reference engine: any causal LM that transformers runs, one problem at a time.

Slow and plain. The other engines are tested against it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qurl.quant import Quantized, QuantLinear, quantized_copy
from qurl.rollout.canary import (
    canary_bound,
    canary_ids,
    evaluating,
    product_dtype,
    score_with,
    verify,
)
from qurl.rollout.engine import Asked, QueueStream, Stream, check_finite, check_prompts, generate
from qurl.rollout.sampler import RowParams, request_key, sample, uniform
from qurl.rollout.stop import StopRule
from qurl.types import Completion, Problem, Rollout, SamplingParams, SyncReport


class HFEngine:
    """Samples with transformers from a quantized copy, or without one from the model itself."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        quant: str = "none",
        compute_dtype: torch.dtype | None = None,
        full_layers: int = 0,
    ) -> None:
        """`compute_dtype`: see `build_engine`."""
        self.quant, self.compute_dtype, self.tokenizer = quant, compute_dtype, tokenizer
        self.full_layers = full_layers
        self.version = 0
        self.actor: Any = None
        self.sync(model, version=0)

    def sync(self, source: nn.Module, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into a new copy and verify it."""
        start = time.perf_counter()
        actor: Any = source
        if self.quant != "none":
            actor = quantized_copy(source, self.quant, self.compute_dtype, self.full_layers)
        flip_frac = _code_flip_frac(self.actor, actor)
        ids = canary_ids(source)
        bound = canary_bound(self.quant, product_dtype(source))
        scores = (score_with(m, ids, self.quant) for m in (source, actor))
        gap = verify(*scores, bound=bound, version=version)
        self.actor, self.version = actor, version
        num_bytes = sum(weight.num_bytes for weight in _quantized(actor))
        seconds = time.perf_counter() - start
        return SyncReport(version, seconds, num_bytes, flip_frac, True, gap)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1."""
        return score_with(self.actor, token_ids)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """`params.group_size` completions of each problem, in order."""
        return generate(self, problems, params)

    def stream(self, params: SamplingParams) -> Stream:
        """Completions that are drawn like this, one problem after the other."""
        stop = StopRule.of(self.actor, self.tokenizer, params)

        def play(waiting: deque[Asked]) -> Iterator[Rollout]:
            while waiting:
                problem, size, _ = waiting.popleft()
                with evaluating(self.actor):
                    group = self._sample_group(problem, size, params, stop)
                yield Rollout(problem, group, self.version, params.temperature)

        def check(problems: Sequence[Problem]) -> None:
            check_prompts(problems, params, self.actor)

        return QueueStream(params, play, check)

    @torch.no_grad()
    def _sample_group(
        self, problem: Problem, size: int, params: SamplingParams, stop: StopRule
    ) -> list[Completion]:
        actor = self.actor
        device = next(actor.parameters()).device
        row_params = RowParams.stack([params], device)
        keys = [request_key(params.seed, problem.id, g) for g in range(size)]
        keys = torch.tensor(keys, device=device)
        output = actor(
            input_ids=torch.tensor([list(problem.prompt_ids)], device=device), use_cache=True
        )
        output.past_key_values.batch_repeat_interleave(size)
        logits = output.logits[:, -1].float().expand(size, -1)
        tokens: list[list[int]] = [[] for _ in range(size)]
        logprobs: list[list[float]] = [[] for _ in range(size)]
        finish: list[Any] = [None] * size
        limit = params.limit(problem)
        for position in range(limit):
            drawn, drawn_logprobs = sample(
                logits, uniform(keys, torch.full_like(keys, position)), row_params
            )
            pairs = zip(drawn.tolist(), drawn_logprobs.tolist(), strict=True)
            for g, (token, logprob) in enumerate(pairs):
                if finish[g] is None:
                    check_finite(logprob, problem, position)
                    tokens[g].append(token)
                    logprobs[g].append(logprob)
                    finish[g] = stop.finish(tokens[g], limit - len(tokens[g]))
            if all(finish):
                break
            output = actor(
                input_ids=drawn[:, None], past_key_values=output.past_key_values, use_cache=True
            )
            logits = output.logits[:, -1].float()
        return [
            stop.complete(*c, [self.version] * len(c[0]))
            for c in zip(tokens, logprobs, finish, strict=True)
        ]


def _code_flip_frac(before: nn.Module | None, after: nn.Module) -> float:
    """Share of codes that differ between two quantized copies; 0 without an earlier one."""
    if before is None:
        return 0.0
    codes = ([w.numbers() for w in _quantized(model)] for model in (before, after))
    pairs = list(zip(*codes, strict=True))
    flips = sum(int((a != b).sum()) for a, b in pairs)
    return flips / sum(a.numel() for a, _ in pairs) if pairs else 0.0


def _quantized(model: nn.Module) -> list[Quantized]:
    return [m.weight for m in model.modules() if isinstance(m, QuantLinear)]
