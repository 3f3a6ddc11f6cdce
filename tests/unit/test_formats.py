"""The quantizers against codes worked by hand and their stated error bounds."""

import pytest
import torch

from qurl.quant import nvfp4
from qurl.quant.formats import (
    FORMATS,
    dequantize,
    expand_scale,
    get_format,
    quantize,
    quantize_activation,
)

INT8 = get_format("int8")
FP8 = get_format("fp8")
BLOCK = get_format("fp8-block")
CODED = [name for name, format in FORMATS.items() if not format.is_weight_only]
"""Formats of weights and activations alike."""


def _normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_int8_rounds_ties_to_even():
    # max|x| = 127, so a = 1 and the codes are the rounded values.
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 126.5, -126.5]])
    q = quantize(x, "int8")
    assert q.scale.item() == 1.0
    assert q.codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0, 126, -126]]


def test_int8_has_one_scale_per_output_channel():
    # Row 0: a = 2/127, codes x * 63.5; 1 -> 63.5 is a tie and goes to 64.
    # Row 1: a = 0.5/127, codes x * 254.
    x = torch.tensor([[1.0, -2.0, 0.25], [0.5, -0.125, 0.0]], dtype=torch.float64)
    q = quantize(x, "int8")
    assert q.scale.shape == (2, 1)
    assert q.scale.flatten().tolist() == [2 / 127, 0.5 / 127]
    assert q.codes.tolist() == [[64, -127, 16], [127, -32, 0]]
    assert q.codes.dtype == torch.int8
    assert dequantize(q)[0].tolist() == pytest.approx([64 * 2 / 127, -2.0, 16 * 2 / 127])


@pytest.mark.parametrize("name", ["int8", "int6", "int4"])
def test_the_most_negative_code_is_never_used(name):
    largest = int(FORMATS[name].largest)
    x = torch.cat([-_normal(64, 33).abs(), _normal(64, 33, seed=1)])
    codes = quantize(x, name).codes
    assert codes.min() == -largest
    assert codes.max() == largest


@pytest.mark.parametrize(("name", "largest"), [("int6", 31), ("int4", 7)])
def test_coarse_formats_have_fewer_levels_of_weights_and_activations(name, largest):
    q = quantize(torch.tensor([[1.0, -0.5, 2.5 / largest, 0.4 / largest]]) * largest, name)
    assert q.codes.tolist() == [[largest, -(largest + 1) // 2, 2, 0]]
    assert quantize_activation(torch.tensor([[2.0 * largest, 3.2]]), q.format).codes.tolist() == [
        [largest, 2]
    ]


@pytest.mark.parametrize("name", CODED)
def test_zero_rows_have_scale_one_and_codes_zero(name):
    x = torch.zeros(4, 16)
    for q in (quantize(x, name), quantize_activation(x, get_format(name))):
        assert (q.scale == 1).all()
        assert (q.codes.float() == 0).all()
        assert torch.equal(dequantize(q), x)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_row_too_small_for_a_normal_scale_counts_as_zero(name):
    x = torch.tensor([[1e-40, -1e-40], [1.0, -0.5]])
    q = quantize(x, name)
    assert q.scale[0].item() == 1.0
    assert (q.codes[0].float() == 0).all()
    assert q.codes[1].float().abs().max() == q.format.largest


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-5, 1e5, 1e30])
def test_tiny_and_huge_rows_code_like_ordinary_ones(name, magnitude):
    x = _normal(8, 64) * magnitude
    q = quantize(x, name)
    error = (dequantize(q).double() - x.double()).norm() / x.double().norm()
    assert torch.isfinite(q.scale.float()).all()
    fine = {"int8": 0.01, "fp8": 0.04, "fp8-block": 0.04, "int6": 0.04}
    assert error < fine.get(name, 0.15)


@pytest.mark.parametrize("name", CODED)
def test_scales_are_fp32_except_of_float64(name):
    x = _normal(4, 32)
    assert quantize(x, name).scale.dtype == torch.float32
    assert quantize(x.bfloat16(), name).scale.dtype == torch.float32
    assert quantize(x.half(), name).scale.dtype == torch.float32
    assert quantize(x.double(), name).scale.dtype == torch.float64
    assert dequantize(quantize(x.double(), name)).dtype == torch.float64


@pytest.mark.parametrize("name", FORMATS)
def test_bf16_weights_are_coded_as_their_fp32_values(name):
    x = _normal(40, 224, dtype=torch.bfloat16)
    low, full = quantize(x, name), quantize(x.float(), name)
    assert torch.equal(low.codes.float(), full.codes.float())
    assert torch.equal(low.scale.float(), full.scale.float())


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 300)])
def test_int8_error_is_at_most_half_a_step(shape):
    x = _normal(*shape, dtype=torch.float64)
    q = quantize(x, "int8")
    assert ((dequantize(q) - x).abs() <= q.scale / 2 * (1 + 1e-12)).all()


def test_fp8_codes_by_hand():
    # max|x| = 448, so a = 1. Between 256 and 448 codes are 32 apart, between 16 and 32 they are
    # 2 apart, below 2^-6 they are 2^-9 apart: 272 and 17 are ties.
    x = torch.tensor([[448.0, -448.0, 272.0, 304.0, 17.0, 19.0, 18.5, 2**-9, 2**-10, 3 * 2**-10]])
    codes = quantize(x, "fp8").codes.float()
    assert codes.tolist() == [[448, -448, 256, 320, 16, 20, 18, 2**-9, 0, 2**-8]]


def test_fp8_saturates_and_never_codes_nan():
    # a = max|x| / 448 rounds, so that x / a may land a little above 448; E4M3 has no infinity.
    x = _normal(4096, 3, seed=3) * 10
    codes = quantize(x, "fp8").codes.float()
    assert torch.isfinite(codes).all()
    assert (codes.abs().amax(-1) == 448).all()


@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_fp8_relative_error_in_the_normal_range(name):
    x = _normal(256, 256, dtype=torch.float64)
    q = quantize(x, name)
    step = expand_scale(q).expand_as(x)
    error, size = (dequantize(q) - x).abs(), x.abs()
    is_normal = size >= 2**-6 * step
    assert is_normal.double().mean() > 0.99
    assert (error[is_normal] <= 2**-4 * size[is_normal] * (1 + 1e-9)).all()
    assert (error[~is_normal] <= 2**-10 * step[~is_normal] * (1 + 1e-9)).all()
    # The bound is that of the format, not a loose one.
    assert (error / size).max() > 0.9 * 2**-4


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 128), (127, 129)])
def test_block_scales_are_those_of_the_tiles(shape):
    rows, columns = shape
    x = _normal(*shape, seed=rows) * torch.arange(1, columns + 1)
    q = quantize(x, "fp8-block")
    assert q.codes.shape == shape
    assert q.scale.shape == (-(-rows // 128), -(-columns // 128))
    for i in range(q.scale.shape[0]):
        for k in range(q.scale.shape[1]):
            window = (slice(128 * i, 128 * (i + 1)), slice(128 * k, 128 * (k + 1)))
            scale = x[window].abs().max() / 448
            assert q.scale[i, k] == scale
            expected = (x[window] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(q.codes[window].float(), expected.float())


def test_constant_tiles_are_exact():
    x = torch.zeros(256, 256)
    x[:128, 128:] = 3.0
    x[128:, :128] = -0.7
    q = quantize(x, "fp8-block")
    assert q.scale.flatten().tolist() == pytest.approx([1.0, 3.0 / 448, 0.7 / 448, 1.0])
    assert q.codes.float()[:128, 128:].unique().tolist() == [448]
    assert q.codes.float()[128:, :128].unique().tolist() == [-448]
    assert torch.allclose(dequantize(q), x, rtol=2e-7, atol=0)


@pytest.mark.parametrize("columns", [128, 200, 5])
def test_block_activations_have_a_scale_per_token_and_group(columns):
    x = _normal(2, 3, columns)
    q = quantize_activation(x, BLOCK)
    groups = -(-columns // 128)
    assert q.codes.shape == x.shape
    assert q.scale.shape == (2, 3, groups)
    for k in range(groups):
        part = x[..., 128 * k : 128 * (k + 1)]
        assert torch.equal(q.scale[..., k], part.abs().amax(-1) / 448)
    assert ((dequantize(q) - x).abs() <= 2**-4 * x.abs() + 2**-10 * expand_scale(q)).all()


@pytest.mark.parametrize("format", [INT8, FP8])
def test_activations_have_a_scale_per_token(format):
    x = _normal(2, 3, 40)
    q = quantize_activation(x, format)
    assert torch.equal(q.scale, x.abs().amax(-1, keepdim=True) / format.largest)
    alone = quantize_activation(x[1, 2:], format)
    assert torch.equal(alone.codes.float(), q.codes[1, 2:].float())


def test_num_bytes_counts_codes_and_scales():
    assert quantize(_normal(6, 10), "int8").num_bytes == 6 * 10 + 4 * 6
    assert quantize(_normal(130, 10), "fp8-block").num_bytes == 130 * 10 + 4 * 2


def test_an_unknown_format_is_named():
    with pytest.raises(
        ValueError, match=r"'int5' is not one of int8, fp8, fp8-block, int6, int4, nvfp4"
    ):
        quantize(torch.zeros(2, 2), "int5")


# --- NVFP4 ------------------------------------------------------------------------------------


def test_e2m1_rounds_ties_to_even():
    # Below and above each tie, and the tie: 0.25 goes to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to
    # 2, 3.5 to 4, 5 to 4. What lies beyond 6 becomes 6.
    below = torch.tensor([0.24, 0.74, 1.24, 1.74, 2.4, 3.4, 4.9, 5.9])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    above = torch.tensor([0.26, 0.76, 1.26, 1.76, 2.6, 3.6, 5.1, 7.0])
    numbers = torch.tensor(nvfp4.NUMBERS)
    for sign in (1, -1):
        codes = nvfp4.round_e2m1(sign * torch.stack((below, ties, above))).long()
        assert ((codes >= 8) == ((sign < 0) & (codes & 7 > 0))).all()
        assert numbers[codes & 7].tolist() == [
            [0, 0.5, 1, 1.5, 2, 3, 4, 6],
            [0, 1, 1, 2, 2, 4, 4, 6],
            [0.5, 1, 1.5, 2, 3, 4, 6, 6],
        ]


def test_nvfp4_by_hand():
    # max|W| = 6 * 448 makes g = 1. The second group has max 12, so a = 2: 1 is a half and becomes
    # 0.5, 2.5 is 1.25 and becomes 1, -3.5 is -1.75 and becomes -2. The third has max 6 * 17, and 17
    # is a tie between the FP8 numbers 16 and 18: a = 16, so 102 / 16 = 6.375 is cut to 6.
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 1] = 6 * 448, -448
    x[0, 16:20] = torch.tensor([12.0, 1.0, 2.5, -3.5])
    x[1, 0], x[1, 11] = 102.0, -8.0
    q = quantize(x, "nvfp4")
    assert q.tensor_scale.tolist() == [[1.0], [1.0]]
    assert (q.scale.float() / nvfp4.LIFT).tolist() == [[448, 2], [16, 0]]
    assert (q.codes.shape, q.codes.dtype) == ((2, 16), torch.uint8)
    # 6 is 7 and -0.5 is 9. Channel 0 is in the first word, at bits 6 to 8. Channel 11 is 8 + 3 and
    # so in the second word, at bits 9 to 11 of its upper half, with its sign at bit 18 + 16 - 32.
    assert q.codes[1].view(torch.int32).tolist() == [7 << 6, 1 << 9 + 16 | 1 << 2, 0, 0]
    expected = x.clone()
    expected[0, 18:20] = torch.tensor([2.0, -4.0])
    expected[1, 0] = 96
    assert torch.equal(dequantize(q), expected)


def test_nvfp4_has_one_scale_for_the_tensor_and_one_for_sixteen_channels():
    x = _normal(24, 64) * torch.logspace(-3, 0, 24)[:, None]
    q = quantize(x, "nvfp4")
    assert torch.equal(q.tensor_scale, (x.abs().max() / 2688).expand(24, 1))
    expected = (x.unflatten(1, (-1, 16)).abs().amax(-1) / (6 * q.tensor_scale)).to(
        torch.float8_e4m3fn
    )
    assert torch.equal(q.scale.float() / nvfp4.LIFT, expected.float())
    given = quantize(x[3:5], "nvfp4", scale=q.tensor_scale[3:5])
    assert torch.equal(given.codes, q.codes[3:5])
    assert torch.equal(given.scale.float(), q.scale[3:5].float())


def test_nvfp4_of_zeros_is_zero():
    q = quantize(torch.zeros(4, 32), "nvfp4")
    assert (q.tensor_scale == 1).all()
    assert not dequantize(q).any()
    # A group far below the largest weight has a scale that FP8 rounds to 0.
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-7
    assert dequantize(quantize(x, "nvfp4")).tolist() == [[1.0] * 16 + [0.0] * 16]


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 640])
def test_nvfp4_packs_every_code_and_finds_it_again(columns):
    channels = torch.arange(columns)
    codes = (channels + channels // 8) % 16
    packed = nvfp4.pack(codes.repeat(3, 1))
    assert packed.shape == (3, columns // 2)
    numbers = torch.tensor((*nvfp4.NUMBERS, *(-n for n in nvfp4.NUMBERS)))[codes]
    assert torch.equal(nvfp4.unpack(packed), numbers.repeat(3, 1))


def test_nvfp4_takes_five_bits():
    q = quantize(_normal(64, 512), "nvfp4")
    assert q.num_bytes == 64 * 512 * 5 / 8 + 64 * 4
    assert q.format.weight_bytes == 5 / 8
    assert q.shape == (64, 512)


def test_nvfp4_refuses_rows_that_its_words_do_not_divide():
    with pytest.raises(ValueError, match=r"32 input channels together, and a weight has 40; use"):
        quantize(_normal(2, 40), "nvfp4")


def test_a_given_scale_is_kept_and_clamps_what_has_grown():
    x = _normal(6, 32)
    q = quantize(x, "int8")
    grown = quantize(1.5 * x, "int8", scale=q.scale)
    assert torch.equal(grown.scale, q.scale)
    expected = (1.5 * x / q.scale).round().clamp(-127, 127)
    assert torch.equal(grown.codes.float(), expected)
    assert (grown.codes.abs().amax(1) == 127).all()
    assert torch.equal(quantize(x, "int8", scale=q.scale).codes, q.codes)
