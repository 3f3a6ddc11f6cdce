"""Row-wise kernels against torch on the CPU; without a GPU they run in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qurl.quant.formats import FORMATS, Format, Quantized, quantize_activation
from qurl.quant.kernels import rows
from qurl.quant.kernels.rows import add_norm, quantize_rows, swiglu
from qurl.quant.linear import Partial, Product, finish

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6
LONG = 8 * 4096 + 200  # columns; more than a program holds in registers

CODED = {name: format for name, format in FORMATS.items() if not format.is_weight_only}
all_formats = pytest.mark.parametrize("format", CODED.values(), ids=CODED)
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, largest: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator, dtype=torch.int32)


def make_product(
    parts: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    is_integer: bool = True,
    has_bias: bool = True,
) -> Product:
    """A product on the CPU, of numbers about 1; no parts: finished."""
    if parts == 0:
        return random(rows, columns, seed=1).to(dtype)
    bias = random(columns, seed=2).to(dtype) if has_bias else None
    if not is_integer:
        return Partial(random(parts, rows, columns, seed=1), None, None, bias, dtype)
    acc = integers(parts, rows, columns, largest=2**20, seed=1)
    scales = random(rows, 1, seed=3).abs() * 1e-3, random(columns, 1, seed=4).abs() * 1e-3
    return Partial(acc, *scales, bias, dtype)


def on_device(product: Product) -> Product:
    if isinstance(product, Tensor):
        return product.to(DEVICE)
    acc, *vectors = (
        None if t is None else t.to(DEVICE)
        for t in (product.acc, product.scale_x, product.scale_w, product.bias)
    )
    assert acc is not None
    return Partial(acc, *vectors, product.dtype)


def rms_norm64(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def silu_times_up64(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def run_add_norm(
    x: Tensor, delta: Product | None, weight: Tensor, format: Format | None, dtype: torch.dtype
) -> tuple[Tensor | Quantized, Tensor]:
    """The operand, and what x has become."""
    x = x.to(DEVICE, copy=True)
    delta = None if delta is None else on_device(delta)
    h = add_norm(x, delta, weight.to(DEVICE), EPS, format, dtype)
    return h, x.cpu()


def assert_codes(actual: Tensor | Quantized, values: Tensor, format: Format) -> None:
    """`actual` is the quantized copy of `values`, to the bit (a zero may change its sign)."""
    expected = quantize_activation(values.cpu(), format)
    assert isinstance(actual, Quantized)
    assert actual.format == format
    assert actual.codes.dtype == format.dtype
    assert actual.codes.is_contiguous()
    assert torch.equal(actual.scale.cpu(), expected.scale)
    assert torch.equal(actual.codes.cpu().float(), expected.codes.float())


def assert_same(a: Tensor | Quantized, b: Tensor | Quantized) -> None:
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        assert torch.equal(a.codes.float(), b.codes.float())
        assert torch.equal(a.scale, b.scale)
    else:
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        assert torch.equal(a, b)


@both_dtypes
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("is_integer", [True, False], ids=["int32", "float32"])
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_a_product_is_finished_to_the_bit(parts, is_integer, has_bias, dtype):
    delta = make_product(parts, 3, 173, dtype, is_integer=is_integer, has_bias=has_bias)
    x = random(3, 173)
    _, after = run_add_norm(x, delta, torch.ones(173), None, dtype)
    assert torch.equal(after, x + finish(delta).float())


@pytest.mark.parametrize("parts", [2, 4])
def test_integer_parts_give_the_same_bits_however_they_are_cut(parts):
    whole = make_product(1, 3, 130, BF16)
    assert isinstance(whole, Partial)
    acc = integers(parts, 3, 130, largest=2**24, seed=5)
    acc[-1] = whole.acc[0] - acc[:-1].sum(0)
    cut = Partial(acc, whole.scale_x, whole.scale_w, whole.bias, BF16)
    x, weight = random(3, 130), random(130, seed=6)
    for format in (None, FORMATS["int8"]):
        one, x_one = run_add_norm(x, whole, weight, format, BF16)
        other, x_other = run_add_norm(x, cut, weight, format, BF16)
        assert torch.equal(x_one, x_other)
        assert_same(one, other)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (17, 17), (1, 128), (3, 896), (2, 5120)])
def test_add_norm_is_the_float64_norm(num_rows, width):
    x, weight = random(num_rows, width) * 3, random(width, seed=1)
    delta = make_product(2, num_rows, width, BF16)
    h, after = run_add_norm(x, delta, weight, None, FP32)
    assert isinstance(h, Tensor)
    expected = rms_norm64(after, weight)
    torch.testing.assert_close(h.cpu().double(), expected, rtol=2e-6, atol=1e-7)
    rounded, _ = run_add_norm(x, delta, weight, None, BF16)
    assert isinstance(rounded, Tensor)
    assert torch.equal(rounded.cpu(), h.cpu().to(BF16))


def test_add_norm_without_delta_leaves_x_alone():
    x, weight = random(2, 70), random(70, seed=1)
    h, after = run_add_norm(x, None, weight, None, FP32)
    assert torch.equal(after, x)
    assert isinstance(h, Tensor)
    torch.testing.assert_close(h.cpu().double(), rms_norm64(x, weight), rtol=2e-6, atol=1e-7)


def test_add_norm_clears_a_vector_on_the_way():
    vector = torch.full((3,), 5.0, device=DEVICE)
    x, weight = random(3, 40).to(DEVICE), torch.ones(40, device=DEVICE)
    add_norm(x, None, weight, EPS, None, BF16, clear=vector)
    assert vector.tolist() == [0, 0, 0]


@all_formats
@pytest.mark.parametrize(("num_rows", "width"), [(1, 17), (3, 300), (2, 1000)])
def test_add_norm_quantizes_its_fp32_rows(num_rows, width, format):
    # Small integers: the sum of squares is exact, so that it does not depend on the tiles, which
    # differ between formats.
    x = integers(num_rows, width, largest=20).float()
    delta, weight = integers(num_rows, width, largest=20, seed=1).to(BF16), random(width, seed=2)
    values, _ = run_add_norm(x, delta, weight, None, FP32)
    assert isinstance(values, Tensor)
    h, _ = run_add_norm(x, delta, weight, format, BF16)
    assert_codes(h, values, format)


@both_dtypes
@all_formats
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (17, 17), (3, 130), (1, 5000)])
def test_quantize_rows_is_quantize_activation(num_rows, width, format, dtype):
    x = (random(num_rows, width) * 5).to(dtype)
    assert_codes(quantize_rows(x.to(DEVICE), format), x, format)


@pytest.mark.parametrize(("name", "dtype"), [("int8", FP32), ("fp8", BF16)])
def test_long_rows(name, dtype):
    x, gate_up = (random(1, LONG) * 5).to(dtype), make_product(1, 1, 2 * LONG, BF16)
    assert_codes(quantize_rows(x.to(DEVICE), FORMATS[name]), x, FORMATS[name])
    values = swiglu(on_device(gate_up), None, dtype)
    assert isinstance(values, Tensor)
    assert_codes(swiglu(on_device(gate_up), FORMATS[name], dtype), values, FORMATS[name])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@all_formats
def test_extreme_rows(format):
    x = random(9, 200)
    scales = [0.0, 1e30, 1e-30, 1e38 / x[3].abs().max().item(), 1e-37, 1e-39, 2.0**-126, 1.0, 448.0]
    x *= torch.tensor(scales)[:, None]
    x[7, :3] = torch.tensor([0.0, -0.0, 1e-42])
    assert_codes(quantize_rows(x.to(DEVICE), format), x, format)
    # The squares of a huge row overflow, and its norm is 0, as in torch.
    values, _ = run_add_norm(x, None, torch.full((200,), 1e-4), None, FP32)
    assert isinstance(values, Tensor)
    assert torch.equal(values[1].cpu(), torch.zeros(200))


@pytest.mark.parametrize("name", ["int8", "int6", "int4", "fp8"])
def test_ties_round_to_even(name):
    format = FORMATS[name]
    largest = format.largest
    # The largest value is the largest code, so that the scale is 1 and values are codes.
    halves = torch.arange(-largest, largest + 0.25, 0.5)
    x = torch.cat([halves, halves * 2.0**-9])[None]
    q = quantize_rows(x.to(DEVICE), format)
    assert q.scale.item() == 1
    assert_codes(q, x, format)
    if format.is_integer:
        assert torch.equal(q.codes.cpu()[0, : len(halves)].float(), halves.round())


@all_formats
@both_dtypes
def test_quantize_rows_with_a_known_maximum(format, dtype):
    x = (random(3, 1300) * 5).to(dtype)
    amax = x.float().abs().amax(-1)
    q = quantize_rows(x.to(DEVICE), format, amax.to(DEVICE))
    assert_codes(q, x, format)


@both_dtypes
@pytest.mark.parametrize("is_integer", [True, False], ids=["int32", "float32"])
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_swiglu_is_the_float64_one(parts, is_integer, dtype):
    gate_up = make_product(parts, 3, 2 * 1300, dtype, is_integer=is_integer)
    h = swiglu(on_device(gate_up), None, FP32)
    assert isinstance(h, Tensor)
    expected = silu_times_up64(finish(gate_up))
    torch.testing.assert_close(h.cpu().double(), expected, rtol=2e-6, atol=1e-12)
    rounded = swiglu(on_device(gate_up), None, dtype)
    assert isinstance(rounded, Tensor)
    assert torch.equal(rounded.cpu(), h.cpu().to(dtype))


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("format", [None, *CODED.values()], ids=["none", *CODED])
def test_swiglu_of_alternating_channels_is_the_same(format, parts):
    halves = make_product(parts, 2, 2 * 700, BF16)

    def alternate(t: Tensor, dim: int) -> Tensor:
        return torch.stack(t.chunk(2, dim), dim + 1).flatten(dim, dim + 1)

    if isinstance(halves, Partial):
        assert halves.scale_w is not None
        assert halves.bias is not None
        pairs: Product = Partial(
            alternate(halves.acc, 2),
            halves.scale_x,
            alternate(halves.scale_w, 0),
            alternate(halves.bias, 0),
            BF16,
        )
    else:
        pairs = alternate(halves, 1)
    expected = swiglu(on_device(halves), format, BF16)
    assert_same(swiglu(on_device(pairs), format, BF16, True), expected)


@both_dtypes
@all_formats
@pytest.mark.parametrize(("num_rows", "width"), [(1, 17), (5, 130), (1, 9000)])
def test_swiglu_quantizes_rows_rounded_to_the_compute_dtype(num_rows, width, format, dtype):
    gate_up = on_device(make_product(1, num_rows, 2 * width, BF16))
    values = swiglu(gate_up, None, dtype)
    assert isinstance(values, Tensor)
    assert values.dtype == dtype
    assert_codes(swiglu(gate_up, format, dtype), values, format)


def test_rows_that_are_read_twice_give_the_same_codes(monkeypatch):
    gate_up = on_device(make_product(2, 1, 2 * 9000, BF16))
    kept = swiglu(gate_up, FORMATS["int8"], BF16)
    monkeypatch.setattr(rows, "_MAX_TILES_IN_PARTS", 0)
    assert_same(swiglu(gate_up, FORMATS["int8"], BF16), kept)


@pytest.mark.parametrize("format", [None, *CODED.values()], ids=["none", *CODED])
def test_a_row_does_not_depend_on_the_others(format):
    x, weight = random(5, 260), random(260, seed=7)
    delta, gate_up = make_product(2, 5, 260, BF16), make_product(2, 5, 520, BF16)
    assert isinstance(delta, Partial)
    assert isinstance(gate_up, Partial)

    def take(p: Partial, r: slice) -> Partial:
        assert p.scale_x is not None
        return Partial(p.acc[:, r].contiguous(), p.scale_x[r], p.scale_w, p.bias, p.dtype)

    def take_operand(h: Tensor | Quantized, r: slice) -> Tensor | Quantized:
        return h[r] if isinstance(h, Tensor) else Quantized(h.codes[r], h.scale[r], h.format)

    all_h, all_x = run_add_norm(x, delta, weight, format, BF16)
    all_y = swiglu(on_device(gate_up), format, BF16)
    for r in (slice(0, 1), slice(3, 5)):
        h, x_after = run_add_norm(x[r], take(delta, r), weight, format, BF16)
        assert torch.equal(x_after, all_x[r])
        assert_same(h, take_operand(all_h, r))
        y = swiglu(on_device(take(gate_up, r)), format, BF16)
        assert_same(y, take_operand(all_y, r))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", [None, *CODED.values()], ids=["none", *CODED])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(format, bad):
    x, weight = random(3, 200), torch.ones(200)
    broken = x.clone()
    broken[1, 150] = bad

    def results(rows: Tensor) -> list[Tensor | Quantized]:
        normed, _ = run_add_norm(rows, None, weight, format, FP32)
        gate_up = torch.cat([rows.abs(), rows], -1).to(DEVICE)
        gated = swiglu(gate_up, format, FP32)
        plain = [] if format is None else [quantize_rows(rows.to(DEVICE), format)]
        return [normed, gated, *plain]

    for good, result in zip(results(x), results(broken), strict=True):
        good, result = (
            (h.codes.float() * h.scale.repeat_interleave(format.block or 200, -1)[:, :200]).cpu()
            if format is not None and isinstance(h, Quantized)
            else h
            for h in (good, result)
        )
        assert isinstance(good, Tensor)
        assert isinstance(result, Tensor)
        assert torch.equal(result[[0, 2]], good[[0, 2]])
        # The product that follows sums over the row, so one number that is not finite is enough.
        assert not torch.isfinite(result[1]).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@all_formats
def test_millions_of_divisions_round_as_ieee_asks(format):
    # The interpreter divides in one operation; a GPU multiplies by a reciprocal and corrects.
    x = random(400, 16384) * torch.logspace(-37, 37, 400, base=10)[:, None]
    x = torch.where(torch.rand(x.shape) < 0.5, x, x * 2.0 ** -torch.randint(0, 20, x.shape))
    assert_codes(quantize_rows(x.to(DEVICE), format), x, format)
