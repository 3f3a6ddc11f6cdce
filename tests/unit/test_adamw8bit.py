"""AdamW with 8-bit moments: codes by hand, the kernel against torch, and torch against AdamW."""

import copy

import pytest
import torch
from models import tiny_llama
from torch import nn

from qurl.config import OptimConfig
from qurl.trainer.adamw8bit import AdamW8bit, _is_cut, find_coded
from qurl.trainer.moments import (
    BLOCK,
    Update,
    decode_m,
    decode_v,
    encode_m,
    encode_v,
    make_moments,
    make_noise,
    scramble,
    update_,
)
from qurl.trainer.optimizer import apply_gradients, build_optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = {"betas": (0.9, 0.999), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
NO_NOISE = torch.zeros(1, 1, dtype=torch.int64)


def heavy_tailed(*shape, seed=0):
    """Four orders of magnitude within a block, and a few exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    spread = torch.exp(1.5 * torch.randn(*shape, generator=generator))
    return x * spread * 1e-4 * (torch.rand(*shape, generator=generator) > 0.02)


def block(*values):
    """[1, 256], zeros after the values."""
    x = torch.zeros(1, BLOCK)
    x[0, : len(values)] = torch.tensor(values)
    return x


def test_codes_of_m_by_hand():
    """Eight codes per octave below the largest, 1: 1/2 is 8 below it, 1/2 + 1/16 is 7 below.

    2^-15 is 120 below. 127 below is code 0, which is the number 0, and so is whatever is smaller.
    """
    x = block(1.0, -1.0, 0.5, 0.5625, 2.0**-15, -(2.0**-16), 1e-9)
    codes, top = encode_m(x, NO_NOISE)
    assert codes[0, :8].tolist() == [127, -127, 119, 120, 7, 0, 0, 0]
    assert top.tolist() == [127 * 8]
    found = decode_m(codes, top)[0, :8].tolist()
    assert found == [1.0, -1.0, 0.5, 0.5625, 2.0**-15, 0.0, 0.0, 0.0]


def test_codes_of_v_by_hand():
    """The same over twice the range; the smallest code is 255 = 32 * 8 - 1 below: 2^-32 * 1.125."""
    x = block(4.0, 2.0, 2.5, 4 * 2.0**-31, 1e-20, 0.0)
    codes, top = encode_v(x, NO_NOISE)
    assert codes[0, :6].tolist() == [255, 247, 249, 7, 0, 0]
    smallest = 4 * 2.0**-32 * 1.125
    found = decode_v(codes, top)[0, :6].tolist()
    assert found == [4.0, 2.0, 2.5, 4 * 2.0**-31, smallest, smallest]


def test_a_block_of_zeros_stays_zero():
    for encode, decode in ((encode_m, decode_m), (encode_v, decode_v)):
        codes, top = encode(torch.zeros(2, BLOCK), make_noise(2 * BLOCK, 5).view(2, BLOCK))
        assert decode(codes, top).count_nonzero() == 0


def test_noise_makes_the_expectation_exact():
    """1.03 lies between the codes 1 and 1.125, so about 24 % of 100,000 are rounded up."""
    x = torch.full((400, BLOCK), 1.03)
    x[:, 0] = 1.5  # so that all blocks have the same top
    noise = make_noise(x.numel(), seed=scramble(1) >> 1).view(x.shape)
    for encode, decode in ((encode_m, decode_m), (encode_v, decode_v)):
        found = decode(*encode(x, noise))[:, 1:]
        assert sorted(found.unique().tolist()) == [1.0, 1.125]
        error = 0.125 * (0.24 * 0.76 / found.numel()) ** 0.5
        assert float(found.double().mean()) == pytest.approx(1.03, abs=4 * error)


def test_the_hash_is_murmurs():
    """Known values of the 32-bit finalizer of MurmurHash3, on numbers and on tensors."""
    assert [scramble(x) for x in (0, 1, 2)] == [0, 0x514E28B7, 0x30F4C306]
    words = torch.tensor([0, 1, 2, 2**32 - 1])
    assert scramble(words).tolist() == [scramble(int(x)) for x in words]


def test_a_v_that_is_lost_does_not_blow_up_the_update():
    """A number whose v is far below the block's largest moves less than it would, not more."""
    weight, gradient = torch.zeros(1, 2 * BLOCK), torch.full((1, 2 * BLOCK), 1e-12)
    gradient[0, 0] = 1.0
    moments = make_moments(weight, is_coded=True)
    group = GROUP | {"weight_decay": 0.0, "eps": 1e-30}
    for step in range(1, 20):
        before = weight.clone()
        update_(weight, gradient, **moments, update=Update.of(group, step, 1.0))
        moved = (before - weight) / GROUP["lr"]
        assert moved.abs().max() < 1.5
        if step > 1:  # nothing is lost before it is stored
            assert moved[0, 1:BLOCK].abs().max() < 1e-3
    assert -weight[0, 0] / GROUP["lr"] == pytest.approx(19, rel=0.1)
    others = -weight[0, BLOCK:].mean() / GROUP["lr"]
    assert others == pytest.approx(19, rel=0.02), "the second block has tops of its own"


@pytest.mark.parametrize("shape", [(16, 256), (3, 1000), (17, 333), (5,)])
@pytest.mark.parametrize("is_coded", [True, False], ids=["8bit", "fp32"])
@pytest.mark.parametrize("first", [0, 768, 2**32 - 256])
def test_the_kernel_computes_what_torch_does(shape, is_coded, first):
    pytest.importorskip("triton")
    from qurl.trainer.kernels.adamw8bit import update_ as launch

    weight = heavy_tailed(*shape, seed=9)
    moments = make_moments(weight, is_coded=is_coded)
    ours = [t.to(DEVICE, copy=True) for t in (weight, *moments.values())]
    for step in range(1, 4):
        gradient = heavy_tailed(*shape, seed=step)
        before, update = weight.clone(), Update.of(GROUP, step, 0.7, first)
        update_(weight, gradient, **moments, update=update)
        launch(ours[0], gradient.to(DEVICE), *ours[1:], update=update)
        for expected, found in zip(moments.values(), ours[1:], strict=True):
            assert torch.equal(found.cpu(), expected)
        allowed = 4e-6 * (weight - before).abs() + 1e-7 * weight.abs()  # a GPU's roots and ratios
        assert ((ours[0].cpu() - weight).abs() <= allowed).all()
        ours[0].copy_(weight)


def test_fp32_moments_are_torchs_adamw():
    """No code, so the same as torch's, with gradients clipped by a factor."""
    weight = nn.Parameter(heavy_tailed(3, 1000))
    theirs = nn.Parameter(weight.detach().clone())
    optimizer = AdamW8bit([{"params": [weight], "is_coded": False, **GROUP}], lr=1, betas=(0, 0))
    reference = torch.optim.AdamW([theirs], **GROUP)
    for step in range(5):
        weight.grad = heavy_tailed(3, 1000, seed=step)
        theirs.grad = weight.grad * 0.25
        optimizer.step(clip=0.25)
        reference.step()
    torch.testing.assert_close(weight, theirs, rtol=1e-5, atol=1e-7)


def test_coded_moments_step_almost_as_fp32_ones_do():
    """The sum of 200 updates differs by a few percent; linear codes would miss half of it."""
    start = torch.zeros(8, 1024)
    ends = []
    for is_coded in (False, True):
        weight = nn.Parameter(start.clone())
        group = GROUP | {"weight_decay": 0.0, "is_coded": is_coded}
        optimizer = AdamW8bit([{"params": [weight], **group}], lr=1, betas=(0, 0))
        drift = heavy_tailed(8, 1024, seed=1000)
        for step in range(200):
            noise = heavy_tailed(8, 1024, seed=2000).abs()
            generator = torch.Generator().manual_seed(step)
            weight.grad = 0.3 * drift + noise * torch.randn(8, 1024, generator=generator)
            optimizer.step()
        ends.append(weight.detach())
    exact, coded = ends
    assert float((coded - exact).norm() / exact.norm()) < 0.08


def test_what_is_coded():
    """Width 64, so that the MLP's matrices have 64 * 64 = 4096 numbers and K and V have half."""
    model = tiny_llama(hidden_size=64, tie_word_embeddings=False)
    coded = find_coded(model)
    names = {name.split(".")[-2] for name, p in model.named_parameters() if p in coded}
    small = {name for name, p in model.named_parameters() if p.numel() < 4096}
    assert {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= names
    assert "embed_tokens" not in names
    assert any("k_proj" in name for name in small)
    assert "k_proj" not in names


def test_ten_bytes_a_parameter():
    """FP32 weight and gradient, two codes, and two INT16 per block."""
    weight = nn.Parameter(torch.zeros(64, 1024))
    optimizer = build_optimizer(nn.ParameterList([weight]), OptimConfig(moments="8bit"), lr=1.0)
    weight.grad = torch.ones_like(weight)
    apply_gradients(optimizer, lr=1e-3, grad_clip=1.0)
    held = [t for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor)]
    assert sum(t.nbytes for t in held) == 2 * weight.numel() + 4 * weight.numel() // BLOCK


def test_state_is_loaded_to_the_bit():
    def make():
        weight = nn.Parameter(heavy_tailed(16, 300))
        bias = nn.Parameter(torch.ones(300))
        config = OptimConfig(moments="8bit", weight_decay=0.1)
        return (weight, bias), build_optimizer(nn.ParameterList([weight, bias]), config, lr=1e-3)

    def step(parameters, optimizer, seed):
        for p in parameters:
            p.grad = heavy_tailed(*p.shape, seed=seed)
        apply_gradients(optimizer, lr=1e-3, grad_clip=0.1)

    (ours, first), (theirs, second) = make(), make()
    for seed in range(3):
        step(ours, first, seed)
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {t.dtype for t in second.state[theirs[0]].values() if isinstance(t, torch.Tensor)} == {
        torch.int8,
        torch.uint8,
        torch.int16,
    }
    for seed in (3, 4):
        step(ours, first, seed)
        step(theirs, second, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_stacks_of_matrices_are_coded_too():
    """As those of experts; and ranks cut no block if each has whole ones."""
    model = nn.Module()
    model.experts = nn.Parameter(heavy_tailed(4, 32, 384))
    model.bias = nn.Parameter(torch.zeros(8192))
    assert find_coded(model) == {model.experts}
    assert not _is_cut(model.experts.shape, 4)
    assert _is_cut(model.experts.shape, 3)
    assert _is_cut(torch.Size([6, 100]), 2)
    assert not _is_cut(torch.Size([7, 512]), 4)
