"""The kernel that quantizes weights in place gives the bits of `quantize`, and counts changes.

Without a GPU it runs in Triton's interpreter. The reference is computed on the CPU.
"""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from qurl.quant import Quantized, get_format, quantize
from qurl.quant.kernels.requantize import LONGEST_IN_REGISTERS, requantize_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = ["int8", "fp8", "int6", "int4", "fp8-block"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 17), (5, 130), (7, 896), (2, 4864)]


def random_weight(rows, columns, dtype=torch.float32, seed=0):
    """Rows of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(rows, 1, generator=draw) - 3)
    return (sizes * torch.randn(rows, columns, generator=draw)).to(dtype)


def bits(codes):
    return codes.cpu().view(torch.uint8)


def target_like(reference: Quantized) -> Quantized:
    """Buffers of the same shape on the device, holding something else."""
    codes = torch.full(reference.codes.shape, 3.0).to(reference.codes.dtype)
    scale = torch.full_like(reference.scale, 7.0)
    return Quantized(codes.to(DEVICE), scale.to(DEVICE), reference.format)


def requantize(source, target, dtype=torch.float32):
    """Number of codes that changed."""
    flips = torch.full(target.scale.shape, -1, dtype=torch.int32, device=DEVICE)
    requantize_(source.to(DEVICE), target, flips, dtype)
    assert (flips >= 0).all()
    return int(flips.sum())


def check(source, format, dtype=torch.float32):
    expected = quantize(source.to(dtype), format)
    target = target_like(expected)
    flips = requantize(source, target, dtype)
    assert torch.equal(target.scale.cpu(), expected.scale)
    assert torch.equal(bits(target.codes), bits(expected.codes))
    assert flips == int((expected.codes.float() != 3).sum())


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bits_of_quantize(rows, columns, dtype, format):
    check(random_weight(rows, columns, dtype), format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_quantize_in_tiles(dtype):
    check(random_weight(1, 1, dtype), "fp8-block")
    check(random_weight(5, 130, dtype), "fp8-block")


def test_bits_of_quantize_in_rows_of_tiles():
    check(random_weight(130, 257), "fp8-block")


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_too_long_for_registers(dtype, format):
    check(random_weight(2, LONGEST_IN_REGISTERS + 5, dtype), format)


@pytest.mark.parametrize(
    ("format", "columns"),
    [*((format, 130) for format in FORMATS), ("int8", LONGEST_IN_REGISTERS + 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_the_trainer_rounds_is_rounded_first(columns, dtype, format):
    source = random_weight(2, columns, dtype)
    rounded = quantize(source.bfloat16(), format)
    assert not torch.equal(bits(rounded.codes), bits(quantize(source, format).codes))
    check(source, format, torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_rows(format):
    smallest = torch.finfo(torch.float32).smallest_normal
    one_row = random_weight(1, 40)
    rows = [
        torch.zeros(1, 40),
        -torch.zeros(1, 40),
        one_row / one_row.abs().max() * torch.finfo(torch.float32).max,
        one_row / one_row.abs().max() * 1e-30,
        one_row / one_row.abs().max() * 600 * smallest,  # scales just above the smallest normal one
        one_row / one_row.abs().max() * 5 * smallest,  # below it: counts as zero
        one_row / one_row.abs().max() * 100 * 2.0**-149,
        torch.tensor([[1.0] + 39 * [1e-45]]),
        torch.tensor([[1.0] + 39 * [-1e-45]]),
    ]
    for row in rows:
        check(row, format)
    if get_format(format).block is None:
        check(torch.cat(rows), format)


def code_boundaries(format):
    """Numbers between two codes, in units of the scale."""
    format = get_format(format)
    if format.is_integer:
        return torch.arange(-format.largest + 0.5, format.largest, dtype=torch.float64)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = (codes[1:] + codes[:-1]) / 2
    return torch.cat((-middles, middles))


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_values_at_the_boundary_between_two_codes(format):
    """One unit in the last place decides the code, so nothing but the rounded quotient will do."""
    largest = get_format(format).largest
    sizes = torch.tensor([1.0, 0.3, 7.7e-3, 1.9e10, 3.3e-31, 2.2e-36])
    rows = []
    for amax in sizes:
        scale = quantize(amax.view(1, 1), format).scale.double()
        middle = (code_boundaries(format) * scale.squeeze()).float()
        beside = (
            torch.nextafter(middle, torch.tensor(math.copysign(math.inf, d))) for d in (1, -1)
        )
        rows.append(torch.cat((amax.view(1), middle, *beside)))
    source = torch.stack(rows)
    assert quantize(source, format).codes.float().unique().numel() > largest / 4
    check(source, format)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_scale(value, format):
    source = random_weight(3, 200)
    source[1, 150] = value
    expected = quantize(source, format)
    target = target_like(expected)
    requantize(source, target)
    is_finite = expected.scale.isfinite()
    assert not is_finite.all()
    assert torch.equal(target.scale.cpu().isfinite(), is_finite)
    assert torch.equal(target.scale.cpu()[is_finite], expected.scale[is_finite])


@pytest.mark.parametrize("format", FORMATS)
def test_flips_are_counted_under_each_scale(format):
    has_tiles = get_format(format).block is not None
    rows, last = (140, 135) if has_tiles else (5, 4)
    old = torch.randn(rows, 200, generator=torch.Generator().manual_seed(0))
    old[3, 5] = old[last, 190] = 2.0
    new = old.clone()
    new[3, 5] = new[last, 190] = -2.0
    target = target_like(quantize(old, format))
    requantize(old, target)
    flips = torch.zeros(target.scale.shape, dtype=torch.int32, device=DEVICE)
    requantize_(new.to(DEVICE), target, flips)
    expected = torch.zeros(target.scale.shape, dtype=torch.int32)
    for place in [(0, 0), (1, 1)] if has_tiles else [(3, 0), (last, 0)]:
        expected[place] = 1
    assert torch.equal(flips.cpu(), expected)
    assert requantize(new, target) == 0


@pytest.mark.parametrize("format", ["fp8", "fp8-block"])
def test_a_zero_that_changes_its_sign_is_stored_but_no_flip(format):
    source = torch.tensor([[1.0, 0.0, -0.0, -1e-9]])
    target = target_like(quantize(source, format))
    requantize(source, target)
    assert bits(target.codes).tolist() == [[0x7E, 0x00, 0x80, 0x80]]
    source[0, 1:] *= -1
    assert requantize(source, target) == 0
    assert bits(target.codes).tolist() == [[0x7E, 0x80, 0x00, 0x00]]


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_rows_of_the_target_may_alternate_with_others(format):
    source = random_weight(5, 130)
    expected = quantize(source, format)
    both = target_like(quantize(random_weight(10, 130), format))
    kept = both.codes.clone(), both.scale.clone()
    every_other = Quantized(both.codes[1::2], both.scale[1::2], both.format)
    requantize(source, every_other)
    assert torch.equal(bits(both.codes[1::2]), bits(expected.codes))
    assert torch.equal(both.scale[1::2].cpu(), expected.scale)
    assert torch.equal(bits(both.codes[0::2]), bits(kept[0][0::2]))
    assert torch.equal(both.scale[0::2], kept[1][0::2])


# --- the division -----------------------------------------------------------------------------


def fma(a, b, c):
    """a * b + c in FP32, rounded once: the exact product plus c, rounded to odd, then to FP32."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even, odd, total).astype(np.float32)


def hard_quotients(num_divisors):
    """x and s whose quotient nearly is the middle m / 2^25 between two FP32 numbers.

    With 24 bits each, x 2^k = m s + d for a small d and an odd m of 25 bits, so that m is -d / s
    modulo 2^k.
    """
    draw = np.random.default_rng(0)
    pairs = []
    for s in (2**23 + 2 * draw.integers(0, 2**22, num_divisors) + 1).tolist():
        for k in (24, 25):
            inverse = pow(s, -1, 2**k)
            for d in (d for d in range(-12, 13) if d):
                for m in range(-d * inverse % 2**k, 2**25, 2**k):
                    x = (m * s + d) >> k
                    if m % 2 and m >= 2**24 and 2**23 <= x < 2**24 and (x >= s) == (k == 24):
                        pairs.append((x, s))
    return np.array(pairs, dtype=np.float32).T


# Quotients are 2^e / 2 to 2^e * 2, from the smallest code of FP8 to the largest.
@pytest.mark.parametrize(
    ("divisor_exponent", "quotient_exponent"),
    [(-126, -10), (-126, 8), (-61, -10), (-60, -10), (-60, 8), (0, -10), (0, 0), (0, 8), (118, 8)],
)
def test_one_correction_gives_the_rounded_quotient(divisor_exponent, quotient_exponent):
    """The formula of `rounding.divide`, which the interpreter cannot compute."""
    x, s = hard_quotients(num_divisors=2000)
    assert len(x) > 5000
    s = np.ldexp(s, divisor_exponent - 23)
    x = np.ldexp(x, divisor_exponent + quotient_exponent - 23)
    assert s.dtype == x.dtype == np.float32
    lift = np.where(s < 2.0**-60, 2.0**64, 1.0).astype(np.float32)
    inverse = np.float32(1) / s
    q = x * inverse
    assert (q != x / s).any()
    excess = fma(q, s * lift, -x * lift)
    assert (fma(excess, -inverse / lift, q) == x / s).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1536, 3584, 8960, 18944, 29568, 40960])
def test_real_sizes(columns, dtype, format):
    check(random_weight(300, columns, dtype), format)
