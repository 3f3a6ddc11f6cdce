"""Where the GPU's time goes in a decode step.

Kernels may overlap (a kernel can start while the one before it ends, and then waits for it), so a
moment counts once, for the kernel that began first. The times of all kernels then add up to the
time in which the GPU was busy.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from qurl.errors import EngineError

NUM_STEPS = 61
"""Length of the profiled run: a prime, which no number of layers divides."""
FIRST_STEP, LAST_STEP = 38, 58
"""What is looked at: past the prefill, before sequences end."""
CATEGORIES = (
    ("attention", r"attend|attention|flash|fmha|^split_kernel|^combine_kernel"),
    ("sampling", r"^summarise_|sampl|argmax|softmax|logprob|exponential|topk|distribution"),
    (
        "norms, activations, rope",
        r"norm|swiglu|silu|act_and_mul|^map_|rotary|rotate|rope|reshape_and_cache|quant",
    ),
    ("linears", r"gemm|gemv|nvjet|cutlass|xmma|splitk|matmul|_mm"),
    ("other", r""),
)
"""By the first pattern found in the kernel's name."""
LM_HEAD = "lm_head"
NUM_TOP = 20
"""Kernels that are named one by one."""

Key = TypeVar("Key")


@dataclass(frozen=True)
class Kernel:
    """One launch, in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Profile:
    """Per decode step."""

    busy_ms: float
    num_kernels: float
    microseconds: dict[str, float]
    """By category."""
    top: list[dict[str, Any]]
    """The most expensive kernels: name, category, count and microseconds per step."""


def profile_decode(generate: Callable[[int], Any]) -> Profile:
    """Trace `generate(NUM_STEPS)`, which makes so many decode steps."""
    generate(NUM_STEPS)  # nothing is compiled or captured the second time
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        generate(NUM_STEPS)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        kernels = read_trace(path.read_text(encoding="utf-8"))
    return summarize(cut_steps(kernels), LAST_STEP - FIRST_STEP)


def read_trace(text: str) -> list[Kernel]:
    """Everything that ran on the GPU, in order of its start."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") in kinds]
    kernels = [Kernel(e["name"], float(e["ts"]), float(e["dur"])) for e in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def cut_steps(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels of the steps that are looked at, found by one that runs once in every step."""
    counts = Counter(kernel.name for kernel in kernels)
    # An engine that looks ahead may run a step or two more than it needs.
    once = [name for name, count in counts.items() if NUM_STEPS <= count <= NUM_STEPS + 2]
    if not once:
        raise EngineError(
            f"--profile: none of {len(counts)} kernels ran once per step in {NUM_STEPS} steps; "
            "the decode steps cannot be told apart"
        )
    starts = [kernel.start for kernel in kernels if kernel.name == once[0]]
    first, last = starts[FIRST_STEP], starts[LAST_STEP]
    return [kernel for kernel in kernels if first <= kernel.start < last]


def summarize(kernels: Sequence[Kernel], num_steps: int) -> Profile:
    """Add up the kernels of `num_steps` steps."""
    times, categories = exclusive_times(kernels), categorize(kernels)
    by_category: defaultdict[str, float] = defaultdict(float)
    by_kernel: defaultdict[tuple[str, str], float] = defaultdict(float)
    counts: Counter[tuple[str, str]] = Counter()
    for kernel, time, category in zip(kernels, times, categories, strict=True):
        by_category[category] += time / num_steps
        by_kernel[kernel.name, category] += time / num_steps
        counts[kernel.name, category] += 1
    top = [
        {
            "name": name,
            "category": category,
            "per_step": counts[name, category] / num_steps,
            "microseconds": microseconds,
        }
        for (name, category), microseconds in _largest_first(by_kernel)[:NUM_TOP]
    ]
    return Profile(
        busy_ms=sum(times) / num_steps / 1e3,
        num_kernels=len(kernels) / num_steps,
        microseconds=dict(_largest_first(by_category)),
        top=top,
    )


def _largest_first(times: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def exclusive_times(kernels: Sequence[Kernel]) -> list[float]:
    """What each kernel adds to the time in which those before it ran."""
    times, busy_until = [], float("-inf")
    for kernel in kernels:
        times.append(max(0.0, kernel.end - max(kernel.start, busy_until)))
        busy_until = max(busy_until, kernel.end)
    return times


def categorize(kernels: Sequence[Kernel]) -> list[str]:
    """The product before sampling is the head's; other categories go by name."""
    categories = [
        next(title for title, pattern in CATEGORIES if re.search(pattern, kernel.name.lower()))
        for kernel in kernels
    ]
    for i, category in enumerate(categories):
        if category == "sampling":
            j = i - 1
            while j >= 0 and categories[j] == "other":  # a conversion of the logits, say
                j -= 1
            while j >= 0 and categories[j] == "linears":  # several where cuBLAS cuts K
                categories[j] = LM_HEAD
                j -= 1
    return categories


def describe_profile(profile: Profile) -> str:
    """Lines for the terminal."""
    lines = [f"  {profile.busy_ms:.3f} ms busy per step, {profile.num_kernels:.0f} kernels"]
    for category, microseconds in profile.microseconds.items():
        share = microseconds / profile.busy_ms / 1e3
        lines.append(f"  {microseconds:9.1f} us {share:6.1%}  {category}")
    for kernel in profile.top[:10]:
        lines.append(
            f"  {kernel['microseconds']:9.1f} us {kernel['per_step']:6.1f}x  "
            f"{kernel['name'][:70]} ({kernel['category']})"
        )
    return "\n".join(lines)
