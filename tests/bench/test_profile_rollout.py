"""`benchmarks/profile_rollout.py`: steps, categories and times, from traces made by hand."""

import re
from pathlib import Path

import pytest

from benchmarks.profile_rollout import (
    FIRST_STEP,
    LAST_STEP,
    NUM_STEPS,
    categorize,
    cut_steps,
    describe_profile,
    summarize,
)
from qurl.bench.profile import Kernel
from qurl.errors import EngineError

ROOT = Path(__file__).parents[2]


def steps_of(*names, gap=0.0):
    """A prefill, then NUM_STEPS steps of the given kernels, 10 us each."""
    kernels, time = [Kernel("prefill_gemm", 0.0, 5.0)] * 7, 100.0
    for _ in range(NUM_STEPS):
        for name in names:
            kernels.append(Kernel(name, time, 10.0))
            time += 10.0 + gap
    return kernels


STEP = (
    *("add_norm_kernel", "gemm_kernel", "rotate_kernel", "split_kernel", "combine_kernel"),
    *("map_row_kernel", "gemm_kernel", "add_norm_kernel"),
    *("nvjet_sm90_tst", "splitKreduce_kernel", "elementwise_kernel", "summarise_kernel"),
    "sample_kernel",
)


def test_profile_of_some_steps():
    kernels = cut_steps(steps_of(*STEP, gap=1.0))
    num_steps = LAST_STEP - FIRST_STEP
    assert len(kernels) == num_steps * len(STEP)
    profile = summarize(kernels, num_steps)
    assert profile.num_kernels == len(STEP) == 13
    assert profile.busy_ms == pytest.approx(0.130)
    # The cut is at a kernel that runs once per step, so the first step's head is whole.
    assert profile.microseconds == {
        "norms, activations, rope": pytest.approx(40.0),
        "linears": pytest.approx(20.0),
        "attention": pytest.approx(20.0),
        "lm_head": pytest.approx(20.0),
        "sampling": pytest.approx(20.0),
        "other": pytest.approx(10.0),
    }
    gemm = next(k for k in profile.top if k["name"] == "gemm_kernel")
    assert gemm == {
        "name": "gemm_kernel",
        "category": "linears",
        "per_step": 2.0,
        "microseconds": pytest.approx(20.0),
    }
    assert "0.130 ms busy per step, 13 kernels" in describe_profile(profile)


def test_a_product_between_other_kernels_is_not_the_head():
    names = ("gemm_kernel", "add_norm_kernel", "sample_kernel")
    kernels = [Kernel(name, i, 1.0) for i, name in enumerate(names)]
    assert categorize(kernels) == ["linears", "norms, activations, rope", "sampling"]


def test_steps_that_cannot_be_told_apart():
    with pytest.raises(EngineError, match="ran once per step"):
        cut_steps(steps_of("gemm_kernel", "gemm_kernel"))


def test_every_kernel_of_ours_has_a_category():
    sources = [p.read_text() for p in (ROOT / "src/qurl/rollout/local/kernels").glob("*.py")]
    names = re.findall(r"^def (\w+_kernel)\(", "\n".join(sources), re.MULTILINE)
    categories = categorize([Kernel(name, 0, 1) for name in names])
    others = [name for name, c in zip(names, categories, strict=True) if c == "other"]
    assert others == ["begin_kernel"]  # the embedding
