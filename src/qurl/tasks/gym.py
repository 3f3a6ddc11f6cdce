"""Problems of reasoning-gym: over a hundred generators, each with its own scorer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from qurl.errors import ConfigError
from qurl.plugins import import_extra
from qurl.tasks.generated import SIZES, Draft

INSTRUCTION = "Give the final answer between <answer> and </answer>."


def make_draw(dataset: str, seed: int, split: str) -> Callable[[int, int], Draft]:
    """Draw from the named data set; each attempt reads a data set with another seed."""
    gym = import_extra("reasoning_gym", "reasoning-gym", "gym", f"task gym:{dataset}")
    size = SIZES[split]

    @functools.cache
    def source(attempt: int) -> Any:
        # Items are seeded by seed + index, so seeds closer than `size` would repeat items.
        first = seed * 1_000_003 % 2**30 + attempt * size
        return gym.create_dataset(dataset, seed=first, size=size)

    def draw(index: int, attempt: int) -> Draft:
        entry = source(attempt)[index]
        return Draft(entry["question"].strip(), entry["answer"] or "", extra={"entry": entry})

    try:
        source(0)  # An unknown name must be an error now, not at the first problem.
    except ValueError as error:
        raise ConfigError(
            f"task.name = 'gym:{dataset}': reasoning-gym cannot make this data set: {error}"
        ) from error
    return draw
