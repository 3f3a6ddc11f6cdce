"""Randomness by name: every draw is keyed by its purpose, so resuming needs no history."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed for one purpose, e.g. `derive_seed(seed, "rollout", step)`."""
    text = ":".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))
