"""The symmetric RL loss: worked numbers, and what it does to a policy gradient."""

import math

import pytest
import torch

from qurl.config import build_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.losses import Symmetric, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def loss_and_gradient(logp, logp_prox, advantages, symmetric, *, mismatch=1.0, **options):
    logp = logp.clone().requires_grad_()
    behav = logp_prox - math.log(mismatch)
    loss, stats = policy_loss(
        *(logp, logp_prox, behav, advantages, torch.ones_like(logp)),
        symmetric=symmetric,
        **{"objective": "ppo_prox", **CLIP, **options},
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.item(), gradient, stats


def test_sppo_vectors(vectors):
    """Its gradient is alpha + beta times PPO's, also where the clip makes it 0."""
    for case in vectors("systems.json")["symmetric_rl"]["sppo"]:
        prox = row(case["old_prob"]).log()
        tokens = (prox + math.log(case["R"]), prox, row(case["A"]))
        symmetric = Symmetric("sppo", case["alpha"], case["beta"])
        loss, gradient, _ = loss_and_gradient(*tokens, symmetric)
        assert loss == pytest.approx(case["loss"], rel=1e-9)
        assert gradient.item() == pytest.approx(case["grad_logp"], rel=1e-9)
        _, plain, _ = loss_and_gradient(*tokens, Symmetric())
        total = case["alpha"] + case["beta"]
        assert gradient.item() == pytest.approx(total * plain.item(), rel=1e-9)


def test_sa2c_vectors(vectors):
    """With R = 1, as in A2C."""
    for case in vectors("systems.json")["symmetric_rl"]["sa2c"]:
        logp = row(case["prob"]).log()
        symmetric = Symmetric("sa2c", case["alpha"], case["beta"])
        loss, gradient, _ = loss_and_gradient(logp, logp, row(case["A"]), symmetric)
        assert loss == pytest.approx(case["loss"], rel=1e-9)
        assert gradient.item() == pytest.approx(case["grad_logp"], rel=1e-9)


@pytest.mark.parametrize("objective", ["ppo_prox", "ppo_behav", "decoupled", "tis", "acr"])
def test_sppo_is_a_multiple_of_every_objective(objective):
    generator = torch.Generator().manual_seed(0)
    prox = -3 * torch.rand(4, 50, generator=generator, dtype=torch.float64)
    logp = (prox + 0.3 * torch.randn(4, 50, generator=generator)).clamp(max=0)
    advantages = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    options = {"objective": objective, "mismatch": 3.0, "cap": 2.0, "dual_clip": 1.5}
    tokens = (logp, prox, advantages)
    _, plain, _ = loss_and_gradient(*tokens, Symmetric(), **options)
    _, both, stats = loss_and_gradient(*tokens, Symmetric("sppo", 0.5, 0.2), **options)
    torch.testing.assert_close(both, 0.7 * plain)
    assert plain.count_nonzero() < plain.numel(), "the clip stopped none"
    assert stats["symmetric/reverse_share"].item() == pytest.approx(0.2 / 0.7)


def test_acr_frees_the_reverse_term_and_weighs_it():
    """By hand: A = 1, R = 1.3, rho = 4, C = 2: w = 2, r = 1/2, bound 2.4, so u = 1.

    pi = 0.26 and pi_prox = 0.2: SA2C's gradient is -w (alpha + beta pi) = -2 (0.5 + 0.26). tis
    clips at 1.2, so u = 0.
    """
    prox = row(0.2).log()
    tokens = (prox + math.log(1.3), prox, row(1.0), Symmetric("sa2c", 0.5, 1.0))
    _, gradient, _ = loss_and_gradient(*tokens, objective="acr", mismatch=4.0)
    assert gradient.item() == pytest.approx(-1.52)
    _, gradient, _ = loss_and_gradient(*tokens, objective="tis", mismatch=4.0)
    assert gradient.item() == 0


@pytest.mark.parametrize("kind", ["sppo", "sa2c"])
def test_extreme_probabilities_stay_finite(kind):
    logp = torch.tensor([[-200.0, -30.0, -1e-9, 0.0]])
    loss, gradient, stats = loss_and_gradient(
        logp, logp.clone(), torch.tensor([[1.0, -1.0, 1.0, -1.0]]), Symmetric(kind)
    )
    assert math.isfinite(loss)
    slope = 0.9 if kind == "sppo" else 0.5
    assert 4 * gradient[0, 0].item() == pytest.approx(-slope)
    assert 4 * gradient[0, 3].item() == pytest.approx(0.9)
    assert all(math.isfinite(float(value)) for value in stats.values())


def test_statistics_by_hand():
    """pi = 0.5, A = 2: forward 2 log 0.5, reverse -2 * 0.5, share 0.4 * 0.5 / (0.5 + 0.4 * 0.5)."""
    logp = row(0.5).log()
    _, _, stats = loss_and_gradient(logp, logp, row(2.0), Symmetric("sa2c", 0.5, 0.4))
    found = {name.partition("/")[2]: float(x) for name, x in stats.items() if "symmetric" in name}
    assert found == pytest.approx(
        {
            "forward": 2 * math.log(0.5),
            "reverse": -1.0,
            "probability": 0.5,
            "reverse_share": 0.2 / 0.7,
        }
    )


def test_what_a_recipe_is_told():
    def warnings(algo, **batch):
        config = build_config({"algo": algo, "batch": batch})
        assert find_mistakes(config) == []
        return " ".join(w for w in find_warnings(config) if "symmetric" in w)

    assert warnings({}) == ""
    assert "symmetric_alpha + symmetric_beta = 0.9" in warnings({"symmetric": "sppo"})
    assert warnings({"symmetric": "sppo", "kl_coef": 0.1}) == ""
    assert "4 updates per step" in warnings({"symmetric": "sa2c"})
    assert warnings({"symmetric": "sa2c"}, minibatches=1) == ""
    assert "algo.symmetric_beta = 1.0 is not used" in warnings({"symmetric_beta": 1.0})
