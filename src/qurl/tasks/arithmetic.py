"""Sums of one-digit numbers: `3+8+5+9=` is `25`."""

from __future__ import annotations

from random import Random

from qurl.tasks.generated import Draft

INSTRUCTION = "Answer with the number only."
REWARD = "exact"
DIFFICULTIES = range(2, 13)
"""Number of terms."""


def draw(rng: Random, difficulty: int) -> Draft:
    """A sum of `difficulty` digits; the same digits in another order are the same problem."""
    terms = [rng.randrange(10) for _ in range(difficulty)]
    key = "+".join(map(str, sorted(terms)))
    return Draft("+".join(map(str, terms)) + "=", str(sum(terms)), key)
