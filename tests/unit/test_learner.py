"""One step's updates: denominators, the terms of the loss, the critic, and what stops a run."""

import copy
import dataclasses
import math

import pytest
import torch
from models import build_learner, random_batch, recompute, tiny_llama, tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode

import qurl.trainer.learner
import qurl.trainer.packing
from qurl.config import build_config
from qurl.errors import TrainingError
from qurl.losses import aggregate, kl_penalty, policy_loss
from qurl.seeds import generator
from qurl.trainer.meter import Meter
from qurl.trainer.optimizer import apply_gradients, build_optimizer
from qurl.trainer.policy import Policy

# A large epsilon keeps AdamW's first step, g / (|g| + eps), from magnifying rounding.
OPTIM = {"lr": 1e-2, "eps": 1e-2}


def make_config(algo=None, batch=None, **sections):
    return build_config(
        {
            "steps": 10,
            "algo": {"objective": "acr"} | (algo or {}),
            "batch": {"problems": 3, "minibatches": 1} | (batch or {}),
            "sampling": {"max_tokens": 9, "group_size": 2},
            "optim": OPTIM,
        }
        | sections
    )


def make_learner(config, *, reference=None, needs_prox=False):
    return build_learner(config, tiny_policy(), reference, needs_prox=needs_prox)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(model, expected, tolerance=0.0):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected[name], atol=tolerance, rtol=0, msg=name
        )


def largest_change(model, before):
    return max(
        float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters()
    )


AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_do_not_change_the_update(aggregation):
    results = []
    for tokens in (1, 25, 10_000):
        config = make_config({"aggregation": aggregation}, {"microbatch_tokens": tokens})
        learner = make_learner(config)
        before = weights(learner.policy.model)
        _, metrics = learner.update(random_batch(learner.policy), step=0)
        assert largest_change(learner.policy.model, before) > 1e-4
        results.append((weights(learner.policy.model), metrics))
    (expected, expected_metrics), *others = results
    for found, metrics in others:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0, msg=name)
        assert metrics == pytest.approx(expected_metrics, abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_updates_on_a_gpu_can_be_repeated_to_the_bit(advantage, monkeypatch):
    """Long sequences: attention adds up the gradients of a query over blocks of keys."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = make_config(
        {"advantage": advantage}, {"minibatches": 2}, model={"deterministic": True}
    )
    batch = random_batch(tiny_policy(), longest=1000).to("cuda")
    found = []
    for _ in range(3):
        policy = Policy(tiny_llama(), None, config.model, torch.device("cuda"))
        learner = build_learner(config, policy)
        learner.update(recompute(learner, batch), step=0)
        found.append(weights(policy.model))
    for again in found[1:]:
        assert all(torch.equal(again[name], found[0][name]) for name in again)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_sums_are_fixed_while_gradients_are_computed(monkeypatch, is_wanted):
    seen = []
    real = qurl.trainer.learner.policy_loss

    def watched(*inputs, **options):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return real(*inputs, **options)

    monkeypatch.setattr(qurl.trainer.learner, "policy_loss", watched)
    learner = make_learner(make_config(model={"deterministic": is_wanted}))
    learner.update(random_batch(learner.policy), step=0)
    assert seen == [is_wanted]
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_updates_of_a_step_are_those_of_its_mini_batches():
    """Two epochs of two mini-batches, each with its own mean over all of its tokens."""
    config = make_config(
        {"aggregation": "token-mean", "cap": 1.5},
        {"minibatches": 2, "epochs": 2, "microbatch_tokens": 12},
    )
    learner = make_learner(config)
    batch = random_batch(learner.policy)
    other = tiny_policy()
    optimizer = build_optimizer(other.model, config.optim, lr=1.0)
    losses, norms = [], []
    for epoch in range(2):
        order = torch.randperm(6, generator=generator(config.seed, "shuffle", 4, epoch))
        for rows in (order[:3], order[3:]):
            part = batch.select(rows)
            loss, _ = policy_loss(
                other.score(part).logp,
                part.logp_prox,
                part.logp_behav,
                part.advantages,
                part.mask,
                cap=1.5,
            )
            loss.backward()
            losses.append(loss.item())
            norms.append(apply_gradients(optimizer, lr=1e-2, grad_clip=1.0))
    _, metrics = learner.update(batch, step=4)
    assert_same(learner.policy.model, weights(other.model), tolerance=1e-6)
    assert metrics["actor/pg_loss"] == pytest.approx(sum(losses) / 4, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5)
    assert metrics["actor/lr"] == 1e-2
    assert metrics["actor/skipped_updates"] == 0
    assert not any(name.endswith("_sum") for name in metrics)


def test_recompute_scores_with_policy_reference_and_critic():
    config = make_config(
        {"name": "ppo", "advantage": "gae", "kl_coef": 0.1}, {"microbatch_tokens": 20}
    )
    reference = tiny_policy(seed=1).freeze_()
    learner = make_learner(config, reference=reference, needs_prox=True)
    torch.nn.init.ones_(learner.critic.head.weight)
    batch = random_batch(learner.policy)
    found = recompute(learner, batch)
    metrics = learner.describe(found, batch)
    policy_scores, ref_scores = learner.policy.score(batch), reference.score(batch)
    torch.testing.assert_close(found.logp_prox, policy_scores.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.logp_ref, ref_scores.logp, atol=1e-5, rtol=0)
    values = learner.critic(learner.policy.layout(batch))
    torch.testing.assert_close(found.values, values, atol=1e-5, rtol=0)
    keep = batch.mask.bool()
    assert metrics["actor/entropy"] == pytest.approx(
        policy_scores.entropy[keep].mean().item(), rel=1e-5
    )
    gap = (ref_scores.logp - policy_scores.logp)[keep]
    assert metrics["actor/ref_kl"] == pytest.approx((gap.exp() - gap - 1).mean().item(), rel=1e-4)
    assert not found.logp_prox.requires_grad


def test_bypass_takes_the_sampler_for_the_proximal_policy(monkeypatch):
    config = make_config({"objective": "ppo_behav"}, correction={"mode": "bypass"})
    learner = make_learner(config)
    batch = random_batch(learner.policy)
    with monkeypatch.context() as patch:
        patch.setattr(learner.policy, "score", lambda *_: pytest.fail("this forward is saved"))
        found = recompute(learner, batch)
    assert torch.equal(found.logp_prox, batch.logp_behav)
    before = weights(learner.policy.model)
    trained, _ = learner.update(found, step=0)
    assert torch.equal(trained.logp_prox, batch.logp_behav)
    described = learner.describe(trained, batch)
    assert described.keys() == {"critic/advantages/max", "critic/advantages/min"}
    assert largest_change(learner.policy.model, before) > 1e-4


def test_the_kl_term_pulls_towards_the_reference():
    """Without advantages the KL is all of the loss, and an update shrinks it."""
    config = make_config(
        {"kl_coef": 0.5, "aggregation": "token-mean"},
        {"microbatch_tokens": 20},
        optim={"lr": 1e-3, "eps": 1e-2},
    )
    reference = copy.deepcopy(tiny_policy())
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    learner = make_learner(config, reference=reference.freeze_())
    batch = random_batch(learner.policy)
    batch = recompute(learner, batch.replace(advantages=torch.zeros_like(batch.mask)))
    kls = []
    for _ in range(3):
        kl = kl_penalty(learner.policy.score(batch).logp, batch.logp_ref, "k3")
        kls.append(aggregate(kl.detach(), batch.mask).item())
        _, metrics = learner.update(batch, step=0)
        assert metrics["actor/kl_loss"] == pytest.approx(kls[-1], rel=1e-4)
        assert metrics["actor/pg_loss"] == 0
    assert kls[2] < kls[1] < kls[0]


def test_a_corrected_kl_is_weighted():
    config = make_config(
        {"kl_coef": 0.5, "aggregation": "token-mean"}, experimental={"weighted_kl": True}
    )
    learner = make_learner(config, reference=tiny_policy(seed=1).freeze_(), needs_prox=True)
    batch = recompute(learner, random_batch(learner.policy))
    weight = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(5))
    batch = batch.replace(weight=weight, shrink=torch.ones_like(weight))
    kl = kl_penalty(batch.logp_prox, batch.logp_ref, "k3", limit=10.0)
    expected = aggregate(weight * kl, batch.mask).item()
    assert learner.update(batch, step=0)[1]["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 15.0), ("k2", 112.5), ("k3", 10.0)])
def test_only_k3_is_limited(estimator, expected):
    """It alone grows exponentially; a limit would end the pull of the others."""
    config = make_config({"kl_coef": 0.5, "kl_estimator": estimator, "aggregation": "token-mean"})
    learner = make_learner(config, reference=tiny_policy().freeze_(), needs_prox=True)
    batch = recompute(learner, random_batch(learner.policy))
    sign = 1 if estimator == "k3" else -1  # k3 is large where the reference says more
    batch = batch.replace(logp_ref=batch.logp_prox + sign * 15.0)
    assert learner.update(batch, step=0)[1]["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)


def test_the_entropy_bonus_raises_entropy():
    def entropy_after(coefficient):
        learner = make_learner(make_config({"entropy_coef": coefficient}))
        batch = random_batch(learner.policy)
        learner.update(batch.replace(advantages=torch.zeros_like(batch.mask)), step=0)
        return aggregate(learner.policy.score(batch).entropy, batch.mask).item()

    assert entropy_after(1.0) > entropy_after(0.0) + 0.01


def ppo_learner(microbatch_tokens=10_000, **critic):
    config = make_config(
        {"name": "ppo", "advantage": "gae"},
        {"microbatch_tokens": microbatch_tokens},
        critic={"lr": 1e-2} | critic,
    )
    learner = make_learner(config)
    batch = recompute(learner, random_batch(learner.policy))
    return learner, batch.replace(returns=(1 + batch.mask.cumsum(-1) / 10) * batch.mask)


def test_value_pre_training_leaves_the_policy_alone():
    learner, batch = ppo_learner(pretrain_steps=2)
    policy, critic = weights(learner.policy.model), weights(learner.critic)
    for step in (0, 1):
        _, metrics = learner.update(batch, step)
        assert "actor/pg_loss" not in metrics
    assert_same(learner.policy.model, policy)
    assert largest_change(learner.critic, critic) > 1e-4
    learner.update(batch, step=2)
    assert largest_change(learner.policy.model, policy) > 1e-4


def test_the_mean_lambda_of_responses():
    """Lengths n have lambda 1 - 1 / (0.5 n), at least 0."""
    learner, batch = ppo_learner()
    assert "critic/lam_policy" not in learner.describe(batch, batch)
    config = dataclasses.replace(learner.config.algo, lam_alpha=0.5)
    learner.config = dataclasses.replace(learner.config, algo=config)
    lambdas = [max(0, 1 - 2 / n) for n in batch.mask.sum(-1).tolist()]
    found = learner.describe(batch, batch)["critic/lam_policy"]
    assert found == pytest.approx(sum(lambdas) / len(lambdas))


def test_micro_batches_do_not_change_the_critic_either():
    results = []
    for tokens in (1, 25, 10_000):
        learner, batch = ppo_learner(tokens)
        metrics = [learner.update(batch, step)[1] for step in range(2)]
        results.append((weights(learner.critic), metrics))
    (expected, expected_metrics), *others = results
    for found, metrics in others:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0, msg=name)
        for one, other in zip(metrics, expected_metrics, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_the_critic_learns_the_returns():
    """A fresh critic says 0: its loss is mean(ret^2) / 2 and explains nothing."""
    learner, batch = ppo_learner(clip=None)
    _, first = learner.update(batch, step=0)
    returns = batch.returns[batch.mask.bool()]
    assert first["critic/vf_loss"] == pytest.approx(0.5 * returns.square().mean().item(), rel=1e-5)
    assert first["critic/value_mean"] == 0
    assert first["critic/return_mean"] == pytest.approx(returns.mean().item(), rel=1e-5)
    assert first["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-6)
    losses = [learner.update(batch, step=0)[1]["critic/vf_loss"] for _ in range(10)]
    assert losses[-1] < 0.5 * first["critic/vf_loss"]


def test_a_mini_batch_without_tokens_is_skipped_and_counted():
    config = make_config(None, {"minibatches": 2})
    learner = make_learner(config)
    batch = random_batch(learner.policy)
    before = weights(learner.policy.model)
    empty = batch.replace(mask=torch.zeros_like(batch.mask))
    assert learner.update(empty, step=0)[1]["actor/skipped_updates"] == 2
    assert_same(learner.policy.model, before)

    mask = batch.mask.clone()
    mask[torch.randperm(6, generator=generator(config.seed, "shuffle", 0, 0))[:3]] = 0
    _, metrics = learner.update(batch.replace(mask=mask), step=0)
    assert metrics["actor/skipped_updates"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert largest_change(learner.policy.model, before) > 1e-4


@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("field", ["logp_prox", "advantages"])
def test_nan_stops_before_its_mini_batch(field, poisoned):
    config = make_config(None, {"minibatches": 2, "microbatch_tokens": 12})
    learner, healthy = make_learner(config), make_learner(config)
    batch = random_batch(learner.policy)
    order = torch.randperm(6, generator=generator(config.seed, "shuffle", 7, 0))
    rows = order[3 * poisoned : 3 * poisoned + 3]
    values = getattr(batch, field).clone()
    last = batch.lengths[rows[0]] - 1
    values[rows[0], last] = math.nan
    broken = batch.replace(**{field: values})
    with pytest.raises(TrainingError, match="the loss of step 7 is nan") as error:
        learner.update(broken, step=7)
    assert error.value.batch is broken
    mask = batch.mask.clone()
    mask[rows] = 0  # what was updated before: the other mini-batch, if it came first
    if poisoned == 1:
        healthy.update(batch.replace(mask=mask), step=7)
    assert_same(learner.policy.model, weights(healthy.policy.model), tolerance=1e-7)


def test_an_infinite_gradient_carries_its_batch():
    learner = make_learner(make_config())
    batch = random_batch(learner.policy)
    before = weights(learner.policy.model)
    parameter = next(learner.policy.model.parameters())
    parameter.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match="the gradient norm is") as error:
        learner.update(batch, step=0)
    assert error.value.batch is batch
    assert_same(learner.policy.model, before)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_padded_forwards_make_the_same_update(aggregation):
    """What a model gets that cannot be packed: other pieces, the same step."""
    config = make_config(
        {"name": "ppo", "advantage": "gae", "aggregation": aggregation},
        {"microbatch_tokens": 25, "minibatches": 2},
        critic={"lr": 1e-2},
    )
    results = []
    for is_packed in (True, False):
        policy = tiny_policy()
        policy.is_packed = is_packed
        learner = build_learner(config, policy)
        batch = recompute(learner, random_batch(learner.policy))
        trained, metrics = learner.update(batch.replace(returns=batch.mask.clone()), step=0)
        metrics |= learner.describe(trained, batch)
        results.append((learner, metrics))
    (packed, expected), (padded, found) = results
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert_same(padded.policy.model, weights(packed.policy.model), tolerance=1e-6)
    assert_same(padded.critic, weights(packed.critic), tolerance=1e-6)


class Reads(TorchDispatchMode):
    """Operations whose result the host has to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        is_counting = any(i is not None and i.dtype == torch.bool for i in indices)
        if name in self.WAITING or is_counting:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing_while_pieces_are_computed(monkeypatch):
    """On a GPU flash attention takes the place of the padding, which counts tokens."""
    config = make_config(
        {"name": "ppo", "advantage": "gae", "kl_coef": 0.1, "entropy_coef": 0.1},
        {"microbatch_tokens": 25},
    )
    learner = make_learner(config, reference=tiny_policy(seed=1).freeze_())
    batch = recompute(learner, random_batch(learner.policy))
    pieces = learner.pieces(batch.replace(returns=batch.mask.clone()))
    assert len(pieces) > 1
    monkeypatch.setattr(qurl.trainer.packing, "_attend_padded", lambda q, *_: q)
    with Reads() as reads:
        meter = Meter()
        for piece in pieces:
            loss, stats = learner._policy_terms(piece, 10.0, is_prox=True, scores=[])
            loss.backward()
            meter.add(stats, weight=len(piece.layout.scored))
            learner.critic(piece.layout).sum().backward()
        meter.finish_update({"norm": 1.0})
        assert reads.found == []
        loss.item()
        piece.batch.mask[piece.batch.mask.bool()]
        assert reads.found == ["_local_scalar_dense", "index"], "these are two"


def test_meter_by_hand():
    """Pieces of 1 and 3 tokens in one update, then an update of one piece."""
    meter = Meter()
    meter.add(
        {"a": torch.tensor(4.0), "loss_sum": 1.0, "x/max_upper": 2.0, "is_min": 0.3}, weight=1
    )
    meter.add({"a": 8.0, "loss_sum": 2.0, "x/max_upper": 5.0, "is_min": 0.1}, weight=3)
    meter.finish_update({"norm": 1.0})
    meter.add({"a": 0.0, "loss_sum": 7.0, "x/max_upper": 1.0}, weight=4)
    meter.finish_update({"norm": 3.0})
    bounds = {"x/max_upper": 5.0, "is_min": 0.1}
    assert meter.summary() == {"a": 3.5, "loss": 5.0, "norm": 2.0, **bounds}


def test_a_number_may_be_a_tensor_of_one_dimension():
    """Objectives of one's own may return such statistics."""
    meter = Meter()
    meter.add({"mine": torch.tensor([4.0]), "other": torch.tensor(1.0)})
    meter.add({"mine": torch.tensor([6.0]), "other": torch.tensor(1.0)})
    assert meter.summary() == {"mine": 5.0, "other": 1.0}


@pytest.mark.parametrize("tokens", [1000, 20])
def test_the_likelihood_of_right_answers_rises(tokens):
    """Without advantages it is all that moves the policy; pieces share its denominator."""
    batch_options = {"microbatch_tokens": tokens}
    config = make_config({"positive_coef": 0.5}, batch_options, optim={"lr": 1e-3})
    learner = make_learner(config)
    batch = random_batch(learner.policy)
    batch = batch.replace(advantages=torch.zeros_like(batch.mask))
    right = batch.mask * (batch.accuracies >= 1)[:, None]
    before = learner.policy.score(batch).logp.detach()
    _, metrics = learner.update(batch, step=0)
    expected = -float((before * right).sum() / right.sum())
    assert metrics["actor/positive_nll"] == pytest.approx(expected, rel=1e-5)
    after = learner.policy.score(batch).logp.detach()
    assert float((after * right).sum()) > float((before * right).sum())
    still = make_learner(make_config(batch=batch_options))
    start = weights(still.policy.model)
    still.update(batch, step=0)
    assert largest_change(still.policy.model, start) == 0
