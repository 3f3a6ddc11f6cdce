"""How kernels are launched: sizes, compiler options, and overlap with the kernel before.

With programmatic dependent launch a kernel starts while the one before it still runs. It must call
`await_inputs` before it reads what that one writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qurl.ops.target import Target

EXACT = {"enable_fp_fusion": False}
"""Launch options that keep the compiler from rounding a product and a sum only once."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def overlapping(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with the constant `PDL`, which starts early where it can."""
    has_pdl = Target.of(device).has_pdl
    return {"PDL": has_pdl, "launch_pdl": has_pdl}


def can_describe(matrix: Tensor) -> bool:
    """Whether the copy engine can fetch tiles: rows must start at multiples of 16 bytes."""
    is_aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
    return is_aligned and Target.of(matrix.device).has_descriptors


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait until what the kernel before writes may be read, then let the next kernel start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
