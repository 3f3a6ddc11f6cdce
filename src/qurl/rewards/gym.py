"""The scorers of reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from qurl.plugins import import_extra

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_COMPARE_TUPLES = ("arc_agi", "rearc")
"""These scorers expect tuples; an entry that came through JSON has lists."""


def load_gym_reward(dataset: str) -> Callable[[str, str, Mapping[str, Any]], float]:
    """The data set's scorer. It gets the last <answer>...</answer> of a text, else all of it."""
    gym = import_extra("reasoning_gym", "reasoning-gym", "gym", f"task gym:{dataset}")
    scorer = gym.create_dataset(dataset, seed=0, size=1)

    def score_gym(text: str, answer: str, extra: Mapping[str, Any]) -> float:
        del answer  # The entry holds it, with everything else that the scorer needs.
        entry = extra["entry"]
        if dataset in _COMPARE_TUPLES:
            entry = _with_tuples(entry)
        tagged = _ANSWER.findall(text)
        return scorer.score_answer(answer=(tagged[-1] if tagged else text).strip(), entry=entry)

    return score_gym


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {k: _with_tuples(v) for k, v in value.items()}
    return value
