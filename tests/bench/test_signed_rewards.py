"""Rewards of -1 and +1 keep an accuracy of 0 or 1, so filters and evaluations do not change."""

import pytest

from benchmarks.rewards import signed_exact, signed_math
from qurl.rewards.reward import Scorer

RIGHT, WRONG = (1.0, 1.0), (-1.0, 0.0)


@pytest.mark.parametrize(
    ("reward", "texts"),
    [(signed_exact, ["7", "8"]), (signed_math, [r"\boxed{14/2}", r"\boxed{8}"])],
)
def test_signed_rewards(reward, texts):
    right, wrong = Scorer(reward, "signed")([[text] for text in texts], "7", {})
    assert [(grade.score, grade.accuracy) for grade in right] == [RIGHT]
    assert [(grade.score, grade.accuracy) for grade in wrong] == [WRONG]
