"""The scorers of reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from qurl.plugins import import_extra

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def load_gym_reward(dataset: str) -> Callable[[str, str, Mapping[str, Any]], float]:
    """The data set's scorer. It gets the last <answer>...</answer> of a text, else all of it."""
    gym = import_extra("reasoning_gym", "reasoning-gym", "gym", f"task gym:{dataset}")
    scorer = gym.create_dataset(dataset, seed=0, size=1)

    def score_gym(text: str, answer: str, extra: Mapping[str, Any]) -> float:
        del answer  # The entry holds it, with everything else that the scorer needs.
        found = (_ANSWER.findall(text) or [text])[-1].strip()
        return scorer.score_answer(answer=found, entry=extra["entry"])

    return score_gym
