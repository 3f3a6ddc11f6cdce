"""Products of a layer and their gradients, in numbers and in codes, against float64.

On a CPU Triton's interpreter runs the kernels.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

pytest.importorskip("triton")

from qurl.ops.coding import code_columns, code_gradient, transpose_codes
from qurl.ops.gate import gate_gradients
from qurl.quant.coded_linear import CodedLinear
from qurl.quant.formats import dequantize, get_format, quantize, quantize_activation
from qurl.quant.kernels.product import empty_codes
from qurl.quant.kernels.rows import dequantize_rows, quantize_rows
from qurl.trainer.lora import Adapter, find_adapter
from qurl.trainer.projection import Projection

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = ("int8", "fp8", "fp8-block")
ROUNDING = {"int8": 0.5 / 127, "fp8": 2**-4, "fp8-block": 2**-4}
"""Largest error of a code, as a share of the largest number under its scale."""


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def projection(sizes=(48, 16, 16), inputs=80, *, bias=True):
    torch.manual_seed(0)
    linears = [nn.Linear(inputs, size, bias=bias, device=DEVICE) for size in sizes]
    return Projection(linears)


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def stacked(found, name):
    parameters = [getattr(linear, name) for linear in found.linears]
    return torch.cat(parameters), torch.cat([p.grad for p in parameters])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers(bias, dtype):
    found = projection(bias=bias)
    x, dy = normal(33, 80, dtype=dtype), normal(33, 80, dtype=dtype, seed=1)
    y, dx = found.multiply(x, dtype), found.input_gradient(dy)
    for _ in range(2):
        found.add_gradients_(dy, x)

    weight, grad = stacked(found, "weight")
    w = weight.detach().to(dtype).double()
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    expected = x.double() @ w.T
    if bias:
        expected += stacked(found, "bias")[0].detach().double()
        assert relative(stacked(found, "bias")[1], 2 * dy.double().sum(0)) < 1e-5
    assert relative(y, expected) < bound
    assert relative(dx, dy.double() @ w) < bound
    assert relative(grad, 2 * dy.double().T @ x.double()) < 1e-5  # sums are FP32 in BF16 too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_base_in_codes_with_adapters_beside_it(dtype):
    """y = x W_hat^T + b + s (x A^T) B^T; only A and B get gradients."""
    plain, coded = projection(inputs=96), []
    for index, linear in enumerate(plain.linears):
        layer = CodedLinear(linear, get_format("nvfp4"), DEVICE)
        layer.adapter = Adapter(linear.weight, 4, 6, torch.Generator().manual_seed(index))
        nn.init.normal_(layer.adapter.B, std=0.1)
        coded.append(layer)
    found = Projection(coded)
    x, dy = normal(33, 96, dtype=dtype), normal(33, 80, dtype=dtype, seed=1)
    y, dx = found.multiply(x, dtype), found.input_gradient(dy)
    found.add_gradients_(dy, x)
    w = torch.cat([layer.weight.detach() for layer in coded]).double()
    bias = torch.cat([linear.bias.detach() for linear in plain.linears]).double()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative(y, x.double() @ w.T + bias) < bound
    assert relative(dx, dy.double() @ w) < bound
    for layer, part in zip(coded, dy.split(found.sizes, -1), strict=True):
        assert torch.equal(layer.factor(dtype).float(), layer.factor(torch.float32)), "exact"
        adapter, total = layer.adapter, part.double().T @ x.double()
        assert (
            relative(adapter.B.grad, adapter.scale * total @ adapter.A.detach().double().T) < bound
        )
        assert (
            relative(adapter.A.grad, adapter.scale * adapter.B.detach().double().T @ total) < bound
        )
        adapter.is_on = False
    base = torch.cat([dequantize(layer.base) for layer in coded]).double()
    assert relative(found.multiply(x, dtype), x.double() @ base.T + bias) < bound
    assert not found._copies.get(("weight", dtype)), "decoded weights are not kept"


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_multiplied_as_the_engine_does(format):
    found, fmt = projection(inputs=300), get_format(format)
    found.format, found.code_dtype = fmt, torch.bfloat16
    x = normal(20, 300)
    y = found.multiply(quantize_rows(x, fmt), torch.bfloat16)
    weight = stacked_weight(found)
    exact = dequantize(quantize_activation(x, fmt)).double() @ dequantize(weight).double().T
    exact += torch.cat([linear.bias.detach() for linear in found.linears]).bfloat16().double()
    assert relative(y, exact) < 3e-3


def stacked_weight(found):
    masters = torch.cat([linear.weight.detach() for linear in found.linears])
    return quantize(masters.bfloat16(), found.format)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_go_straight_through_the_codes(format):
    found, fmt = projection(inputs=300), get_format(format)
    found.format, found.code_dtype = fmt, torch.bfloat16
    x, dy = quantize_rows(normal(20, 300), fmt), normal(20, 80, seed=1)
    dx = found.input_gradient(dy)
    found.add_gradients_(dy, x)
    assert relative(dx, dy.double() @ dequantize(stacked_weight(found)).double()) < 6e-3
    assert relative(stacked(found, "weight")[1], dy.double().T @ dequantize(x).double()) < 6e-3


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 37])
def test_input_gradients_of_codes(format, rows):
    found, fmt = projection(inputs=144), get_format(format)
    found.format, found.code_dtype, found.backward = fmt, torch.bfloat16, "dgrad"
    with torch.no_grad():
        found.linears[1].weight[3] = 0  # its scale of 1 must not dwarf the others
    dy = normal(rows, 80, seed=1)
    exact = dy.double() @ dequantize(stacked_weight(found)).double()
    error = relative(found.input_gradient(dy), exact)
    assert 1e-4 < error < ROUNDING[format] * 3


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 37, 130])
def test_weight_gradients_of_codes(format, rows):
    found, fmt = projection(inputs=144), get_format(format)
    found.format, found.code_dtype, found.backward = fmt, torch.bfloat16, "all"
    x, dy = normal(rows, 144) * normal(rows, 1, seed=2), normal(rows, 80, seed=1)
    if rows > 1:
        x[3], dy[3] = 0, 1e4  # its scale of 1 must not dwarf the others
    x = quantize_rows(x, fmt)
    for _ in range(2):
        found.add_gradients_(dy, x)
    exact = 2 * dy.double().T @ dequantize(x).double()
    assert relative(stacked(found, "weight")[1], exact) < ROUNDING[format] * 3
    assert relative(stacked(found, "bias")[1], 2 * dy.double().sum(0)) < 1e-5


def test_adapters_get_their_gradients_also_if_all_products_are_of_codes():
    fmt, grads = get_format("int8"), []
    x, dy = quantize_rows(normal(20, 80), fmt), normal(20, 80, seed=1)
    for backward in ("bf16", "all"):
        found = projection(bias=False)
        found.format, found.backward = fmt, backward
        for seed, linear in enumerate(found.linears):
            draw = torch.Generator().manual_seed(seed)
            adapter = Adapter(linear.weight.detach(), 4, 8, draw)
            nn.init.normal_(adapter.B)
            parametrize.register_parametrization(linear, "weight", adapter, unsafe=True)
        found.add_gradients_(dy, x)
        adapters = [find_adapter(linear) for linear in found.linears]
        grads.append([factor.grad for a in adapters for factor in (a.A, a.B)])
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert all(grad.norm() > 0 for grad in grads[0])


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 1), (37, 150), (1100, 70)])
def test_codes_of_columns(format, shape):
    fmt, g = get_format(format), normal(*shape)
    token_scale = normal(shape[0], dtype=torch.float32, seed=1).abs() + 0.1
    length = shape[0] + 5
    codes = torch.empty(shape[1], length, dtype=fmt.dtype, device=DEVICE)
    scale = torch.empty(shape[1], 1, device=DEVICE)
    code_columns(g, token_scale, codes, scale, fmt.largest)
    expected = quantize_activation((g.float() * token_scale[:, None]).T.contiguous(), fmt)
    assert torch.equal(scale, expected.scale)
    gap = (codes[:, : shape[0]].float() - expected.codes.float()).abs()
    assert (gap <= (1 if fmt.is_integer else 32)).all()
    assert (gap > 0).double().mean() < 0.01
    assert not codes[:, shape[0] :].float().any()
    transposed = torch.empty(shape[0], shape[1] + 3, dtype=fmt.dtype, device=DEVICE)
    expected.codes[0] = 0
    assert transpose_codes(expected.codes, transposed).tolist() == [
        row > 0 for row in range(shape[1])
    ]
    assert torch.equal(transposed[:, : shape[1]].float(), expected.codes.T.float())
    assert not transposed[:, shape[1] :].float().any()


def test_a_copy_follows_its_own_weights():
    found = projection()
    x = normal(3, 80)
    before = found.multiply(x, torch.bfloat16)
    twin = copy.deepcopy(found)
    with torch.no_grad():
        twin.linears[0].weight.zero_()
    assert torch.equal(found.multiply(x, torch.bfloat16), before)
    assert not torch.equal(twin.multiply(x, torch.bfloat16), before)


def test_gradients_begin_anew_when_cleared():
    found, x, dy = projection(), normal(9, 80), normal(9, 80, seed=1)
    results = []
    for _ in range(2):
        found.add_gradients_(dy, x)
        results.append(stacked(found, "weight")[1])
        for linear in found.linears:
            linear.zero_grad(set_to_none=True)
    assert torch.equal(*results)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 2048), (4, 5000)])
def test_codes_of_a_gradient(format, shape):
    fmt, g = get_format(format), normal(*shape)
    channel_scale = normal(shape[1], dtype=torch.float32, seed=1).abs() + 0.1
    codes = torch.empty(shape, dtype=fmt.dtype, device=DEVICE)
    scale = torch.empty(shape[0], 1, device=DEVICE)
    code_gradient(g, channel_scale, codes, scale, fmt.largest)
    folded = g.float() * channel_scale
    expected = quantize_activation(folded, fmt)
    assert torch.equal(scale, expected.scale)
    gap = (codes.float() - expected.codes.float()).abs()  # ties may fall the other way
    assert (gap <= (1 if fmt.is_integer else 32)).all()
    assert (gap > 0).double().mean() < 0.01


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_stay_so_in_codes(format, bad):
    """An integer cannot be NaN, so its scale must be."""
    fmt, g = get_format(format), normal(4, 40)
    g[1, 3], g[2] = bad, bad
    by_token, by_channel = (empty_codes(n, m, fmt, DEVICE) for n, m in ((4, 40), (40, 4)))
    ones = torch.ones(40, device=DEVICE)
    code_gradient(g, ones, by_token.codes, by_token.scale, fmt.largest)
    code_columns(g[:2].contiguous(), ones[:2], by_channel.codes, by_channel.scale, fmt.largest)
    is_sound = dequantize(by_token).isfinite().all(1)
    assert is_sound.tolist() == [True, False, False, True]
    is_sound = dequantize(by_channel)[:, :2].isfinite().all(1)
    assert is_sound.tolist() == [channel != 3 for channel in range(40)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [33, 2100])
def test_gradients_of_a_gate_whose_result_is_coded(format, width):
    fmt, dy = get_format(format), normal(3, width)
    gate_up = 2 * normal(3, 2 * width, seed=1)
    gate, up = gate_up.float().chunk(2, -1)
    h = quantize_activation((F.silu(gate) * up).bfloat16(), fmt)
    d_gate_up, y = gate_gradients(dy, gate_up, y_scale=h.scale, is_integer=fmt.is_integer)
    assert torch.equal(d_gate_up, gate_gradients(dy, gate_up)[0])
    assert relative(y, dequantize(h)) < 5e-3


def alternate(x):
    """Channels of two halves in turn."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).contiguous()


def test_gates_may_alternate_with_ups():
    dy, gate_up = normal(3, 2100), 2 * normal(3, 4200, seed=1)
    plain = gate_gradients(dy, gate_up)
    in_turn = gate_gradients(dy, alternate(gate_up), is_alternating=True)
    assert all(map(torch.equal, plain, in_turn))


@pytest.mark.parametrize("shape", [(5, 66), (3, 4200)])
def test_codes_of_a_gradient_may_alternate(shape):
    g, channel_scale = normal(*shape), normal(shape[1], dtype=torch.float32, seed=1).abs()
    results = []
    for scale, parts in ((channel_scale, 1), (alternate(channel_scale), 2)):
        codes = torch.empty(shape, dtype=torch.int8, device=DEVICE)
        row_scale = torch.empty(shape[0], 1, device=DEVICE)
        code_gradient(g, scale, codes, row_scale, 127.0, parts)
        results.append((codes, row_scale))
    (codes, row_scale), (codes_again, row_scale_again) = results
    assert torch.equal(alternate(codes), codes_again)
    assert torch.equal(row_scale, row_scale_again)


@pytest.mark.parametrize(("backward", "bias"), [("bf16", True), ("dgrad", False)])
def test_codes_in_the_buffer_of_an_engine(backward, bias):
    plain, fmt = projection((48, 48), 144, bias=bias), get_format("int8")
    plain.format, plain.code_dtype, plain.backward = fmt, torch.bfloat16, backward
    shared = copy.deepcopy(plain)
    buffer = quantize(torch.zeros(96, 144, device=DEVICE), fmt)
    shared.adopt_(buffer, is_alternating=True)
    x, dy = quantize_rows(normal(20, 144), fmt), normal(20, 96, seed=1)
    order = torch.arange(96).view(2, 48).T.flatten()

    y = plain.multiply(x, torch.bfloat16)
    assert torch.equal(shared.multiply(x, torch.bfloat16), y[:, order])
    assert torch.equal(buffer.codes, plain.codes().codes[order])
    assert shared.codes().codes.data_ptr() == buffer.codes.data_ptr()
    dx = plain.input_gradient(dy)
    assert relative(shared.input_gradient(dy), dx) < 1e-3
    plain.add_gradients_(dy, x)
    shared.add_gradients_(dy, x)
    assert torch.equal(stacked(plain, "weight")[1], stacked(shared, "weight")[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (2, 4500)])
def test_dequantized_rows(format, shape):
    coded = quantize_activation(normal(*shape, dtype=torch.float32), get_format(format))
    found = dequantize_rows(coded, torch.bfloat16)
    assert torch.equal(found, dequantize(coded).bfloat16())


@pytest.mark.parametrize("is_stacked", [True, False])
def test_bf16_masters_are_multiplied_without_a_copy(is_stacked):
    """If they lie next to each other; their gradients are FP32."""
    found = projection(bias=False)
    stack = torch.cat([linear.weight.detach().bfloat16() for linear in found.linears])
    for linear, part in zip(found.linears, stack.split(found.sizes), strict=True):
        linear.weight.data = part if is_stacked else part.clone()
        linear.weight.grad_dtype = torch.float32
    x, dy = normal(33, 80), normal(33, 80, seed=1)
    weight = found.weight(torch.bfloat16)
    assert torch.equal(weight, stack)
    assert (weight.data_ptr() == stack.data_ptr()) == is_stacked
    assert relative(found.multiply(x, torch.bfloat16), x.double() @ stack.double().T) < 4e-3
    assert relative(found.input_gradient(dy), dy.double() @ stack.double()) < 4e-3
    for _ in range(2):
        found.add_gradients_(dy, x)
    _, grad = stacked(found, "weight")
    assert grad.dtype == torch.float32
    assert relative(grad, 2 * dy.double().T @ x.double()) < 1e-5
    with torch.no_grad():
        found.linears[1].weight.zero_()
    assert found.weight(torch.bfloat16)[48:64].count_nonzero() == 0
