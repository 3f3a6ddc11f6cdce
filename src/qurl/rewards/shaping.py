"""Rewards besides correctness."""

from __future__ import annotations


def overlong_cache(fraction: float, max_tokens: int) -> int:
    """Lcache in tokens; any fraction above 0 punishes at least the last token."""
    return max(1, round(fraction * max_tokens)) if fraction else 0


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """DAPO's soft overlong punishment, which falls over the last `cache` tokens.

        pen(L) = 0                                   L <= Lmax - Lcache
               = ((Lmax - Lcache) - L) / Lcache      Lmax - Lcache < L <= Lmax
               = -1                                  L > Lmax

    `cache = 0` turns it off.
    """
    if not 0 <= cache <= max_tokens:
        raise ValueError(f"cache = {cache} must lie between 0 and max_tokens = {max_tokens}")
    start = max_tokens - cache
    if cache == 0 or length <= start:
        return 0.0
    return max(-1.0, (start - length) / cache)
