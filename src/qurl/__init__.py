"""QuRL: reinforcement learning for reasoning LLMs with quantized rollouts."""

__version__ = "0.1.0"
