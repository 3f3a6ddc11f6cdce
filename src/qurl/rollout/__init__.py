"""Rollout engines: the quantized actor."""

from qurl.rollout.engine import Engine, build_engine

__all__ = ["Engine", "build_engine"]
