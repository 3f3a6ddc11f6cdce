"""QuRL: reinforcement learning for reasoning LLMs with quantized rollouts."""

__version__ = "0.2.0"
