"""95 % intervals of accuracies and of their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float, float]
Z = 1.96  # half the width of a 95 % interval, in standard deviations


class Estimate(NamedTuple):
    """A number and the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Does the interval leave out 0?"""
        return self.low > 0 or self.high < 0


def wilson_interval(successes: float, trials: int) -> Interval:
    """Wilson's score interval of a proportion p = successes / trials:

    (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    n, p, z = trials, successes / trials, Z
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    # At p = 0 and p = 1 one end is p itself, which rounding would miss by 1e-17.
    return (0.0 if p == 0 else max(low, 0.0)), (1.0 if p == 1 else min(high, 1.0))


def paired_difference(a: Sequence[bool], b: Sequence[bool]) -> Estimate:
    """Accuracy of b minus a on the same problems. The interval is Bonett and Price's (2012):

    g - l  -+  z sqrt((g + l - (g - l)^2) / (n + 2)),  g = (gained + 1) / (n + 2), l alike
    """
    n = len(a)
    gained = sum(y and not x for x, y in zip(a, b, strict=True))
    lost = sum(x and not y for x, y in zip(a, b, strict=True))
    g, l = (gained + 1) / (n + 2), (lost + 1) / (n + 2)  # noqa: E741
    spread = Z * math.sqrt((g + l - (g - l) ** 2) / (n + 2))
    return Estimate((gained - lost) / n, max(g - l - spread, -1.0), min(g - l + spread, 1.0))


def unpaired_difference(a: Sequence[bool], b: Sequence[bool]) -> Estimate:
    """The same on different problems. The interval is Newcombe's, made of two of Wilson's."""
    (p, p_low, p_high), (q, q_low, q_high) = (
        (sum(x) / len(x), *wilson_interval(sum(x), len(x))) for x in (a, b)
    )
    low = math.hypot(q - q_low, p_high - p)
    high = math.hypot(q_high - q, p - p_low)
    return Estimate(q - p, q - p - low, q - p + high)
