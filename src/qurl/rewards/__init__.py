"""Rewards. Nothing here imports torch, so that grading processes start fast."""

from qurl.rewards.grading import Grading, grade_math, overlong_penalty, reward_metrics
from qurl.rewards.pool import Grade, GradingPool
from qurl.rewards.reward import Reward

__all__ = [
    "Grade",
    "Grading",
    "GradingPool",
    "Reward",
    "grade_math",
    "overlong_penalty",
    "reward_metrics",
]
