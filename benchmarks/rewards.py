"""Rewards of -1 and +1, as DAPO has them, for `task.reward`; accuracy stays 0 or 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qurl.rewards.math import score_math
from qurl.rewards.reward import score_exact


def signed_exact(text: str, answer: str, extra: Mapping[str, Any]) -> dict[str, float]:
    return _signed(score_exact(text, answer, extra))


def signed_math(text: str, answer: str, extra: Mapping[str, Any]) -> dict[str, float]:
    return _signed(score_math(text, answer, extra))


def _signed(accuracy: float) -> dict[str, float]:
    return {"score": 2 * accuracy - 1, "accuracy": accuracy}
