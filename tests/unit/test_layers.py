"""Fused norms and MLPs against torch in FP64. On a CPU Triton's interpreter runs the kernels."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import tiny_llama
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qurl.layers import FusedMLP, FusedRMSNorm, decoder_layers, fuse_layers_

rms_norm = pytest.importorskip("qurl.kernels.rms_norm")
rotation = pytest.importorskip("qurl.kernels.rotation")
gate_kernels = pytest.importorskip("qurl.kernels.gate")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_near(found, expected, dtype):
    """Each number, to the rounding of its dtype; sums of many may cancel."""
    gap = (found.double() - expected).abs()
    assert (gap <= BOUNDS[dtype] * (expected.abs() + expected.square().mean().sqrt())).all()


def exact_norm(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("rows", "hidden"), [(1, 3), (17, 33), (7, 896), (3, 5000), (255, 64)])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("y_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_and_its_gradients(monkeypatch, rows, hidden, x_dtype, y_dtype):
    monkeypatch.setattr(rms_norm, "PROGRAMS", 2)  # each goes through many tiles
    x, weight = normal(rows, hidden, dtype=x_dtype) * 3, normal(hidden, seed=1)
    upstream = normal(rows, hidden, dtype=y_dtype, seed=2)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    expected = exact_norm(*leaves, eps=1e-3)
    expected.backward(upstream.double())

    y, inverse = rms_norm.normalize(x, weight, 1e-3, y_dtype)
    dx, dweight = rms_norm.gradients(upstream, x, weight, inverse)

    assert (y.dtype, dx.dtype, dweight.dtype) == (y_dtype, x_dtype, torch.float32)
    assert_near(y, expected.detach(), y_dtype)
    assert_near(dx, leaves[0].grad, x_dtype)
    assert_near(dweight, leaves[1].grad, torch.float32)


@pytest.mark.parametrize("size", [0.0, 1e-15, 1e15])
def test_norm_of_rows_of_any_size(size):
    x, weight = normal(4, 40) * size, normal(40, seed=1)
    y, _ = rms_norm.normalize(x, weight, 1e-6, torch.float32)
    assert_near(y, exact_norm(x.double(), weight.double(), 1e-6), torch.float32)


def test_norm_gradient_is_the_same_twice():
    x, weight, upstream = normal(700, 48), normal(48, seed=1), normal(700, 48, seed=2)
    _, inverse = rms_norm.normalize(x, weight, 1e-6, torch.float32)
    first, second = (rms_norm.gradients(upstream, x, weight, inverse) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (2, 3, 1000), (5, 4864)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_its_gradients(shape, dtype):
    gate, up, upstream = (normal(*shape, dtype=dtype, seed=seed) * 4 for seed in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    expected = F.silu(leaves[0]) * leaves[1]
    expected.backward(upstream.double())

    y = gate_kernels.gate_values(gate, up)
    dgate, dup = gate_kernels.gate_gradients(upstream, gate, up)

    assert y.dtype == dgate.dtype == dup.dtype == dtype
    for found, exact in ((y, expected.detach()), (dgate, leaves[0].grad), (dup, leaves[1].grad)):
        assert_near(found, exact, dtype)


def test_gate_far_from_zero():
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 1e4], device=DEVICE)
    up = torch.full_like(gate, 2.0)
    dgate, dup = gate_kernels.gate_gradients(torch.ones_like(gate), gate, up)
    assert_near(gate_kernels.gate_values(gate, up), 2.0 * F.silu(gate.double()), torch.float32)
    assert_near(dup, F.silu(gate.double()), torch.float32)
    assert dgate.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1, 2), (17, 3, 20), (255, 14, 64), (3, 2, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_and_its_gradient(shape, dtype):
    x, upstream = (normal(*shape, dtype=dtype, seed=seed) for seed in range(2))
    cos, sin = (normal(shape[0], shape[2], seed=seed) for seed in (2, 3))  # any will do
    leaf = x.double().requires_grad_()
    first, second = leaf.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    expected = leaf * cos.double()[:, None] + turned * sin.double()[:, None]
    expected.backward(upstream.double())

    y = rotation.rotate(x, cos, sin, dtype)
    dx = rotation.rotate(upstream, cos, sin, dtype, is_gradient=True)

    assert y.dtype == dx.dtype == dtype
    assert_near(y, expected.detach(), dtype)
    assert_near(dx, leaf.grad, dtype)


def qwen2():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def perturbed(model):
    """With norms that are not all ones."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(DEVICE)


@pytest.mark.parametrize(("make", "per_layer"), [(tiny_llama, 4), (qwen2, 4), (qwen3, 6)])
def test_fused_model_has_the_same_names_states_and_gradients(make, per_layer):
    model = perturbed(make())
    fused = copy.deepcopy(model)
    assert fuse_layers_(fused) == per_layer * len(decoder_layers(fused))
    assert list(fused.state_dict()) == list(model.state_dict())
    assert isinstance(fused.model.layers[0].input_layernorm, FusedRMSNorm)
    assert not isinstance(fused.model.norm, FusedRMSNorm)
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    results = []
    for m in (model, copy.deepcopy(fused)):
        logits = m(input_ids=ids).logits
        logits.sin().sum().backward()
        results.append([logits, *(p.grad for p in m.parameters())])
    for found, expected in zip(*reversed(results), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_fused_attention_goes_on_from_a_cache():
    model = perturbed(tiny_llama())
    fused = copy.deepcopy(model)
    fuse_layers_(fused)
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    with torch.no_grad():
        before = fused(input_ids=ids[:, :4], use_cache=True)
        found = fused(input_ids=ids[:, 4:], past_key_values=before.past_key_values).logits
        expected = model(input_ids=ids).logits[:, 4:]
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_under_autocast_the_model_computes_what_it_did():
    model = perturbed(qwen3())
    fused = copy.deepcopy(model)
    fuse_layers_(fused)
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    gaps = []
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        for m in (model, fused):
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                gaps.append(float((m(input_ids=ids).logits - exact).norm() / exact.norm()))
    assert 0 < gaps[1] < 2 * gaps[0]


def test_under_autocast_a_norm_returns_what_products_want():
    model = perturbed(tiny_llama())
    norm = FusedRMSNorm(model.model.layers[0].input_layernorm.weight, 1e-6)
    x = normal(2, 3, len(norm.weight)).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = norm(x)
    y.backward(torch.ones_like(y))
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert norm.weight.grad.dtype == torch.float32


def test_what_computes_something_else_stays():
    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(Gemma2Config(**SHAPE)).to(DEVICE)  # 1 + weight, GELU
    assert fuse_layers_(gemma) == 0
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)).to(DEVICE)
    assert fuse_layers_(gpt) == 0
    assert fuse_layers_(nn.Linear(2, 2)) == 0
    mlp = tiny_llama().model.layers[0].mlp
    assert fuse_layers_(nn.ModuleList([nn.ModuleDict({"mlp": mlp})]).to(DEVICE)) == 1
    mlp.act_fn = nn.GELU()
    assert fuse_layers_(nn.ModuleList([nn.ModuleDict({"mlp": mlp})]).to(DEVICE)) == 0
    assert not isinstance(mlp, FusedMLP)
