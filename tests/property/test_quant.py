"""Properties of the quantizers, for any finite weight."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl.quant.formats import (
    FORMATS,
    Quantized,
    dequantize,
    expand_scale,
    get_format,
    quantize,
    quantize_activation,
)
from qurl.quant.linear import linear, matmul_codes
from qurl.quant.tracking import UpdateTracker, watched_rows

CODED = [name for name, format in FORMATS.items() if not format.is_weight_only]
FORMAT = st.sampled_from(sorted(CODED))
INTEGER = st.sampled_from(["int8", "int6", "int4"])
SEED = st.integers(0, 2**32 - 1)
EXPONENT = st.integers(-20, 20)

quick = settings(max_examples=60, deadline=None)


@st.composite
def weights(draw, largest=160, dtype=torch.float32):
    """Gaussian, heavy-tailed, constant or sparse rows of very different sizes."""
    rows, columns = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    generator = torch.Generator().manual_seed(draw(SEED))
    x = torch.randn(rows, columns, generator=generator, dtype=dtype)
    kind = draw(st.sampled_from(["normal", "heavy", "constant", "sparse"]))
    if kind == "heavy":
        x = x**3
    elif kind == "constant":
        x = torch.ones_like(x)
    elif kind == "sparse":
        x = x * (torch.rand(rows, columns, generator=generator) < 0.1)
    sizes = torch.randint(-20, 20, (rows, 1), generator=generator)
    return x * torch.ldexp(torch.ones(rows, 1, dtype=dtype), sizes)


@quick
@given(weights(dtype=torch.float64), INTEGER)
def test_an_integer_code_is_at_most_half_a_step_away(x, name):
    q = quantize(x, name)
    assert ((dequantize(q) - x).abs() <= q.scale / 2 * (1 + 1e-12)).all()


@quick
@given(weights(dtype=torch.float64), st.sampled_from(["fp8", "fp8-block"]))
def test_an_fp8_code_is_within_its_mantissa(x, name):
    # 2^-4 relative where the code is normal (at least 2^-6), half of 2^-9 steps below.
    q = quantize(x, name)
    bound = (2**-4 * x.abs()).maximum(2**-10 * expand_scale(q))
    assert ((dequantize(q) - x).abs() <= bound * (1 + 1e-6)).all()


@quick
@given(weights(), FORMAT)
def test_codes_stay_within_their_range_and_reach_it(x, name):
    q = quantize(x, name)
    codes = q.codes.float()
    assert codes.abs().max() <= q.format.largest
    if q.format.block is None:
        is_zero = (x == 0).all(-1)
        assert (codes.abs().amax(-1) == torch.where(is_zero, 0.0, q.format.largest)).all()
        assert (q.scale[is_zero] == 1).all()


@quick
@given(weights(), FORMAT)
def test_signs_are_kept_and_coding_is_odd(x, name):
    q, mirrored = quantize(x, name), quantize(-x, name)
    assert (q.codes.float() * x >= 0).all()
    assert torch.equal(mirrored.codes.float(), -q.codes.float())
    assert torch.equal(mirrored.scale, q.scale)


@quick
@given(weights(), FORMAT, EXPONENT)
def test_powers_of_two_move_the_scale_and_no_code(x, name, exponent):
    q, moved = quantize(x, name), quantize(x * 2.0**exponent, name)
    assert torch.equal(moved.codes.float(), q.codes.float())
    assert torch.equal(dequantize(moved), dequantize(q) * 2.0**exponent)


@quick
@given(weights(), FORMAT)
def test_coding_again_changes_no_code(x, name):
    q = quantize(x, name)
    again = quantize(dequantize(q), name)
    assert torch.equal(again.codes.float(), q.codes.float())
    assert torch.allclose(again.scale, q.scale, rtol=3e-7, atol=0)


@quick
@given(weights(), st.sampled_from(["int8", "fp8", "int4"]))
def test_rows_are_coded_one_by_one(x, name):
    q, alone = quantize(x, name), quantize(x[-1:], name)
    assert torch.equal(alone.codes.float(), q.codes[-1:].float())


@quick
@given(weights(dtype=torch.float64), FORMAT)
def test_activations_obey_the_bounds_of_weights(x, name):
    q = quantize_activation(x, get_format(name))
    step = expand_scale(q)
    bound = step / 2 if q.format.is_integer else (2**-4 * x.abs()).maximum(2**-10 * step)
    assert ((dequantize(q) - x).abs() <= bound * (1 + 1e-6)).all()


@quick
@given(INTEGER, st.integers(1, 6), st.integers(1, 6), st.integers(1, 2500), SEED)
def test_integer_products_are_exact(name, m, n, k, seed):
    format = get_format(name)
    generator = torch.Generator().manual_seed(seed)

    def codes(rows):
        # The upper half of the range: sums near the bound of FP32.
        ends = format.largest // 2, format.largest + 1
        values = torch.randint(*ends, (rows, k), generator=generator)
        return Quantized(values.to(torch.int8), torch.ones(rows, 1), format)

    x, w = codes(m), codes(n)
    assert torch.equal(matmul_codes(x, w), (x.codes.long() @ w.codes.long().T).float())


@quick
@given(weights(largest=80), FORMAT, EXPONENT, SEED)
def test_a_linear_layer_keeps_its_output_under_uaq(weight, name, exponent, seed):
    s = 2.0**exponent
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(seed))
    plain, scaled = quantize(weight, name), quantize(weight / s, name)
    assert torch.equal(linear(x * s, scaled), linear(x, plain))


@quick
@given(st.integers(1, 3000), st.integers(1, 600), FORMAT)
def test_watched_rows_are_sorted_distinct_and_enough(num_rows, wanted, name):
    rows = watched_rows(num_rows, wanted, get_format(name))
    assert torch.equal(rows, rows.unique())
    assert rows[0] == 0
    assert rows[-1] < num_rows
    unit = get_format(name).block or 1
    assert min(num_rows, wanted) - unit < len(rows) < wanted + unit


@quick
@given(weights(largest=40), FORMAT, st.floats(1e-6, 10), SEED)
def test_visibility_ratios_lie_in_their_ranges(weight, name, lr, seed):
    model = torch.nn.Module()
    model.q_proj = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    model.q_proj.weight.data = weight.clone()
    tracker = UpdateTracker(name, rows=8)
    tracker.measure(model)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    model.q_proj.weight.data += lr * noise
    measured = tracker.measure(model)
    assert 0 <= measured["uaq/code_flip_frac"] <= 1
    assert -1 - 1e-9 <= measured["uaq/update_cosine"] <= 1 + 1e-9
    assert 0 <= measured["uaq/quant_error"] < 0.2
    assert measured["uaq/update_norm"] == measured["uaq/update_norm/attn_in"] >= 0


@quick
@given(weights(dtype=torch.float64), EXPONENT)
def test_nvfp4_is_within_half_a_step_of_what_its_scales_span(x, exponent):
    """E2M1 has a mantissa of one bit: a quarter of the number, or a quarter below 1. A scale is
    rounded by up to 1/16, which may cut the largest of a group, and 2^-10 below 2^-6."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 32))
    q = quantize(x, "nvfp4")
    step, error = expand_scale(q), (dequantize(q) - x).abs()
    coarse = 6 * 2**-10 * q.tensor_scale  # of a scale in FP8's subnormal range
    assert (error <= (x.abs() / 4).maximum(step / 4) + coarse + 1e-12).all()
    assert (dequantize(q) * x >= 0).all()
    moved = quantize(x * 2.0**exponent, "nvfp4")
    assert torch.equal(moved.codes, q.codes)
    assert torch.equal(dequantize(moved), dequantize(q) * 2.0**exponent)
    assert torch.equal(dequantize(quantize(-x, "nvfp4")), -dequantize(q))
