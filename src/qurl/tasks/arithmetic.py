"""Sums and differences of numbers with a given number of digits: `37+85=` is `122`."""

from __future__ import annotations

from random import Random

from qurl.errors import ConfigError
from qurl.tasks.generated import Draft

INSTRUCTION = "Answer with the number only."

_MAX_DIGITS = 12


def check_difficulty(difficulty: int) -> None:
    if not 1 <= difficulty <= _MAX_DIGITS:
        raise ConfigError(
            f"task.difficulty = {difficulty}: arithmetic takes 1 to {_MAX_DIGITS} digits"
        )


def draw(rng: Random, difficulty: int) -> Draft:
    """A problem whose operands have `difficulty` digits each; a difference is never negative."""
    low = 0 if difficulty == 1 else 10 ** (difficulty - 1)
    a, b = (rng.randrange(low, 10**difficulty) for _ in range(2))
    high, low = max(a, b), min(a, b)
    if rng.random() < 0.5:
        return Draft(f"{a}+{b}=", str(a + b), key=f"{low}+{high}", extra={})
    return Draft(f"{high}-{low}=", str(high - low), key=f"{high}-{low}", extra={})
