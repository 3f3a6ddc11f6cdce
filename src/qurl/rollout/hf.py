"""The reference engine: any causal LM that transformers runs, one problem at a time.

Slow and plain. The other engines are tested against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qurl.quant import QuantLinear, quantized_copy
from qurl.rollout.canary import canary_bound, canary_ids, evaluating, score_with, verify
from qurl.rollout.checks import check_finite, check_prompts
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
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`compute_dtype`: see `build_engine`. `on_progress(num_completions, num_tokens)` is called
        as completions finish."""
        self.quant = quant
        self.compute_dtype = compute_dtype
        self.tokenizer = tokenizer
        self.on_progress = on_progress
        self.version = 0
        self._actor: Any = None
        self.sync(model, version=0)

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into a new copy and verify it."""
        start = time.perf_counter()
        actor: Any = model
        if self.quant != "none":
            actor = quantized_copy(model, self.quant, self.compute_dtype)
        flip_frac = _code_flip_frac(self._actor, actor)
        ids = canary_ids(model)
        gap = verify(
            score_with(model, ids),
            score_with(actor, ids),
            bound=canary_bound(self.quant, next(model.parameters()).dtype),
            version=version,
        )
        self._actor, self.version = actor, version
        seconds = time.perf_counter() - start
        return SyncReport(version, seconds, _num_bytes(actor), flip_frac, True, gap)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1."""
        return score_with(self._actor, token_ids)

    @torch.no_grad()
    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """`params.group_size` completions of each problem, in order."""
        check_prompts(problems, params, self._actor)
        stop = StopRule.of(self._actor, self.tokenizer, params)
        rollouts, num_tokens = [], 0
        with evaluating(self._actor):
            for problem in problems:
                group = self._sample_group(problem, params, stop)
                rollouts.append(Rollout(problem, group, self.version, params.temperature))
                num_tokens += sum(len(c.token_ids) for c in group)
                if self.on_progress:
                    self.on_progress(len(rollouts) * params.group_size, num_tokens)
        return rollouts

    def _sample_group(
        self, problem: Problem, params: SamplingParams, stop: StopRule
    ) -> list[Completion]:
        device = next(self._actor.parameters()).device
        size, row_params = params.group_size, RowParams.stack([params], device)
        keys = [request_key(params.seed, problem.id, g) for g in range(size)]
        keys = torch.tensor(keys, device=device)
        output = self._actor(
            input_ids=torch.tensor([list(problem.prompt_ids)], device=device), use_cache=True
        )
        output.past_key_values.batch_repeat_interleave(size)
        logits = output.logits[:, -1].float().expand(size, -1)
        tokens: list[list[int]] = [[] for _ in range(size)]
        logprobs: list[list[float]] = [[] for _ in range(size)]
        finish: list[Any] = [None] * size
        for position in range(params.max_tokens):
            drawn, drawn_logprobs = sample(
                logits, uniform(keys, torch.full_like(keys, position)), row_params
            )
            for g, (token, logprob) in enumerate(
                zip(drawn.tolist(), drawn_logprobs.tolist(), strict=True)
            ):
                if finish[g] is None:
                    check_finite(logprob, problem, position)
                    tokens[g].append(token)
                    logprobs[g].append(logprob)
                    finish[g] = stop.finish(tokens[g])
            if all(finish):
                break
            output = self._actor(
                input_ids=drawn[:, None], past_key_values=output.past_key_values, use_cache=True
            )
            logits = output.logits[:, -1].float()
        return [stop.complete(*c) for c in zip(tokens, logprobs, finish, strict=True)]


def _code_flip_frac(before: nn.Module | None, after: nn.Module) -> float:
    """Share of codes that differ between two quantized copies; 0 without an earlier one."""
    if before is None:
        return 0.0
    pairs = list(zip(_codes(before), _codes(after), strict=True))
    flips = sum(int((a != b).sum()) for a, b in pairs)
    return flips / sum(a.numel() for a, _ in pairs) if pairs else 0.0


def _codes(model: nn.Module) -> list[Tensor]:
    return [m.weight.codes.float() for m in model.modules() if isinstance(m, QuantLinear)]


def _num_bytes(model: nn.Module) -> int:
    """Size of the quantized weights; without quantization there is no copy."""
    return sum(m.weight.num_bytes for m in model.modules() if isinstance(m, QuantLinear))
