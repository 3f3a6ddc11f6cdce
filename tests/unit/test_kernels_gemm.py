"""The product of codes against float64, and the choice of a plan."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

pytest.importorskip("triton")

from qurl.errors import EngineError
from qurl.ops.target import Target
from qurl.quant import FORMATS, Quantized, quantize
from qurl.quant.formats import expand_scale, quantize_activation
from qurl.quant.kernels.gemm import Plan, library_product, multiply, multiply_gated
from qurl.quant.kernels.plans import (
    BUCKETS,
    Plans,
    bucket_of,
    kind_of,
    read_table,
    rule_of_thumb,
    write_table,
)
from qurl.quant.linear import Partial, finish

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = Target("NVIDIA H200", (9, 0), 132)
L40 = Target("NVIDIA L40", (8, 9), 142)
A100 = Target("NVIDIA A100", (8, 0), 108)
BF16, FP32 = torch.bfloat16, torch.float32
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
# The matrix unit of a GPU keeps 14 bits of a sum of FP8 products.
TOLERANCES = {"fp8": 1e-3, "fp8-block": 1e-3} if DEVICE == "cuda" else {}
CODED = [name for name, format in FORMATS.items() if not format.is_weight_only]
SIZES = [(1, 48, 96), (17, 130, 272), (33, 64, 160), (5, 33, 50)]
"""M, N, K: one token, tiles that do not divide, rows that no descriptor can describe."""


def operands(name: str, M: int, N: int, K: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x, w, bias = (torch.randn(*s, generator=generator) for s in ((M, K), (N, K), (N,)))
    x[0] = 0
    w[-1] *= 1e20
    w[0] *= 1e-20
    x, w, bias = (t.to(DEVICE) for t in (x, w, bias))
    return quantize_activation(x, FORMATS[name]), quantize(w, FORMATS[name]), bias


def operands_in_numbers(M: int, N: int, K: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(n, K, generator=generator).to(DEVICE, dtype) for n in (M, N))


def in_float64(x: Quantized, w: Quantized, bias: torch.Tensor) -> torch.Tensor:
    x64, w64 = (q.codes.double() * expand_scale(q).double() for q in (x, w))
    return x64 @ w64.T + bias.double()


def plan_for(name: str | None, splits: int) -> Plan:
    return Plan(tokens=16, channels=64, depth=128 if name == "fp8-block" else 64, splits=splits)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_product_against_float64(name, size, splits):
    x, w, bias = operands(name, *size)
    expected = in_float64(x, w, bias)
    y = finish(multiply(x, w, bias, FP32, plan_for(name, splits)))
    scale = expected.abs().amax(0, keepdim=True)  # channels differ by forty orders of magnitude
    assert ((y - expected).abs() / scale).max() < TOLERANCES.get(name, 2e-6)


@pytest.mark.parametrize("name", ["int8", "int4"])
@both_dtypes
def test_integers_are_exact_whatever_the_plan(name, dtype):
    x, w, bias = operands(name, 17, 130, 1024)
    total = (x.codes.long().cpu() @ w.codes.long().cpu().T).to(DEVICE)
    expected = (total.float() * w.scale.T * x.scale + bias).to(dtype)
    for plan in (
        Plan(16, 64, 64),
        Plan(32, 128, 128, splits=1),
        Plan(16, 64, 128, splits=5),
        Plan(32, 64, 64, splits=16),
    ):
        assert torch.equal(finish(multiply(x, w, bias, dtype, plan)), expected)


def test_more_parts_than_steps_add_nothing():
    x, w, bias = operands("int8", 3, 16, 64)
    product = multiply(x, w, bias, FP32, Plan(16, 64, 64, splits=4))
    assert isinstance(product, Partial)
    assert product.acc.shape == (4, 3, 16)
    assert not product.acc[1:].any()


@both_dtypes
@pytest.mark.parametrize("splits", [0, 2])
def test_numbers_are_multiplied_too(splits, dtype):
    """To the rounding of FP32 sums; TF32 factors would be off by 1e-2."""
    x, w = operands_in_numbers(9, 40, 96, dtype)
    expected = x.double() @ w.double().T
    y = finish(multiply(x, w, None, FP32, Plan(16, 64, 64, splits=splits)))
    assert (y - expected).abs().max() < 1e-4


@both_dtypes
@pytest.mark.parametrize("name", [None, *CODED])
def test_a_finished_product_is_rounded_once(name, dtype):
    """What is finished here has the bits of what the consumer finishes."""
    bias = operands("int8", 17, 130, 272)[2].to(dtype)
    if name is None:
        x, w = operands_in_numbers(17, 130, 272, dtype)
    else:
        x, w, _ = operands(name, 17, 130, 272)
    here, later = (multiply(x, w, bias, dtype, plan_for(name, splits)) for splits in (0, 1))
    assert isinstance(later, Partial)
    assert torch.equal(finish(here), finish(later))


@pytest.mark.parametrize("name", CODED)
def test_gated_product(name):
    """Channels alternate between gate and up; each token's largest magnitude comes along."""
    x, w, _ = operands(name, 17, 130, 272)
    w.scale.copy_(w.scale.clamp(1e-5, 1e5))
    gate, up = in_float64(x, w, torch.zeros(130, device=DEVICE)).unflatten(-1, (-1, 2)).unbind(-1)
    expected = torch.nn.functional.silu(gate) * up
    amax = torch.zeros(17, device=DEVICE)
    h = multiply_gated(x, w, None, FP32, plan_for(name, 0), amax)
    assert h.shape == (17, 65)
    tolerance = 100 * TOLERANCES.get(name, 1e-6)
    torch.testing.assert_close(h.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(amax, h.abs().amax(1))


@pytest.mark.parametrize("name", CODED)
def test_gated_product_rounds_twice_to_the_compute_dtype(name):
    """The product once, then silu(gate) * up once; a GPU's exponential may turn a few."""
    x, w, _ = operands(name, 17, 130, 272)
    w.scale.copy_(w.scale.clamp(1e-5, 1e5))
    plan = plan_for(name, 0)
    gate, up = finish(multiply(x, w, None, BF16, plan)).float().unflatten(-1, (-1, 2)).unbind(-1)
    expected = (torch.nn.functional.silu(gate) * up).to(BF16)
    amax = torch.zeros(17, device=DEVICE)
    h = multiply_gated(x, w, None, BF16, plan, amax)
    assert h.dtype == BF16
    assert (h != expected).float().mean() < 5e-3
    torch.testing.assert_close(h, expected, rtol=2**-7, atol=0)
    assert torch.equal(amax, h.float().abs().amax(1))


def test_gated_product_tells_of_nan():
    x, w, _ = operands("int8", 3, 32, 64)
    x.scale[1] = torch.nan
    amax = torch.zeros(3, device=DEVICE)
    h = multiply_gated(x, w, None, FP32, plan_for("int8", 0), amax)
    assert h[1].isnan().all()
    assert amax.isinf().tolist() == [False, True, False]


def test_a_row_does_not_depend_on_the_batch():
    x, w, bias = operands("fp8", 33, 64, 256)
    plan = plan_for("fp8", 2)
    together = finish(multiply(x, w, bias, BF16, plan))
    for row in (1, 20, 32):
        alone = Quantized(x.codes[row : row + 1], x.scale[row : row + 1], x.format)
        assert torch.equal(finish(multiply(alone, w, bias, BF16, plan))[0], together[row])


@pytest.mark.parametrize("target", [H200, L40])
@pytest.mark.parametrize("tokens", [1, 16, 200, 8192])
def test_unified_plans_cut_no_sum(tokens, target):
    """Then trainer and engine add up alike, whatever the number of tokens."""
    for shape in ((1536, 1536), (1536, 8960)):
        plan = Plans(target, unified=True).choose("fp8", tokens, *shape)
        if target == H200 and tokens == 8192:
            assert plan is None, "cuBLAS has the same bits there"
            continue
        assert plan is not None
        assert plan.splits == 0
        assert plan.depth % 128 == 0
    assert Plans(target, unified=True).choose("bf16", 8192, 1536, 1536) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_sums_in_one_part_have_the_same_bits_for_every_plan(format):
    """On a GPU only: the interpreter adds up a step at a time, whose depth is the plan's."""
    x, w, _ = operands(format, 300, 640, 1536)
    sizes = ((16, 64, 128), (64, 64, 256), (128, 128, 128), (256, 128, 128))
    plans = [Plan(*size, warps=8 if size[0] > 64 else 4, stages=3) for size in sizes]
    first, *others = (finish(multiply(x, w, None, FP32, plan)) for plan in plans)
    assert all(torch.equal(first, other) for other in others)


# --- the vendor's library ---------------------------------------------------------------------


def test_the_library_multiplies_numbers():
    x, w = operands_in_numbers(9, 48, 96, BF16)
    bias = torch.ones(48, device=DEVICE, dtype=BF16)
    y = library_product(x, w, bias, BF16)
    assert y is not None
    assert torch.equal(y, torch.nn.functional.linear(x, w, bias))


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        ("int8", (16, 64, 64), BF16),  # no scales per row
        ("fp8-block", (16, 128, 128), BF16),
        ("fp8", (16, 72, 64), BF16),  # no multiple of 16
        ("fp8", (16, 64, 64), FP32),
    ],
)
def test_the_library_has_not_every_product(name, size, dtype):
    x, w, bias = operands(name, *size)
    assert library_product(x, w, bias.to(dtype), dtype) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_library_rounds_once_where_there_is_a_bias():
    """Codes -1, 0 and 1 have exact sums, so that bits are nearly equal to those of FP64."""
    if not Target.of(torch.device(DEVICE)).has_fp8:
        pytest.skip("needs FP8 matrix instructions")
    x, w, bias = operands("fp8", 64, 128, 64)
    bias = bias.to(BF16)
    for codes in (x.codes, w.codes):
        codes.copy_(codes.float().sign())
    w.scale.copy_(torch.rand_like(w.scale))
    x.scale.copy_(torch.rand_like(x.scale))
    y = library_product(x, w, bias, BF16)
    assert y is not None
    expected = in_float64(x, w, bias).to(BF16)
    assert (y != expected).float().mean() < 0.01
    plain = library_product(x, w, None, BF16)
    assert plain is not None
    assert (plain + bias != expected).float().mean() > 0.1, "two roundings would show"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1040, 16640])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1536, 1536), (17920, 1536), (1536, 8960)])
def test_on_hopper_the_library_has_our_bits(shape, has_bias, tokens):
    """So a unified trainer may multiply with it what an engine decodes with our kernel."""
    if Target.of(torch.device(DEVICE)).capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    x, w, bias = operands("fp8", tokens, *shape)
    bias = bias.to(BF16) if has_bias else None
    plans = Plans(Target.of(torch.device(DEVICE)), unified=True)
    assert plans.choose("fp8", 8192, *shape) is None
    y = plans.multiply("fp8", x, w, bias, BF16)
    exact = library_product(x, w, bias, BF16)
    for plan in (Plan(32, 64, 128, 0, 4, 4), Plan(128, 128, 128, 0, 8, 3)):
        fast = dataclasses.replace(plan, is_fast=True)
        assert torch.equal(finish(multiply(x, w, bias, BF16, fast)), y)
        assert torch.equal(finish(multiply(x, w, bias, BF16, plan)), exact)
    assert not torch.equal(y, exact)


@pytest.mark.parametrize("is_unified", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_our_kernel_has_the_products_that_the_library_has_not(tokens, is_unified, monkeypatch):
    x, w, bias = operands("fp8", tokens, 72, 128)
    plans = Plans(H200, unified=is_unified)
    monkeypatch.setattr(plans, "choose", lambda *shape: None)
    y = finish(plans.multiply("fp8", x, w, bias, BF16))
    assert torch.equal(y, finish(multiply(x, w, bias, BF16, Plan(16, 64, 128))))


# --- plans ------------------------------------------------------------------------------------


def test_buckets():
    assert [bucket_of(n) for n in (1, 16, 17, 256, 257, 10**6)] == [16, 16, 32, 256, 512, 8192]


@pytest.mark.parametrize("kind", ["int8", "fp8", "bf16", "fp32", "fp8-block"])
@pytest.mark.parametrize("tokens", BUCKETS)
@pytest.mark.parametrize("shape", [(1536, 1536), (37888, 3584), (64, 64), (3584, 18944)])
def test_rule_of_thumb_fits_the_chip(kind, tokens, shape):
    plan = rule_of_thumb(kind, tokens, *shape, num_sms=132)
    itemsize = {"bf16": 2, "fp32": 4}.get(kind, 1)
    assert plan.stages * (plan.tokens + plan.channels) * plan.depth * itemsize <= 160 * 1024
    assert plan.splits <= max(1, shape[1] // plan.depth)
    tiles = -(-tokens // plan.tokens) * -(-shape[0] // plan.channels)
    assert plan.splits == 0 or tiles * plan.splits <= 2 * 132


def test_few_tiles_are_split():
    assert rule_of_thumb("int8", 64, 1536, 8960, num_sms=132).splits > 4
    assert rule_of_thumb("int8", 64, 37888, 3584, num_sms=132).splits == 0


def test_table_round_trip():
    plans = {("int8", 1536, 8960, 64): Plan(64, 64, 128, 8), ("fp8", 1536, 8960, 8192): None}
    text = write_table(plans, {"gpu": "NVIDIA H200"})
    assert read_table(text) == plans
    assert json.loads(text)["about"] == {"gpu": "NVIDIA H200"}


def test_unknown_devices_have_plans_too():
    plans = Plans(A100)
    assert isinstance(plans.choose("int8", 40, 1536, 1536), Plan)
    assert plans.choose("bf16", 40, 1536, 1536) is None
    assert plans.choose("fp32", 40, 1536, 1536) is None


def test_measured_plans_name_real_kernels():
    plans = Plans(H200)
    assert plans.table, "the package ships a table for this device"
    for (kind, _, depth, tokens), plan in plans.table.items():
        assert kind in ("int8", "fp8", "fp8-unified", "nvfp4", "bf16")
        assert tokens in BUCKETS
        assert plan is not None or kind != "int8", "cuBLAS has no INT8 product with our scales"
        assert plan is None or plan.splits * plan.depth <= depth


def test_between_measured_sizes_the_next_larger_counts():
    plans = Plans(H200)
    plans.table = {("int8", 1536, 8960, 64): Plan(64, 64, 128, 8)}
    assert plans.choose("int8", 3, 1536, 8960) == Plan(16, 64, 128, 8)
    assert plans.choose("int8", 64, 1536, 8960) == Plan(64, 64, 128, 8)
    thumb = rule_of_thumb("int8", 512, 1536, 8960, H200.num_sms)
    assert plans.choose("int8", 400, 1536, 8960) == thumb


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_deterministic_plans_cut_k_alike_for_every_batch(kind):
    plans = Plans(H200, deterministic=True)
    chosen = {plans.choose(kind, m, 1536, 8960) for m in (1, 16, 64, 256, 8192)}
    assert None not in chosen
    assert len({(p.channels, p.depth, p.splits) for p in chosen}) == 1


def test_fp8_is_refused_where_the_device_has_none():
    assert kind_of(FORMATS["int8"], A100) == "int8"
    with pytest.raises(EngineError, match=r"'fp8'.*8\.9.*NVIDIA A100.*\(8, 0\).*int8"):
        kind_of(FORMATS["fp8"], A100)
