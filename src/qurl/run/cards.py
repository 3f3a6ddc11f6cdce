"""GPUs by name, so that memory and time can be planned for one that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qurl.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """A GPU's data sheet; products are dense, with sums in FP32 or INT32."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second
    flops_wide: float  # BF16
    flops_narrow: float  # the slower of INT8 and, where the GPU has it, FP8
    capability: tuple[int, int]
    link: float
    """Bytes per second to a neighbour, in one direction: NVLink or PCIe."""
    network: float
    """Bytes per second out of a node of 8 such GPUs, in one direction."""

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card("H200", 141e9, 4.8e12, 989e12, 1979e12, (9, 0), 450e9, 400e9),
        Card("H100", 80e9, 3.35e12, 989e12, 1979e12, (9, 0), 450e9, 400e9),
        Card("A100", 80e9, 2.04e12, 312e12, 624e12, (8, 0), 300e9, 200e9),
        Card("L40S", 48e9, 0.864e12, 362e12, 733e12, (8, 9), 32e9, 25e9),
        Card("RTX 4090", 24e9, 1.01e12, 165e12, 330e12, (8, 9), 32e9, 1.25e9),
        Card("RTX 3090", 24e9, 0.936e12, 71e12, 284e12, (8, 6), 32e9, 1.25e9),
    )
}
"""H100 and A100 are the SXM versions with 80 GB. Networks are those of DGX machines, 8 cards of
400 Gb/s (Hopper) or 200 Gb/s (Ampere); for the others we assume 200 Gb/s and 10 Gb/s a machine."""


def find_card(name: str) -> Card:
    """The card of a name such as "h100" or "rtx4090"."""
    for card in CARDS.values():
        if _plain(card.name) == _plain(name):
            return card
    raise ConfigError(f"--gpu {name!r} is not one of {', '.join(CARDS)}")


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
