"""The scorers of reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from qurl.errors import MissingExtra
from qurl.rewards.reward import Reward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_COMPARE_TUPLES = ("arc_agi", "rearc")
"""Their scorers want tuples where the entry, which came through JSON, has lists."""


def load_gym_reward(dataset: str) -> Reward:
    """The scorer of a data set, for the last <answer>...</answer> of a text, else all of it."""
    scorer = import_reasoning_gym(dataset).create_dataset(dataset, seed=0, size=1)

    def score_gym(text: str, answer: str, extra: Mapping[str, Any]) -> float:
        del answer  # The entry holds it, with what the scorer needs besides.
        entry = extra["entry"]
        if dataset in _COMPARE_TUPLES:
            entry = _with_tuples(entry)
        tagged = _ANSWER.findall(text)
        return scorer.score_answer(answer=(tagged[-1] if tagged else text).strip(), entry=entry)

    return score_gym


def import_reasoning_gym(dataset: str) -> ModuleType:
    try:
        import reasoning_gym  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "gym", f"task gym:{dataset}") from error
    return reasoning_gym


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {k: _with_tuples(v) for k, v in value.items()}
    return value
