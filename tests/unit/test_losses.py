"""The objectives against worked numbers, hand-worked batches and their stated limits."""

import math

import pytest
import torch

from qurl.errors import ConfigError
from qurl.losses import (
    SURROGATES,
    aggregate,
    count,
    explained_variance,
    facts_of,
    kl_penalty,
    policy_loss,
    value_loss,
)
from qurl.objectives import OBJECTIVES, Objective, with_facts

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


def _token(case, dtype):
    """One worked token as [1, 1] tensors."""

    def tensor(name):
        return torch.tensor([[case[name]]], dtype=dtype)

    logp = tensor("logp_new").requires_grad_()
    return logp, tensor("logp_prox"), tensor("logp_behav"), tensor("advantage"), torch.ones(1, 1)


def _loss_and_gradient(case, objective, dtype):
    logp, prox, behav, advantage, mask = _token(case, dtype)
    loss, _ = policy_loss(
        logp,
        prox,
        behav,
        advantage,
        mask,
        objective=objective,
        clip_low=case["eps_low"],
        clip_high=case["eps_high"],
        cap=case["C"],
    )
    loss.backward()
    return loss.item(), logp.grad.item()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["f64", "f32"]
)
def test_token_vectors(vectors, objective, dtype, tolerance):
    for case in vectors("objectives.json")["token_cases"]:
        expected = case["expect"][objective]
        loss, gradient = _loss_and_gradient(case, objective, dtype)
        assert loss == pytest.approx(expected["loss"], rel=tolerance, abs=tolerance), case["id"]
        is_edge = expected["kink"] or "just" in case["note"]
        if expected["kink"]:
            low, high = sorted((expected["grad_inside"], expected["grad_outside"]))
            slack = tolerance * max(1, abs(low), abs(high))
            assert low - slack <= gradient <= high + slack, case["id"]
        elif not (is_edge and dtype == torch.float32):
            assert gradient == pytest.approx(expected["grad"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_batch_vectors(vectors, objective, aggregation):
    (case,) = vectors("objectives.json")["batch_cases"]
    tensors = {
        k: torch.tensor(case[k], dtype=torch.float64)
        for k in ("logp_new", "logp_prox", "logp_behav", "advantage", "mask")
    }
    logp = tensors["logp_new"].requires_grad_()
    expected = case["expect"][objective][aggregation]
    loss, _ = policy_loss(
        logp,
        tensors["logp_prox"],
        tensors["logp_behav"],
        tensors["advantage"],
        tensors["mask"],
        objective=objective,
        clip_low=case["eps_low"],
        clip_high=case["eps_high"],
        cap=case["C"],
        aggregation=aggregation,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)
    torch.testing.assert_close(
        logp.grad, torch.tensor(expected["grad"], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )


def test_acr_row_of_the_paper_by_hand():
    """A=1, R=1.3, rho=4, C=2: w=2, r=1/2, bound 1.2/r=2.4 > 1.3, so loss = -2*1.3 = -2.6."""
    case = {
        "logp_new": -1.5 + math.log(1.3),
        "logp_prox": -1.5,
        "logp_behav": -1.5 - math.log(4),
        "advantage": 1.0,
        "eps_low": 0.2,
        "eps_high": 0.2,
        "C": 2.0,
    }
    assert _loss_and_gradient(case, "acr", torch.float64) == pytest.approx((-2.6, -2.6))
    assert _loss_and_gradient(case, "tis", torch.float64) == pytest.approx((-2.4, 0.0))


def test_micro_batches_sum_to_the_mini_batch():
    """Loss and gradient of parts with the global denominator equal those of the whole."""
    torch.manual_seed(0)
    mask = (torch.rand(6, 5) > 0.3).double()
    mask[2] = 0
    prox, behav = -torch.rand(6, 5).double(), -torch.rand(6, 5).double()
    advantages = torch.randn(6, 5).double()
    for aggregation in AGGREGATIONS:
        whole = (prox + 0.3 * torch.randn(6, 5)).detach().requires_grad_()
        parts = whole.detach().clone().requires_grad_()
        options = {"aggregation": aggregation, "horizon": 7.0}
        loss, _ = policy_loss(whole, prox, behav, advantages, mask, **options)
        loss.backward()
        total = 0.0
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
            part, _ = policy_loss(
                parts[rows],
                prox[rows],
                behav[rows],
                advantages[rows],
                mask[rows],
                denominator=count(mask, aggregation),
                **options,
            )
            part.backward()
            total += part.item()
        assert total == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(parts.grad, whole.grad)


def test_masked_positions_are_inert():
    """Garbage under the mask changes neither loss nor gradient, even infinities."""
    logp = torch.tensor([[-1.0, -2.0, float("-inf")]], dtype=torch.float64).requires_grad_()
    prox = torch.tensor([[-1.1, -1.9, float("-inf")]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    advantages = torch.ones(1, 3).double()
    loss, stats = policy_loss(logp, prox, prox - 0.5, advantages, mask)
    loss.backward()
    assert torch.isfinite(loss)
    assert logp.grad[0, 2] == 0
    assert torch.isfinite(logp.grad).all()
    assert all(torch.isfinite(s) for s in stats.values())


def test_fully_masked_batch_has_zero_loss():
    zeros = torch.zeros(2, 3)
    loss, _ = policy_loss(zeros.clone().requires_grad_(), zeros, zeros, zeros + 1, zeros)
    assert loss.item() == 0


def test_statistics_by_hand():
    """Four tokens, rho=4, C=2 (r=1/2, upper 2.4), A=1: R = 1, 1.3 (rescued), 2.5 (clipped), and
    A=-1 with R=0.5 (clipped below)."""
    ratios = torch.tensor([[1.0, 1.3, 2.5, 0.5]], dtype=torch.float64)
    prox = torch.full((1, 4), -2.0, dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=torch.float64)
    _, stats = policy_loss(
        prox + ratios.log(), prox, prox - math.log(4), advantages, torch.ones(1, 4)
    )
    assert stats["acr/rescued_frac"].item() == 0.25
    assert stats["actor/clip_frac_high"].item() == 0.25
    assert stats["actor/clip_frac_low"].item() == 0.25
    assert stats["actor/pg_clipfrac"].item() == 0.5
    assert stats["acr/max_upper"].item() == pytest.approx(2.4)
    assert stats["actor/ppo_kl"].item() == pytest.approx(-ratios.log().mean().item())


def test_weight_and_shrink_come_together():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="weight and shrink come together"):
        policy_loss(x, x, x, x, torch.ones(1, 2), weight=torch.ones(1, 2))


def test_acr_max_bound_limits_widening():
    prox = torch.zeros(1, 1).double()
    logp = torch.full((1, 1), math.log(20.0)).double()
    arguments = (logp, prox, prox - math.log(100.0), torch.ones(1, 1).double(), torch.ones(1, 1))
    free, _ = policy_loss(*arguments)  # bound 60, R = 20 unclipped, w = 2
    bound, stats = policy_loss(*arguments, acr_max_bound=10.0)
    assert free.item() == pytest.approx(-40.0)
    assert bound.item() == pytest.approx(-20.0)
    assert stats["acr/max_upper"].item() == pytest.approx(10.0)


def test_acr_max_bound_never_narrows_the_plain_bound():
    """R = 1.15 and 1 + eh = 1.2: a limit of 1.1 leaves the bound at 1.2, and R unclipped."""
    prox = torch.zeros(1, 1).double()
    logp = torch.full((1, 1), math.log(1.15)).double()
    arguments = (logp, prox, prox, torch.ones(1, 1).double(), torch.ones(1, 1))
    loss, stats = policy_loss(*arguments, acr_max_bound=1.1)
    assert loss.item() == pytest.approx(-1.15)
    assert stats["acr/max_upper"].item() == pytest.approx(1.2)


def test_explained_variance_by_hand():
    """Returns 1, 2, 3, 4 have variance 5/3. Errors of one value by 1: variance 1/4, so 0.85.

    A critic that says the mean explains nothing; one with the wrong sign is worse than that.
    """
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0]]), torch.tensor([[1, 1, 1, 1, 0]])
    assert explained_variance(returns - torch.tensor([0, 0, 0, 1.0, 7]), returns, mask) == (
        pytest.approx(0.85)
    )
    assert explained_variance(torch.full((1, 5), 2.5), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)


def test_each_built_in_objective_is_a_function_with_the_facts_of_its_name():
    assert list(SURROGATES) == list(OBJECTIVES)
    assert {name: facts_of(f) for name, f in SURROGATES.items()} == OBJECTIVES


@pytest.mark.parametrize(
    ("objective", "cap"),
    [("ppo_prox", 2.0), ("ppo_behav", 2.0), ("decoupled", None), ("tis", 2.0), ("acr", 2.0)],
)
def test_only_decoupled_has_weights_without_a_cap(objective, cap):
    """Eq. (4) is not truncated; unweighted objectives use C for their metrics only."""
    assert OBJECTIVES[objective].cap(2.0) == cap


def test_an_objective_of_ones_own():
    """rho = 4, C = 2: the function sees w = 2, r = 1/2 and R = 3."""

    @with_facts(Objective(is_weighted=True, is_truncated=True))
    def my_objective(tokens):
        return tokens.weight * tokens.shrink * tokens.ratio * tokens.advantages

    prox = torch.zeros(1, 1).double()
    arguments = (prox + math.log(3.0), prox, prox - math.log(4.0), torch.full((1, 1), 0.5).double())
    loss, stats = policy_loss(*arguments, torch.ones(1, 1), objective=my_objective)
    assert loss.item() == pytest.approx(-2.0 * 0.5 * 3.0 * 0.5)
    assert stats.keys() == {"actor/ppo_kl"}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda t: t.ratio.sum(-1), r"'mine' returned the shape \(1,\); it must .* \(1, 2\)"),
        (lambda t: t.ratio.detach(), r"'mine' returned numbers without a gradient"),
        (
            lambda t: (t.ratio, {"my/ratios": t.ratio[0]}),
            r"'mine' returned 'my/ratios' of shape \(2,\); a statistic must be one number",
        ),
        (lambda t: None, r"'mine' returned None; it must return a tensor \[B, T\]"),
        (lambda t: (t.ratio, {}, 1), r"'mine' returned \(Tensor \[1, 2\] of .*, dict, int\)"),
        (lambda t: (t.ratio, [1]), r"'mine' returned \(Tensor .*, list\)"),
        (lambda t: t.rato, r"'mine' failed: AttributeError: .* no attribute 'rato' \(.*line"),
    ],
)
def test_what_an_objective_may_not_return(returned, message):
    @with_facts(Objective())
    def mine(tokens):
        return returned(tokens)

    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match=message):
        policy_loss(x.clone().requires_grad_(), x, x, x, torch.ones(1, 2), objective=mine)


def test_an_objective_without_facts_is_refused():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"'<lambda>' has no facts; decorate it with @with_facts"):
        policy_loss(x, x, x, x, torch.ones(1, 1), objective=lambda tokens: tokens.ratio)


def test_dual_clip_bounds_negative_advantages_only():
    """A=-1, R=20: loss 20 without, 3 with dual_clip=3; A=1 is untouched."""
    prox = torch.zeros(1, 2).double()
    logp = torch.full((1, 2), math.log(20.0)).double()
    advantages = torch.tensor([[-1.0, 1.0]]).double()
    loss, stats = policy_loss(
        logp,
        prox,
        prox,
        advantages,
        torch.ones(1, 2),
        aggregation="seq-mean-token-sum",
        dual_clip=3,
    )
    assert loss.item() == pytest.approx(3.0 - 1.2)
    assert stats["actor/pg_clipfrac_lower"].item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_in_16_bits_are_computed_with_in_fp32(dtype):
    """R = e^2, so the dual clip bounds the loss; 16 bits would round this bound."""
    logp, prox, mask = torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.ones(1, 1)
    advantage = torch.tensor([[-2.703125]])  # 8 bits
    inputs = [x.to(dtype) for x in (logp, prox, prox, advantage)]
    loss, _ = policy_loss(*inputs, mask, objective="ppo_prox", dual_clip=3.01)
    assert loss.item() == pytest.approx(3.01 * 2.703125, rel=1e-6)


def test_weights_carry_no_gradient():
    """d loss / d logp_prox and logp_behav do not exist, even when those require grad."""
    tensors = [torch.full((1, 2), x).double().requires_grad_() for x in (-1.0, -1.2, -2.5)]
    loss, _ = policy_loss(*tensors, torch.ones(1, 2).double(), torch.ones(1, 2))
    loss.backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cap": 0.5}, "cap = 0.5 must be at least 1"),
        ({"objective": "ppo"}, "objective = 'ppo' is not one of ppo_prox"),
        ({"aggregation": "mean"}, "aggregation = 'mean' is not one of token-mean"),
    ],
)
def test_bad_arguments(change, message):
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        policy_loss(zeros, zeros, zeros, zeros, zeros + 1, **change)


def test_kl_vectors(vectors):
    for case in vectors("systems.json")["kl_estimators"]:
        for k in ("k1", "k2", "k3"):
            logp = torch.tensor(case["logp"], dtype=torch.float64, requires_grad=True)
            kl = kl_penalty(logp, torch.tensor(case["ref_logp"], dtype=torch.float64), k)
            kl.backward()
            assert kl.item() == pytest.approx(case[k], abs=1e-9)
            assert logp.grad.item() == pytest.approx(case[f"d{k}_dlogp"], rel=1e-9, abs=1e-12)


def test_value_loss_by_hand():
    """V=2, V_old=0, c=0.5: Vc=0.5; ret=1: (2-1)^2=1 > (0.5-1)^2. ret=3: (0.5-3)^2=6.25 > 1."""
    values = torch.tensor([[2.0, 2.0]]).double().requires_grad_()
    returns = torch.tensor([[1.0, 3.0]]).double()
    loss, stats = value_loss(
        values, returns, torch.ones(1, 2), old_values=torch.zeros(1, 2).double(), clip=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1 + 6.25) / 2)
    assert values.grad[0].tolist() == pytest.approx([0.5, 0.0])
    assert stats["critic/vf_clipfrac"].item() == 0.5


def test_aggregate_by_hand():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert aggregate(values, mask, "token-mean").item() == pytest.approx(10 / 4)
    assert aggregate(values, mask, "seq-mean-token-mean").item() == pytest.approx((2 + 4) / 2)
    assert aggregate(values, mask, "seq-mean-token-sum").item() == pytest.approx((6 + 4) / 2)
    assert aggregate(values, mask, "seq-mean-token-sum-norm", horizon=10).item() == pytest.approx(
        0.5
    )
