"""Sums of one-digit numbers: `3+8+5+9=` is `25`."""

from __future__ import annotations

from random import Random

from qurl.errors import ConfigError
from qurl.tasks.generated import Draft

INSTRUCTION = "Answer with the number only."

_MIN_TERMS, _MAX_TERMS = 2, 12


def check_difficulty(difficulty: int) -> None:
    if not _MIN_TERMS <= difficulty <= _MAX_TERMS:
        raise ConfigError(
            f"task.difficulty = {difficulty}: arithmetic takes {_MIN_TERMS} to {_MAX_TERMS} terms"
        )


def draw(rng: Random, difficulty: int) -> Draft:
    """A sum of `difficulty` digits; the same digits in another order are the same problem."""
    terms = [rng.randrange(10) for _ in range(difficulty)]
    key = "+".join(map(str, sorted(terms)))
    return Draft("+".join(map(str, terms)) + "=", str(sum(terms)), key=key, extra={})
