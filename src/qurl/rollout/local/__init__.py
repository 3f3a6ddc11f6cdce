"""The local engine: continuous batching over a paged KV cache, in the trainer's process."""

from qurl.rollout.local.engine import LocalEngine

__all__ = ["LocalEngine"]
