"""What must hold between the objectives, for any log-probs (SPEC: consequences of Eq. 4 to 9)."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl.losses import policy_loss

logs = st.floats(-6, 0)
caps = st.floats(1, 8)
advantages = st.floats(-3, 3)


def loss_and_gradient(logp, prox, behav, advantage, **options):
    logp, prox, behav, advantage = (
        torch.tensor([[x]], dtype=torch.float64) for x in (logp, prox, behav, advantage)
    )
    logp.requires_grad_()
    loss, _ = policy_loss(logp, prox, behav, advantage, torch.ones(1, 1), **options)
    loss.backward()
    return loss.item(), logp.grad.item()


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


@settings(deadline=None, max_examples=200)
@given(logs, logs, logs, advantages, caps)
def test_acr_is_tis_unless_truncated_positive_and_beyond_the_bound(logp, prox, behav, a, cap):
    is_special = prox - behav > math.log(cap) and a > 0 and logp - prox > math.log(1.2)
    acr = loss_and_gradient(logp, prox, behav, a, objective="acr", cap=cap)
    tis = loss_and_gradient(logp, prox, behav, a, objective="tis", cap=cap)
    if not is_special:
        assert_same(acr, tis)
    else:
        assert acr[0] <= tis[0] + 1e-12  # a wider bound can only raise the objective


@settings(deadline=None, max_examples=200)
@given(logs, logs, logs, advantages, caps)
def test_tis_is_r_times_decoupled(logp, prox, behav, a, cap):
    shrink = min(1.0, cap / math.exp(prox - behav))
    tis = loss_and_gradient(logp, prox, behav, a, objective="tis", cap=cap)
    decoupled = loss_and_gradient(logp, prox, behav, a, objective="decoupled")
    assert_same(tis, [shrink * x for x in decoupled])


@settings(deadline=None, max_examples=200)
@given(logs, logs, logs, advantages)
def test_without_a_cap_acr_is_decoupled(logp, prox, behav, a):
    acr = loss_and_gradient(logp, prox, behav, a, objective="acr", cap=None)
    assert_same(acr, loss_and_gradient(logp, prox, behav, a, objective="decoupled"))


@settings(deadline=None, max_examples=100)
@given(logs, logs, advantages, caps)
def test_on_policy_ratio_makes_acr_tis_and_truncated_is_coincide(prox, behav, a, cap):
    weight = min(cap, math.exp(prox - behav))
    acr = loss_and_gradient(prox, prox, behav, a, objective="acr", cap=cap)
    assert_same(acr, (-weight * a, -weight * a))


@settings(deadline=None, max_examples=200)
@given(logs, logs, logs, advantages, caps)
def test_surrogate_never_exceeds_that_of_the_mismatch_times_the_bound(logp, prox, behav, a, cap):
    loss, _ = loss_and_gradient(logp, prox, behav, a, objective="acr", cap=cap)
    mismatch = math.exp(prox - behav)
    assert -loss <= mismatch * 1.2 * max(a, 0) + 1e-9


@settings(deadline=None, max_examples=100)
@given(logs, logs, logs, advantages, caps, st.floats(1.5, 10))
def test_dual_clip_never_touches_positive_advantages(logp, prox, behav, a, cap, dual_clip):
    plain = loss_and_gradient(logp, prox, behav, a, cap=cap)
    dual = loss_and_gradient(logp, prox, behav, a, cap=cap, dual_clip=dual_clip)
    if a >= 0:
        assert_same(plain, dual)
    else:
        assert dual[0] <= plain[0] + 1e-12
