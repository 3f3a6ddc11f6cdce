"""`flash.attend` and its gradients against float64. On a CPU Triton's interpreter runs the kernels.

Shapes: N tokens of B sequences, H query heads, K key heads, D head_dim.
"""

from itertools import pairwise

import pytest
import torch

from qurl.ops.flash import Plan, Spans, Tiles, attend, forward, gradients, supports

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16] if HAS_GPU else [torch.bfloat16, torch.float32]
SMALL = Plan(*(Tiles(q, k, warps=4, stages=2) for q, k in ((32, 16), (16, 32), (32, 16))))
"""Tiles so small that short sequences have all kinds of them."""


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
    out, lse = forward(q, k, v, spans, scale, plan)
    return [out, *gradients(q, k, v, out, lse, d_out, spans, scale, plan)]


def check(found, expected):
    """To the rounding of FP32, or to that of p and ds, in the norm.

    A query with a single key has no gradient but rounding, which the other gradients measure.
    """
    size = 1e-3 * max(x.norm() for x in expected)
    for name, ours, exact in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[ours.dtype]
        error = (ours.double() - exact).norm() / max(exact.norm(), size)
        assert error < limit, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1)])
def test_against_float64(heads, dtype):
    """Lengths of one token, around the edges of tiles, and of several tiles."""
    case = make((1, 16, 17, 31, 2, 70), heads, dtype=dtype)
    check(compute(*case, 0.3, SMALL), reference(*case, 0.3))


@pytest.mark.parametrize("window", [1, 2, 16, 40, 1000])
def test_windows(window):
    case = make((70, 3, 49), window=window)
    check(compute(*case, 0.25, SMALL), reference(*case, 0.25))
