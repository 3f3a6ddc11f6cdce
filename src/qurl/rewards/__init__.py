"""Rewards. Nothing here imports torch, so that grading processes start fast."""

from qurl.rewards.grading import Grading, grade_math, reward_metrics
from qurl.rewards.pool import GradingPool, GradingPools, Pool
from qurl.rewards.reward import Grade, Reward

__all__ = [
    "Grade",
    "Grading",
    "GradingPool",
    "GradingPools",
    "Pool",
    "Reward",
    "grade_math",
    "reward_metrics",
]
