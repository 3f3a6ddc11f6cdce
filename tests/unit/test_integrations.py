"""What the losses for other frameworks share, without a framework."""

import importlib

import pytest
import torch

from qurl.errors import ConfigError, MissingExtra
from qurl.integrations.loss import check_options, corrected_loss, mismatch_numbers
from qurl.losses import SURROGATES, policy_loss

GOOD = {"objective": "acr", "cap": 2.0, "acr_max_bound": None}


@pytest.fixture
def inputs():
    """(logp, logp_prox, logp_behav, advantages, mask), with weights beyond C = 2."""
    generator = torch.Generator().manual_seed(10)
    prox, noise, drift, advantages = (torch.randn(4, 6, generator=generator) for _ in range(4))
    return prox + 0.3 * drift, prox, prox - 0.8 * noise, advantages, torch.ones(4, 6).triu()


@pytest.mark.parametrize("objective", SURROGATES)
def test_the_loss_is_policy_loss(inputs, objective):
    loss, metrics = corrected_loss(*inputs, objective=objective, cap=1.5, clip_high=0.28)
    expected, stats = policy_loss(*inputs, objective=objective, cap=1.5, clip_high=0.28)
    assert loss == expected
    assert {name: metrics[name] for name in stats} == {k: float(v) for k, v in stats.items()}
    rho = (inputs[1] - inputs[2]).exp()[inputs[4].bool()]
    truncated = 0.0 if objective == "decoupled" else float((rho > 1.5).double().mean())
    assert metrics["rollout_corr/truncated_frac"] == pytest.approx(truncated)


def test_an_empty_micro_batch_reports_under_the_same_names(inputs):
    *others, mask = inputs
    full = corrected_loss(*inputs, objective="acr", cap=2.0)[1]
    full |= mismatch_numbers(inputs[1], inputs[2], mask, cap=2.0)
    loss, empty = corrected_loss(*others, torch.zeros_like(mask), objective="acr", cap=2.0)
    empty |= mismatch_numbers(inputs[1], inputs[2], torch.zeros_like(mask), cap=2.0)
    assert loss == 0
    assert empty.keys() == full.keys()
    assert (empty["rollout_corr/kl"], empty["rollout_corr/weight_mean"]) == (0, 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"objective": "ppo"}, r"a\.b\.objective = 'ppo' is not one of ppo_prox, .*nor module:fun"),
        ({"objective": "math:sin"}, "objective 'sin' has no facts"),
        ({"cap": 0.9}, r"a\.b\.cap = 0.9 must be at least 1, or null"),
        ({"acr_max_bound": 1.0}, r"a\.b\.acr_max_bound = 1.0 must be above 1, or null"),
    ],
)
def test_bad_options_are_refused(change, error):
    check_options("a.b", **GOOD)
    with pytest.raises(ConfigError, match=error):
        check_options("a.b", **{**GOOD, **change})


@pytest.mark.parametrize(
    ("host", "module"),
    [
        ("verl", "verl.trainer.ppo.core_algos"),
        ("skyrl", "skyrl.backends.skyrl_train.utils.ppo_utils"),
    ],
)
def test_a_missing_host_is_named(host, module):
    try:
        importlib.import_module(module)
    except ImportError:
        with pytest.raises(MissingExtra, match=rf"'{host}'.* pip install 'qurl-rl\[{host}\]'"):
            importlib.import_module(f"qurl.integrations.{host}")
    else:
        pytest.skip(f"{host} is installed")
