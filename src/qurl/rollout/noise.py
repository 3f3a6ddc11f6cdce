"""Adaptive quantization noise (QeRL): random weights of the engine's norms, for exploration.

    w' = w + Z,   Z ~ N(0, sigma^2)        each channel of the two norms of a layer

A norm's channel feeds a column of q, k and v, or of gate and up, so this is noise on their columns.
The run is cut into equal stages. The first has no noise, and from the second to the last sigma
falls geometrically from `start` to `end`.
"""

from __future__ import annotations


def noise_sigma(step: int, num_steps: int, start: float, end: float, stages: int) -> float:
    """sigma of a step, counted from 0."""
    stage = int(min(step, num_steps) // (num_steps / stages))
    if stage == 0:
        return 0.0
    return start * (end / start) ** (min(stage - 1, stages - 2) / (stages - 2))
