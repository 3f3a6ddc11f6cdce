"""Kernels of NVFP4 weights against `qurl.quant.formats`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from qurl.ops.target import Target
from qurl.quant import Quantized, dequantize, get_format, quantize
from qurl.quant.kernels.gemm import Plan, library_product, multiply, multiply_gated
from qurl.quant.kernels.packed import decode, decode_factor
from qurl.quant.kernels.plans import BUCKETS, PACKED_TOKENS, Plans, rule_of_thumb
from qurl.quant.kernels.requantize import requantize_
from qurl.quant.linear import Partial, finish
from qurl.quant.nvfp4 import LIFT, pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [(1, 48, 96), (17, 130, 288), (33, 64, 160), (5, 33, 64), (16, 64, 256), (64, 70, 640)]
"""M, N, K: one token, tiles that do not divide, a step that reaches beyond K, whole tiles."""
H200 = Target("NVIDIA H200", (9, 0), 132)


def operands(M: int, N: int, K: int, dtype: torch.dtype = FP32):
    draw = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*s, generator=draw) for s in ((M, K), (N, K), (N,)))
    w[0] = 0
    w[1] *= 1e-3  # its scales are subnormal numbers of FP8
    w[2] *= 1e-7  # its scales are 0
    weight = quantize(w.to(DEVICE), "nvfp4")
    # Stacked weights have different scales of the tensor.
    weight.tensor_scale[N // 2 :] *= 3
    return x.to(DEVICE, dtype), weight, bias.to(DEVICE)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_decoded_weights_have_the_bits_of_the_reference(dtype):
    _, weight, _ = operands(1, 33, 2048 + 96)
    numbers = decode(weight, dtype)
    assert torch.equal(numbers, dequantize(weight).to(dtype))
    assert numbers[1].any()
    assert not numbers[2].any()


GROUP_OF_WARPS = Plan(16, 64, 128)
SINGLE_WARPS = Plan(16, 32, 128, warps=2)
plans = pytest.mark.parametrize("plan", [GROUP_OF_WARPS, SINGLE_WARPS], ids=["group", "single"])


@plans
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_codes_times_scales_are_exact_in_16_bits(dtype, plan):
    """All codes with all scales, subnormal ones and 0 included."""
    channels = torch.arange(512)
    codes = pack(((channels + channels // 8) % 16).repeat(127, 1))  # each one at each place
    bytes = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32)
    scale = bytes.view(torch.float8_e4m3fn).bfloat16() * LIFT
    ones = torch.ones(127, 1)
    weight = Quantized(
        *(t.to(DEVICE) for t in (codes, scale)), get_format("nvfp4"), ones.to(DEVICE)
    )
    exact = dequantize(weight)
    assert len(exact.abs().unique()) > 200
    assert len(exact[-1].reshape(-1, 4, 8)[:, 2].unique()) == 15
    assert torch.equal(decode_factor(weight, dtype).float(), exact)
    # Rows of one number each: a product gives the weights back, times g.
    weight.tensor_scale[:] = torch.linspace(0.1, 3, 127, device=DEVICE)[:, None]
    x = torch.eye(512, device=DEVICE, dtype=dtype)[:64]
    product = multiply(x, weight, None, FP32, plan)
    assert torch.equal(finish(product), (exact * weight.tensor_scale).T[:64])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@plans
def test_product_against_float64(size, splits, dtype, plan):
    """No weight is rounded, in BF16 either."""
    x, weight, bias = operands(*size, dtype)
    expected = x.double() @ dequantize(weight).double().T + bias.double()
    product = multiply(x, weight, bias, FP32, replace(plan, splits=splits))
    assert isinstance(product, Partial) == (splits > 0)
    assert (finish(product) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_a_finished_product_is_rounded_once():
    x, weight, bias = operands(17, 130, 288, BF16)
    here, later = (
        finish(multiply(x, weight, bias.to(BF16), BF16, Plan(16, 64, 128, splits=n)))
        for n in (0, 1)
    )
    assert here.dtype == BF16
    assert torch.equal(here, later)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("has_bias", [False, True])
@plans
def test_gated_product(dtype, has_bias, plan):
    x, weight, bias = operands(17, 130, 288, dtype)
    y = x.double() @ dequantize(weight).double().T + has_bias * bias
    gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)
    h = multiply_gated(x, weight, bias if has_bias else None, FP32, plan)
    expected = F.silu(gate) * up
    assert (h - expected).abs().max() < 2e-5 * expected.abs().max()


@plans
def test_a_row_does_not_depend_on_the_batch(plan):
    x, weight, bias = operands(33, 64, 256, BF16)
    plan = replace(plan, splits=2)
    together = finish(multiply(x, weight, bias, BF16, plan))
    for row in (1, 20, 32):
        alone = finish(multiply(x[row : row + 1], weight, bias, BF16, plan))
        assert torch.equal(alone[0], together[row])


def test_the_library_multiplies_decoded_weights():
    x, weight, bias = operands(9, 48, 96, BF16)
    y = library_product(x, weight, bias.to(BF16), BF16)
    assert y is not None
    assert torch.equal(y, F.linear(x, dequantize(weight).to(BF16), bias.to(BF16)))


# --- codes of numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source_dtype", "columns", "dtype"),
    [
        *((source, 96, dtype) for source in (FP32, BF16) for dtype in (FP32, BF16)),
        *((FP32, 4096 + 32, BF16), (BF16, 4096 + 64, FP32)),
    ],
)
def test_codes_have_the_bits_of_the_reference(source_dtype, columns, dtype):
    """Into every other row of a buffer, whose other rows stay as they are."""
    draw = torch.Generator().manual_seed(1)
    source = torch.randn(9, columns, generator=draw) ** 3
    source[0], source[1] = 0, source[1] * 1e-6
    source[2, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)  # ties
    source = source.to(DEVICE, source_dtype)
    buffer = quantize(torch.randn(18, columns, generator=draw).to(DEVICE), "nvfp4")
    before = Quantized(*(t.clone() for t in (buffer.codes, buffer.scale)), buffer.format)
    flips = torch.zeros(9, 1, dtype=torch.int32, device=DEVICE)
    target = buffer.rows(slice(1, 18, 2))
    requantize_(source, target, flips, dtype)
    fresh = quantize(source.to(dtype), "nvfp4")
    for stored, expected in zip(target.tensors(), fresh.tensors(), strict=True):
        assert torch.equal(stored.float(), expected.float())
    changed = (before.numbers()[1::2] != fresh.numbers()).sum(1, keepdim=True)
    assert torch.equal(flips, changed.int())
    assert torch.equal(buffer.codes[::2], before.codes[::2])
    requantize_(source, target, flips, dtype)
    assert not flips.any()


# --- plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", BUCKETS)
@pytest.mark.parametrize("shape", [(1536, 1536), (37888, 3584), (3584, 18944)])
def test_rule_of_thumb_fits_the_chip(tokens, shape):
    plan = rule_of_thumb("nvfp4", tokens, *shape, num_sms=132)
    step_bytes = (2 * plan.tokens + plan.channels * 5 / 8) * plan.depth
    assert plan.stages * step_bytes <= 160 * 1024


def test_many_tokens_are_left_to_the_library_unless_sums_must_not_follow_the_batch():
    plans, fixed = Plans(H200), Plans(H200, deterministic=True)
    assert isinstance(plans.choose("nvfp4", PACKED_TOKENS, 4096, 4096), Plan)
    assert plans.choose("nvfp4", PACKED_TOKENS + 1, 4096, 4096) is None
    chosen = {fixed.choose("nvfp4", m, 1536, 8960) for m in (1, 64, 8192)}
    assert None not in chosen
    assert len({(p.channels, p.depth, p.splits) for p in chosen}) == 1
