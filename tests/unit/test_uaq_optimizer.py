"""UAQ is a learning rate per layer: trained both ways, the weights are the same."""

import copy

import pytest
import torch
from models import tiny_llama
from torch import Tensor

from qurl.config import OptimConfig
from qurl.quant import rescale_, unscale_
from qurl.quant.scaling import learning_rate_scales
from qurl.trainer.optimizer import apply_gradients, build_optimizer

STEPS = 40


class Toy:
    """y = W (g * n) with n the RMS-normalised input, fitted to a fixed target in float64."""

    def __init__(self, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x, self.target = normal(32, 6), normal(32, 5)
        self.n = x * x.pow(2).mean(-1, keepdim=True).rsqrt()
        self.weight = (normal(5, 6) / scale).requires_grad_()
        self.norm = ((1 + 0.3 * normal(6)) * scale).requires_grad_()

    def loss(self) -> Tensor:
        return ((self.norm * self.n) @ self.weight.T - self.target).pow(2).mean()

    def train(self, kind: type, for_weight: dict, for_norm: dict, steps: int = STEPS) -> "Toy":
        groups = [{"params": [self.weight], **for_weight}, {"params": [self.norm], **for_norm}]
        optimizer = kind(groups)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()
        return self


def _adamw(lr=3e-3, wd=0.1, eps=1e-3):
    """A large eps, so that its scaling matters."""
    return {"lr": lr, "weight_decay": wd, "eps": eps, "betas": (0.9, 0.95)}


def _gap(scaled: Toy, plain: Toy, s: float) -> float:
    weight = (scaled.weight * s - plain.weight).abs().max()
    return max(weight.item(), (scaled.norm / s - plain.norm).abs().max().item())


def test_adamw_sees_a_learning_rate_s_times_larger():
    s, lr, wd, eps = 1.5, 3e-3, 0.1, 1e-3
    scaled = Toy(s).train(torch.optim.AdamW, _adamw(), _adamw())
    plain = Toy().train(
        torch.optim.AdamW, _adamw(lr * s, wd / s, eps / s), _adamw(lr / s, wd * s, eps * s)
    )
    assert _gap(scaled, plain, s) < 1e-12
    assert (plain.weight - Toy().weight).abs().max() > 0.05, "the toy did not train"


@pytest.mark.parametrize(
    ("for_weight", "for_norm"),
    [
        (_adamw(), _adamw()),
        (_adamw(lr=4.5e-3), _adamw(lr=4.5e-3)),
        (_adamw(lr=4.5e-3), _adamw(lr=2e-3)),
        (_adamw(lr=4.5e-3, wd=0.1 / 1.5), _adamw(lr=2e-3, wd=0.15)),
        (_adamw(lr=4.5e-3, eps=1e-3 / 1.5), _adamw(lr=2e-3, eps=1.5e-3)),
    ],
    ids=["nothing", "lr everywhere", "lr alone", "eps forgotten", "wd forgotten"],
)
def test_adamw_sees_nothing_less(for_weight, for_norm):
    scaled = Toy(1.5).train(torch.optim.AdamW, _adamw(), _adamw())
    plain = Toy().train(torch.optim.AdamW, for_weight, for_norm)
    assert _gap(scaled, plain, 1.5) > 1e-5


def test_sgd_sees_a_learning_rate_s_squared_times_larger():
    s, lr = 1.5, 0.02
    sgd = torch.optim.SGD
    scaled = Toy(s).train(sgd, {"lr": lr}, {"lr": lr})
    plain = Toy().train(sgd, {"lr": lr * s**2}, {"lr": lr / s**2})
    assert _gap(scaled, plain, s) < 1e-12
    assert _gap(scaled, Toy().train(sgd, {"lr": lr * s}, {"lr": lr / s}), s) > 1e-3


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_first_relative_update_grows_by_s_or_by_its_square(name, vectors):
    expected = vectors("systems.json")["uaq"]
    s = expected["s"]
    if name == "adamw":
        kind, options = torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
    else:
        kind, options = torch.optim.SGD, {"lr": 0.02}

    def relative_update(scale):
        before = Toy(scale).weight.detach()
        after = Toy(scale).train(kind, options, options, steps=1).weight.detach()
        return ((after - before).norm() / before.norm()).item()

    ratio = relative_update(s) / relative_update(1.0)
    assert ratio == pytest.approx(expected[f"{name}_first_step_relative_update_ratio"], rel=1e-5)


def _groups(model, lr, wd, eps, s):
    """AdamW's parameter groups of a plain model that trains as UAQ with s does."""
    fed = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")

    def power(name):
        return 1 if name.endswith(fed) else -1 if "layernorm" in name else 0

    return [
        {
            "params": [parameter],
            "lr": lr * s ** power(name),
            "weight_decay": wd / s ** power(name),
            "eps": eps / s ** power(name),
        }
        for name, parameter in model.named_parameters()
    ]


def _train_llama(model, groups, steps):
    optimizer = torch.optim.AdamW(groups)
    tokens = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("s", "dtype", "bound"), [(2.0, torch.float32, 0.0), (1.5, torch.float64, 1e-9)]
)
def test_a_llama_trains_the_same_both_ways(s, dtype, bound):
    lr, wd, eps = 1e-3, 0.1, 1e-6
    start = tiny_llama().to(dtype)
    plain, scaled = copy.deepcopy(start), rescale_(copy.deepcopy(start), s)
    _train_llama(plain, _groups(plain, lr, wd, eps, s), steps=10)
    _train_llama(scaled, _groups(scaled, lr, wd, eps, 1.0), steps=10)
    unscale_(scaled)
    for (name, a), b, before in zip(
        plain.named_parameters(), scaled.parameters(), start.parameters(), strict=True
    ):
        assert (a - b).abs().max() <= bound, name
        assert (a - before).abs().max() > 1e-3, f"{name} did not train"


def test_the_trainers_optimizer_can_do_without_uaq():
    s, config, start = 1.5, OptimConfig(weight_decay=0.1, eps=1e-6), tiny_llama().double()
    plain, scaled = copy.deepcopy(start), rescale_(copy.deepcopy(start), s)
    tokens = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(1))
    for model, scales in ((plain, learning_rate_scales(plain, s)), (scaled, {})):
        optimizer = build_optimizer(model, config, lr=1e-3, scales=scales)
        for _ in range(10):
            model(tokens, labels=tokens).loss.backward()
            apply_gradients(optimizer, lr=1e-3, grad_clip=1e9)
    unscale_(scaled)
    for (name, a), b, before in zip(
        plain.named_parameters(), scaled.parameters(), start.parameters(), strict=True
    ):
        assert (a - b).abs().max() < 1e-9, name
        assert (a - before).abs().max() > 1e-3, f"{name} did not train"
