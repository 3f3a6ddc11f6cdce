"""Sampling keyed by request: the same tokens in any batch, on any device, in every engine.

One uniform per (seed, problem, sample, position) from a counter-based hash, then inverse-CDF
sampling of the processed distribution (temperature, then top-k, then top-p, renormalised).

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl.types import SamplingParams


@dataclass(frozen=True)
class RowParams:
    """How each row is sampled; one row stands for all."""

    temperature: Tensor  # [B] or [1]
    top_p: Tensor  # [B] or [1]
    top_k: Tensor  # [B] or [1]
    has_filter: bool
    """Whether any row has top-p or top-k; kept on the host to avoid a sync with the GPU."""

    @staticmethod
    def stack(params: Sequence[SamplingParams], device: torch.device | str) -> RowParams:
        # A greedy row takes the most likely token: no filter changes that.
        rows = [(p.temperature, p.top_p, p.top_k) if p.temperature else (0, 1, 0) for p in params]
        temperature, top_p, top_k = zip(*rows, strict=True)
        return RowParams(
            torch.tensor(temperature, dtype=torch.float32, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            has_filter=any(p < 1 or k > 0 for _, p, k in rows),
        )


def request_key(seed: int, problem_id: str, sample: int) -> int:
    """A signed 64-bit key of one completion, the same in every process."""
    text = f"{seed}:{sample}:{problem_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) with 53 random bits per int64 (key, position), by splitmix64."""
    z = keys + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def sample(logits: Tensor, random: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """A token [B] and its log-prob [B] for each row of logits [B, V] and uniform number [B].

    The log-prob is under the distribution drawn from; for a greedy row (temperature 0), under the
    unscaled softmax.
    """
    is_greedy = params.temperature == 0
    logits = logits / torch.where(is_greedy, 1.0, params.temperature)[:, None]
    if params.has_filter:
        logits = filter_logits(logits, params.top_p, params.top_k)
    logprobs = logits.log_softmax(-1)
    most_likely = logprobs.argmax(-1)
    tokens = torch.where(is_greedy, most_likely, _invert_cdf(logprobs, random, most_likely))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def filter_logits(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """-inf outside the k most likely tokens, then outside the smallest set of mass top_p of those.

    The token that crosses top_p is kept. Ties are broken by the lower token id.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    beyond_k = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = ordered.double().masked_fill(beyond_k, -torch.inf).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    beyond_p = (top_p[:, None] < 1) & (mass_before >= top_p[:, None])
    ordered = ordered.masked_fill(beyond_k | beyond_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _invert_cdf(logprobs: Tensor, random: Tensor, fallback: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds random * total."""
    probs = logprobs.double().exp()
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    # Below the total even when the product rounds up to it, so that some token exceeds it.
    target = torch.minimum(random[:, None] * total, total * (1 - 2.0**-52))
    tokens = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    tokens = tokens.clamp_max(logprobs.shape[-1] - 1)
    # A parallel scan need not be monotone in its last bit and could point at an impossible token.
    is_possible = probs.gather(-1, tokens[:, None]).squeeze(-1) > 0
    return torch.where(is_possible, tokens, fallback)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
