"""How far AdamW's update is off when its moments are kept in 8 bits, by code.

    python -m benchmarks.moment_codes

Gradients are random, with scales over four orders of magnitude within a block of 256 and a mean of
0.3 of their scale. Prints |u' - u| / |u| of the update u = m / sqrt(v), averaged over the last
fifth of the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qurl.trainer import moments
from qurl.trainer.moments import BLOCK

STEPS, BLOCKS, BETAS = 1000, 8, (0.9, 0.999)
Code = Callable[[Tensor, int], Tensor]  # what is left of x after it was stored in a step


def main() -> None:
    kinds = ("heavy tails", "sparse", "bursts", "falling")
    print("| code | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds), sep="\n")
    for name, (code_m, code_v) in codes().items():
        errors = [f"{measure(kind, code_m, code_v):.2f}" for kind in kinds]
        print(f"| {name} | " + " | ".join(errors) + " |", flush=True)


def codes() -> dict[str, tuple[Code, Code]]:
    """By name, codes of m and of v."""
    linear = (rounded([c / 127 for c in range(-127, 128)]), rounded([c / 255 for c in range(256)]))
    dynamic = (rounded(dynamic_map(signed=True)), rounded(dynamic_map(signed=False)))
    return {
        "linear m and sqrt(v)": (linear[0], lambda v, step: linear[1](v.sqrt(), step) ** 2),
        "dynamic map (bitsandbytes)": dynamic,
        "3-bit mantissa, to the nearest": ours(is_random=False),
        "3-bit mantissa, at random (ours)": ours(is_random=True),
    }


def rounded(table: list[float]) -> Code:
    """To the nearest of the table's numbers times the block's largest; no v becomes 0."""
    numbers = torch.tensor(sorted(table))
    borders = (numbers[1:] + numbers[:-1]) / 2
    smallest = 0.0 if numbers[0] < 0 else float(numbers[1])

    def store(x: Tensor, step: int) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-38)
        found = numbers[torch.bucketize((x / scale).contiguous(), borders)]
        return torch.where((x > 0) & (found == 0), smallest, found) * scale

    return store


def dynamic_map(*, signed: bool) -> list[float]:
    """Seven decades; each has twice as many numbers as the one below it."""
    table = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        means = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        table += means + [-x for x in means if signed]
    return table


def ours(*, is_random: bool) -> tuple[Code, Code]:
    def noise(x: Tensor, step: int) -> Tensor:
        if not is_random:
            return torch.full(x.shape, 2**31 + 2**19)  # half a step in either part
        return moments.make_noise(x.numel(), moments.scramble(step) >> 1).view(x.shape)

    return (
        lambda m, step: moments.decode_m(*moments.encode_m(m, noise(m, step))),
        lambda v, step: moments.decode_v(*moments.encode_v(v, noise(v, step))),
    )


def measure(kind: str, code_m: Code, code_v: Code) -> float:
    exact_m = exact_v = m = v = torch.zeros(BLOCKS, BLOCK)
    beta1, beta2 = BETAS
    errors = []
    for step, g in enumerate(gradients(kind), 1):
        exact_m, m = (beta1 * x + (1 - beta1) * g for x in (exact_m, m))
        exact_v, v = (beta2 * x + (1 - beta2) * g * g for x in (exact_v, v))
        exact, found = exact_m / (exact_v.sqrt() + 1e-12), m / (v.sqrt() + 1e-12)
        errors.append(float((found - exact).norm() / exact.norm()))
        m, v = code_m(m, step), code_v(v, step)
    return statistics.fmean(errors[-STEPS // 5 :])


def gradients(kind: str) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scale = 1e-6 * torch.exp(normal(BLOCKS, 1) + normal(1, BLOCK) + normal(BLOCKS, BLOCK))
    mean = 0.3 * scale * normal(BLOCKS, BLOCK)
    for step in range(STEPS):
        z = normal(BLOCKS, BLOCK)
        if kind == "heavy tails":  # Student's t with three degrees of freedom
            z = z / normal(3, BLOCKS, BLOCK).pow(2).mean(0).sqrt()
        elif kind == "sparse":
            z = 5 * z * (torch.rand(BLOCKS, BLOCK, generator=generator) < 0.02)
        elif kind == "bursts":
            z = z * normal(1).exp()
        else:
            z = z * math.exp(-step / 250)
        yield mean + scale * z


if __name__ == "__main__":
    main()
