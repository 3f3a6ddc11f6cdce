"""Where the GPU's time goes in a decode step.

    python -m benchmarks.profile_rollout --model 7B --quant int8 --workload A,B

Takes the flags of `qurl bench rollout`, measures what it does, and adds the profiles to the same
JSON file. Overlapping kernels are counted as `qurl.bench.profile` says.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.scripts import run_command
from qurl.bench.profile import Kernel, exclusive_times, trace_kernels
from qurl.bench.rollout import RolloutBench, run_rollout
from qurl.bench.workload import Contender, Workload
from qurl.errors import ConfigError, EngineError

NUM_STEPS = 61
"""Length of the profiled run: a prime, which no number of layers divides."""
FIRST_STEP, LAST_STEP = 38, 58
"""The steps to look at: after the prefill, before sequences end."""
CATEGORIES = (
    ("attention", r"attend|attention|flash|fmha|^alike_|^split_kernel|^combine_kernel"),
    ("sampling", r"^summarise_|sampl|argmax|softmax|logprob|exponential|topk|distribution"),
    (
        "norms, activations, rope",
        r"norm|swiglu|silu|act_and_mul|^map_|rotary|rotate|rope|reshape_and_cache|quant",
    ),
    ("linears", r"gemm|gemv|nvjet|cutlass|xmma|splitk|matmul|_mm"),
    ("other", r""),
)
"""The first pattern found in a kernel's name decides."""
NUM_TOP = 20


@dataclass(frozen=True)
class Profile:
    """Means per decode step."""

    busy_ms: float
    num_kernels: float
    microseconds: dict[str, float]
    """Time of each category, the largest first."""
    top: list[dict[str, Any]]
    """The most expensive kernels: name, category, launches and microseconds per step."""


def profile_rollout(contender: Contender, workload: Workload) -> dict[str, Any]:
    """The profile of a workload's decode steps, to save with its figures."""
    run = replace(workload, new_tokens=NUM_STEPS)
    problems = run.problems(contender.setup.shape.vocabulary, seed=0)
    try:
        profile = profile_decode(lambda: contender.generate(problems, run.params(seed=0)))
    except EngineError as error:  # must not lose the measurement
        print(f"  no profile: {error}", file=sys.stderr)
        return {}
    print(describe_profile(profile), flush=True)
    return {"profile": asdict(profile)}


def profile_decode(generate: Callable[[], Any]) -> Profile:
    """Trace a call that makes NUM_STEPS decode steps."""
    generate()  # compiles and captures
    return summarize(cut_steps(trace_kernels(generate)), LAST_STEP - FIRST_STEP)


def cut_steps(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of the steps to look at, found by one that runs once in every step."""
    counts = Counter(kernel.name for kernel in kernels)
    # An engine that looks ahead may run a step or two more than it needs.
    once = [name for name, count in counts.items() if NUM_STEPS <= count <= NUM_STEPS + 2]
    if not once:
        raise EngineError(
            f"none of {len(counts)} kernels ran once per step in {NUM_STEPS} steps, so "
            "it is not clear where a step begins"
        )
    starts = [kernel.start for kernel in kernels if kernel.name == once[0]]
    first, last = starts[FIRST_STEP], starts[LAST_STEP]
    return [kernel for kernel in kernels if first <= kernel.start < last]


def summarize(kernels: Sequence[Kernel], num_steps: int) -> Profile:
    """Add up the kernels of `num_steps` steps."""
    times, categories = exclusive_times(kernels), categorize(kernels)
    totals, by_kernel, counts = Counter[Any](), Counter[Any](), Counter[Any]()
    for kernel, time, category in zip(kernels, times, categories, strict=True):
        totals.update({category: time / num_steps})
        by_kernel.update({(kernel.name, category): time / num_steps})
        counts.update([(kernel.name, category)])
    top = [
        {"name": n, "category": c, "per_step": counts[n, c] / num_steps, "microseconds": us}
        for (n, c), us in by_kernel.most_common(NUM_TOP)
    ]
    busy_ms = sum(times) / num_steps / 1e3
    return Profile(busy_ms, len(kernels) / num_steps, dict(totals.most_common()), top)


def categorize(kernels: Sequence[Kernel]) -> list[str]:
    """Categories by name, except that the product before sampling is the head's."""
    categories = [
        next(title for title, pattern in CATEGORIES if re.search(pattern, kernel.name.lower()))
        for kernel in kernels
    ]
    for i, category in enumerate(categories):
        if category == "sampling":
            j = i - 1
            while j >= 0 and categories[j] == "other":  # a conversion of the logits, say
                j -= 1
            while j >= 0 and categories[j] == "linears":  # several if cuBLAS cuts K
                categories[j] = "lm_head"
                j -= 1
    return categories


def describe_profile(profile: Profile) -> str:
    """Lines for the terminal."""
    lines = [f"  {profile.busy_ms:.3f} ms busy per step, {profile.num_kernels:.0f} kernels"]
    for category, us in profile.microseconds.items():
        lines.append(f"  {us:9.1f} us {us / profile.busy_ms / 1e3:6.1%}  {category}")
    for kernel in profile.top[:10]:
        lines.append(
            f"  {kernel['microseconds']:9.1f} us {kernel['per_step']:6.1f}x  "
            f"{kernel['name'][:70]} ({kernel['category']})"
        )
    return "\n".join(lines)


def run(bench: RolloutBench) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("a profile needs a GPU, and there is none here")
    run_rollout(replace(bench, device="cuda"), more=profile_rollout)


if __name__ == "__main__":
    sys.exit(run_command("profile_rollout", RolloutBench, run))
