"""What a device can do, as far as kernels need to know."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """A device that kernels are launched on; a CPU stands for Triton's interpreter."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability; None on a CPU."""
    num_sms: int

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> Target:
        if device.type != "cuda":
            return Target("cpu", None, num_sms=1)
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return Target(properties.name, capability, properties.multi_processor_count)

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch: a kernel's start overlaps the end of the one before."""
        return self.capability is not None and self.capability >= (9, 0)

    @property
    def has_descriptors(self) -> bool:
        """A copy engine that fetches tiles by descriptor; the interpreter emulates it."""
        return self.capability is None or self.capability >= (9, 0)

    @property
    def has_warp_groups(self) -> bool:
        """Matrix instructions of four warps together; consumer cards have those of one."""
        return self.capability is None or self.capability[0] in (9, 10)

    @property
    def has_fp8(self) -> bool:
        """FP8 matrix instructions; the interpreter emulates them."""
        return self.capability is None or self.capability >= (8, 9)
