"""SAC in FP16: its distributions at extreme inputs, and a few updates that stay finite."""

import math

import pytest
import torch
from torch import nn

from benchmarks.low_precision_sac import (
    ARMS,
    Arm,
    CompensatedHAdam,
    Target,
    add_compensated_,
    network,
    normal_log_prob,
    tanh_log_slope,
    train,
)
from qurl.trainer.hadam import HAdam

HALF = torch.float16


def test_normals_of_extreme_widths():
    """sigma = e^-9: sigma^2 is 1.5e-8, which FP16 rounds to 0."""
    x, mean = torch.tensor([1e-4, 0.3], dtype=HALF), torch.tensor([0.0, 0.3], dtype=HALF)
    log_std = torch.full((2,), -9.0, dtype=HALF)
    expected = torch.distributions.Normal(mean.double(), log_std.double().exp()).log_prob(
        x.double()
    )
    found = normal_log_prob(x, mean, log_std, is_fixed=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    assert not normal_log_prob(x, mean, log_std, is_fixed=False).isfinite().all()


def test_slopes_of_large_actions():
    """At x = -9, exp(18) is more than FP16 holds; with the linear part 2 (log 2 + x) remains."""
    x = torch.tensor([-9.0, -4.0, 0.0, 4.0, 9.0], dtype=HALF, requires_grad=True)
    found = tanh_log_slope(x, is_fixed=True)
    expected = torch.log1p(-x.detach().double().tanh().square())
    torch.testing.assert_close(found.detach().double(), expected, rtol=1e-2, atol=2e-2)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.isfinite().all()
    assert tanh_log_slope(x, is_fixed=False).isinf().any()


@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_target_network_follows(is_fixed):
    """100 updates of 1 % towards a weight that is 0.01 higher close 63 % of the gap, in FP16."""
    net, empty = network(2, 1).to(HALF), network(2, 1).to(HALF)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    target = Target(net, empty, is_fixed=is_fixed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.01)
    for _ in range(100):
        target.follow_(net)
    closed = (next(target.net.parameters()).detach().double() - 1).mean() / 0.01
    if is_fixed:
        assert float(closed) == pytest.approx(1 - math.exp(-1), abs=0.1)
    else:
        assert float(closed) == 0


@pytest.mark.parametrize("name", ARMS)
def test_a_few_updates(name):
    arm: Arm = ARMS[name]
    agent, score = train(arm, seed=0, updates=12)
    weights = [p for net in (agent.actor, agent.critics) for p in net.parameters()]
    assert {p.dtype for p in weights} == {arm.dtype}
    is_finite = all(bool(p.isfinite().all()) for p in weights)
    assert is_finite == (name != "fp16, naive")
    assert math.isnan(score) == (name == "fp16, naive")


def test_a_compensated_sum():
    """10,000 times 1e-4 is 1. Without compensation FP16 stands still at 1/4."""
    total, plain, compensation = torch.zeros(3, 1, dtype=torch.float16)
    update = torch.full((1,), 1e-4, dtype=torch.float16)
    for _ in range(10_000):
        plain += update
        add_compensated_(total, compensation, update)
    assert plain.item() == 0.25
    assert total.item() == pytest.approx(1.0, rel=1e-3)


def test_fp16_parameters_with_kahans_sum():
    """Steps of 1e-4 on a weight of 1, whose neighbours are 1e-3 / 2 and 1e-3 away."""
    weights = [nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2)]
    for weight, kind in zip(weights, (CompensatedHAdam, HAdam), strict=True):
        options = {"lr": 1e-4, "betas": (0.9, 0.999), "moments": torch.float16}
        optimizer = kind([{"params": [weight]}], **options)
        for _ in range(100):
            weight.grad = torch.full_like(weight, 0.1)
            optimizer.step()
    assert weights[0].tolist() == pytest.approx([0.99] * 3, abs=1e-3)
    assert weights[1].tolist() == [1.0] * 3
