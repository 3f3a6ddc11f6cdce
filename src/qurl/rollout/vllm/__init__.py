"""vLLM as a rollout engine: every architecture that it runs, tensor parallelism, MoE."""

from qurl.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
