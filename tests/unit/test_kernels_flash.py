"""`flash.attend` and its gradients against float64. On a CPU Triton's interpreter runs the kernels.

Shapes: N tokens of B sequences, H query heads, K key heads, D head_dim.
"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from qurl.ops.flash import (
    PLANS,
    Inputs,
    Plan,
    Spans,
    Tiles,
    attend,
    forward,
    key_gradients,
    plan_for,
    query_gradients,
    supports,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16] if HAS_GPU else [torch.bfloat16, torch.float32]
SIZES = ((32, 16), (16, 32), (32, 16))
"""Tiles so small that short sequences have all kinds of them."""
SMALL = Plan(*(Tiles(q, k, warps=4, stages=2) for q, k in SIZES))
FETCHING = Plan(*(Tiles(q, k, warps=4, stages=2, copies=True) for q, k in SIZES))
"""With the copy engine, where there is one; the interpreter emulates it."""


def make(lengths, heads=(2, 1), size=16, *, dtype=DTYPES[-1], window=None, seed=0):
    """q, k, v, the gradient of the output, and the spans."""
    generator = torch.Generator().manual_seed(seed)
    (num_heads, kv_heads), num_tokens = heads, sum(lengths)
    shapes = [(num_tokens, h, size) for h in (num_heads, kv_heads, kv_heads, num_heads)]
    tensors = [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    return *tensors, Spans(bounds, max(lengths), window)


def reference(q, k, v, d_out, spans, scale):
    """Output and the gradients of q, k and v, by autograd in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group, outs = q.shape[1] // k.shape[1], []
    for start, end in pairwise(spans.bounds.tolist()):
        q_, k_, v_ = (x[start:end].transpose(0, 1) for x in leaves)
        k_, v_ = (x.repeat_interleave(group, 0) for x in (k_, v_))
        scores = scale * q_ @ k_.transpose(1, 2)
        ones = torch.ones_like(scores, dtype=torch.bool)
        is_seen = ones.tril() if spans.window is None else ones.tril().triu(1 - spans.window)
        outs.append((scores.where(is_seen, -torch.inf).softmax(-1) @ v_).transpose(0, 1))
    out = torch.cat(outs)
    out.backward(d_out.double())
    return [out.detach(), *(x.grad for x in leaves)]


def compute(q, k, v, d_out, spans, scale, plan):
    """The same by the kernels."""
    inputs = Inputs(q, k, v, spans, scale)
    out, lse = forward(inputs, plan.forward)
    dq, delta = query_gradients(inputs, out, lse, d_out, plan.query_gradients)
    dk, dv = key_gradients(inputs, lse, delta, d_out, plan.key_gradients)
    return [out, dq, dk, dv]


def check(found, expected):
    """To the rounding of FP32, or to that of p and ds, in the norm.

    A query with a single key has no gradient but rounding, which the other gradients measure.
    """
    size = 0.1 * max(x.norm() for x in expected)
    for name, ours, exact in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[ours.dtype]
        error = (ours.double() - exact).norm() / max(exact.norm(), size)
        assert error < limit, f"{name} is off by {error:.1e}"


def test_two_tokens_by_hand():
    """Scores of the second query are 0 and log 3, so p = (1/4, 3/4) and o = (1 + 3 * 5) / 4 = 4.

    With do = 1: dv = p, ds = p (v - o) = (-3/4, 3/4), dq = sum ds k = 3/4 log 3, dk = ds q.
    """
    q, k, v, d_out = torch.zeros(4, 2, 1, 16, device=DEVICE, dtype=DTYPES[-1]).unbind()
    q[:, 0, 0] = 1
    k[1, 0, 0] = math.log(3)
    v[:, 0, 0] = torch.tensor([1.0, 5.0])
    d_out[1, 0, 0] = 1
    spans = Spans(torch.tensor([0, 2], dtype=torch.int32, device=DEVICE), 2)
    found = [x[:, 0, 0].cpu().double() for x in compute(q, k, v, d_out, spans, 1.0, SMALL)]
    expected = [[1, 4], [0, 0.75 * math.log(3)], [-0.75, 0.75], [0.25, 0.75]]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.tensor(exact).double(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((1, 1), DTYPES[0]), ((1, 1), DTYPES[1]), ((4, 2), DTYPES[0]), ((3, 1), DTYPES[1])],
    ids=str,
)
def test_against_float64(heads, dtype):
    """Lengths of one token, around the edges of tiles, and of several tiles."""
    case = make((1, 17, 36), heads, dtype=dtype)
    check(compute(*case, 0.3, SMALL), reference(*case, 0.3))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("generation", ["hopper", "ampere"])
def test_plans(generation, size):
    """The hopper plans fetch whole tiles by descriptor."""
    case, plan = make((150, 5, 129), (2, 1), size, dtype=torch.bfloat16), PLANS[generation, size]
    if HAS_GPU and plan != plan_for(case[0]):
        pytest.skip("made for another GPU")
    check(compute(*case, 0.1, plan), reference(*case, 0.1))


@pytest.mark.parametrize(
    ("window", "plan"),
    [*((window, SMALL) for window in (1, 2, 16, 40, 1000)), (16, FETCHING), (40, FETCHING)],
)
def test_windows(window, plan):
    """A tile that is fetched is masked by the same code."""
    case = make((65, 3), window=window)
    check(compute(*case, 0.25, plan), reference(*case, 0.25))


def test_autograd_and_the_default_scale():
    case = make((20, 40), (4, 2), 64)
    leaves = [x.requires_grad_() for x in case[:3]]
    out = attend(*leaves, case[4])
    out.backward(case[3])
    check([out, *(x.grad for x in leaves)], reference(*case, 1 / 8))


@pytest.mark.parametrize("plan", [SMALL, FETCHING])
def test_tokens_may_lie_apart(plan):
    """Queries, keys and values as slices of one product."""
    q, k, v, d_out, spans = make((20, 33), (2, 1))
    parts = torch.cat([q, k, v], 1).split([2, 1, 1], 1)
    assert not any(x.is_contiguous() for x in parts)
    found = compute(*parts, d_out, spans, 0.3, plan)
    for ours, plain in zip(found, compute(q, k, v, d_out, spans, 0.3, plan), strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, plain)


def test_heads_that_lie_apart_are_copied():
    q, k, v, _, spans = make((20, 40), (4, 2), 64)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(attend(*turned, spans), attend(q, k, v, spans))
    wide = [x.repeat_interleave(2, 2)[..., ::2] for x in (q, k, v)]
    assert torch.equal(attend(*wide, spans), attend(q, k, v, spans))


@pytest.mark.parametrize("plan", [SMALL, FETCHING])
@pytest.mark.parametrize("window", [None, 20])
def test_a_sequence_depends_on_itself_alone(window, plan):
    """To the bit, whatever its neighbours are and however long; even NaN stays with its owner."""
    lengths = (18, 50, 7)
    *tensors, spans = make(lengths, window=window)
    alone = Spans(torch.tensor([0, 50], dtype=torch.int32, device=DEVICE), 50, window)
    middle = compute(*(x[18:68].clone() for x in tensors), alone, 0.3, plan)
    spans = replace(spans, longest=90)
    for x in tensors:
        x[:18] = x[68:] = math.nan
    for packed, single in zip(compute(*tensors, spans, 0.3, plan), middle, strict=True):
        assert torch.equal(packed[18:68], single)
        assert packed[:18].isnan().all()
        assert packed[68:].isnan().all()


def test_the_output_of_a_prefix_is_a_prefix_of_the_output():
    """A prompt scored in training equals its prefill: on a GPU to the bit.

    In the interpreter numpy multiplies, and on some CPUs its sums depend on a row's place in the
    tile. Only 28 of 60 rows keep their places, since tiles of 32 queries count from the end.
    """
    q, k, v, _, spans = make((60,))
    whole, _ = forward(Inputs(q, k, v, spans, 0.3), SMALL.forward)
    for length in (1, 16, 28, 37, 59):
        part = Spans(torch.tensor([0, length], dtype=torch.int32, device=DEVICE), length)
        inputs = Inputs(q[:length], k[:length], v[:length], part, 0.3)
        out, _ = forward(inputs, SMALL.forward)
        if HAS_GPU or length == 28:
            assert torch.equal(out, whole[:length])
        torch.testing.assert_close(out, whole[:length], rtol=0, atol=1e-6)


def test_large_scores_and_nan():
    """Scores of several hundreds leave one key; NaN in a query reaches its own row alone."""
    case = make((70,), (1, 1))
    case[0].mul_(100)
    check(compute(*case, 1.0, SMALL)[:1] * 4, [reference(*case, 1.0)[0]] * 4)
    case[0][40, 0, 3] = math.nan
    out = compute(*case, 1.0, SMALL)[0]
    assert out.isnan().any(-1).flatten().nonzero().flatten().tolist() == [40]


def test_what_is_supported():
    """Other sizes, such as 80 and 96, and FP32 are torch's."""
    sizes = [size for size in range(8, 300) if supports(torch.empty(1, 1, size).bfloat16())]
    assert sizes == [64, 128]
    assert supports(torch.empty(1, 1, 64).half())
    assert not supports(torch.empty(1, 1, 64))
    for size in (8, 80, 96, 256):
        with pytest.raises(AssertionError, match="not implemented"):
            compute(*make((3,), size=size), 1.0, SMALL)
