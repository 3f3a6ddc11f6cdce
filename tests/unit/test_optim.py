"""Schedules by hand, decay groups, and gradients that must not be applied."""

import math

import pytest
import torch
from models import tiny_llama
from torch import nn

from qurl.config import OptimConfig
from qurl.errors import TrainingError
from qurl.trainer.optimizer import apply_gradients, build_optimizer, learning_rate


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 2, [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 2, [1 / 2, 1, 1, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)]),
    ],
)
def test_schedules_by_hand(schedule, warmup, rates):
    """Six steps at a peak of 0.1; a seventh would have rate 0 under linear and cosine."""
    config = OptimConfig(schedule=schedule, warmup_steps=warmup)
    found = [learning_rate(0.1, step, 6, config) for step in range(6)]
    assert found == pytest.approx([0.1 * rate for rate in rates])
    if schedule != "constant":
        assert learning_rate(0.1, 6, 6, config) == pytest.approx(0.0, abs=1e-12)


def test_only_matrices_decay():
    """With zero gradients AdamW does nothing but w <- w (1 - lr * decay)."""
    model = tiny_llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, lr=0.5, grad_clip=1.0)
    for name, parameter in model.named_parameters():
        factor = 1.0 if "norm" in name else 0.95
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(), lr=0.1)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model[1].parameters()}


def test_a_step_by_hand():
    """g = (3, 4), norm 5, clipped to (0.6, 0.8); AdamW's first step is lr * g / (|g| + eps)."""
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    config = OptimConfig(eps=0.2)
    optimizer = build_optimizer(nn.ParameterList([weight]), config, lr=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    assert apply_gradients(optimizer, lr=0.1, grad_clip=1.0) == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([1 - 0.1 * 0.6 / 0.8, 1 - 0.1 * 0.8 / 1.0])
    assert weight.grad is None


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run(poison):
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(nn.ParameterList([weight]), OptimConfig(), lr=0.1)
    weight.grad = torch.tensor([1.0, poison, 1.0])
    with pytest.raises(TrainingError, match=r"gradient norm is .* weights were left as they are"):
        apply_gradients(optimizer, lr=0.1, grad_clip=1.0)
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert not optimizer.state
