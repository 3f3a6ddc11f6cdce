"""Where a run computes, and in which precision that is done by default."""

from __future__ import annotations

import torch

from qurl.errors import ConfigError


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def default_dtype(device: torch.device) -> torch.dtype:
    """Of arithmetic, and of what the engine does not quantize."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
