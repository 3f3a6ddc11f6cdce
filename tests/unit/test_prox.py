"""The first update of a step gives its own prox; in auto mode, the sampler may give the others'."""

import dataclasses
import math

import pytest
import torch
from models import build_learner, random_batch, tiny_policy

from qurl.advantages import ESTIMATORS, compare
from qurl.config import build_config
from qurl.correction import correct
from qurl.objectives import OBJECTIVES
from qurl.run.monitor import note
from qurl.seeds import generator
from qurl.trainer.batches import minibatches
from qurl.types import Batch

STEP = 3
OPTIM = {"lr": 1e-2, "eps": 1e-2}  # a large epsilon keeps AdamW from magnifying rounding


def make_config(algo=None, batch=None, **sections):
    return build_config(
        {
            "steps": 10,
            "algo": {"clip_high": 0.1} | (algo or {}),
            "batch": {"problems": 4, "minibatches": 4, "microbatch_tokens": 20} | (batch or {}),
            "sampling": {"max_tokens": 9, "group_size": 2},
            "critic": {"lr": 1e-2},
            "optim": OPTIM,
        }
        | sections
    )


def sample(noise=0.3, seed=0):
    """Eight rows, sampled by a policy whose log-probs are off by `noise`."""
    batch = random_batch(tiny_policy(), rows=8, seed=seed)
    gap = (batch.logp_behav - batch.logp_prox) * noise / 0.3
    batch = batch.replace(logp_behav=batch.logp_prox + gap)
    return Batch(**{f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)})


class Run:
    """One step as the loop makes it."""

    def __init__(self, config, batch=None, *, step=STEP, needs_prox=False):
        policy = tiny_policy()
        self.sizes = []  # rows of each forward without gradients
        real = policy.score

        def score(part, layout=None, **options):
            if not torch.is_grad_enabled():
                self.sizes.append(len(part))
            return real(part, layout, **options)

        policy.score = score
        reference = tiny_policy(seed=1).freeze_() if config.algo.kl_coef else None
        self.learner = build_learner(config, policy, reference, needs_prox=needs_prox)
        self.sampled = batch = sample() if batch is None else batch
        self.scored = self.learner.recompute(batch, step)
        corrected = self.learner.correct(self.scored)
        trainable = self.learner.compare(corrected, ESTIMATORS[config.algo.advantage])
        self.trained, self.metrics = self.learner.update(trainable, step)
        self.metrics |= self.learner.describe(self.trained, batch)

    def parameters(self):
        models = [self.learner.policy.model, self.learner.critic]
        return [p.detach() for model in models if model is not None for p in model.parameters()]


def first_rows(count=4, step=STEP):
    return minibatches(8, count, generator(0, "shuffle", step, 0))[0]


def assert_same_step(found, expected):
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert found.metrics.keys() == expected.metrics.keys()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=2e-5)
    for field in dataclasses.fields(found.trained):
        one, other = getattr(found.trained, field.name), getattr(expected.trained, field.name)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=field.name)


PPO = {"name": "ppo", "advantage": "gae", "whiten": True}
DAPO = {"name": "dapo", "clip_high": 0.28, "entropy_coef": 0.01, "dual_clip": 3.0}
ARMS = {
    "ppo": {"algo": PPO},
    "ppo with a reference": {"algo": PPO | {"kl_coef": 0.1}},
    "dapo": {"algo": DAPO},
    "weighted kl": {"algo": {"kl_coef": 0.1}, "experimental": {"weighted_kl": True}},
    "sppo": {"algo": {"symmetric": "sppo", "kl_coef": 0.1}},
    "sa2c": {"algo": {"symmetric": "sa2c"}},
    "sequence level": {"correction": {"level": "sequence"}},
    "icepop": {"correction": {"kind": "icepop", "icepop_low": 0.8, "icepop_high": 1.2}},
    "sequence icepop": {"correction": {"kind": "icepop", "level": "sequence"}},
    **{name: {"algo": {"objective": name, "cap": 1.2}} for name in OBJECTIVES},
}


# Mini-batches and epochs. Two epochs begin with one, so all arms need not have that alone too.
SHAPES = [(arm, shape) for arm in ARMS for shape in ((1, 1), (4, 2))]
SHAPES += [(arm, shape) for arm in ("ppo", "acr") for shape in ((4, 1), (1, 2))]


@pytest.mark.parametrize(("arm", "shape"), SHAPES, ids=str)
def test_the_first_update_needs_no_prox_forward(arm, shape):
    """Weights, metrics and batch are those of a step whose prox was computed for all rows."""
    num_minibatches, epochs = shape
    config = make_config(**ARMS[arm], batch={"minibatches": num_minibatches, "epochs": epochs})
    whole, deferred = Run(config, needs_prox=True), Run(config)
    first = first_rows(num_minibatches)
    assert sum(whole.sizes) == 8
    assert sum(deferred.sizes) == 8 - len(first)
    assert whole.scored.has_prox.all()
    assert (~deferred.scored.has_prox).nonzero().flatten().tolist() == sorted(first.tolist())
    assert torch.equal(deferred.scored.logp_prox[first], deferred.sampled.logp_behav[first])
    assert deferred.trained.has_prox.all()
    assert_same_step(deferred, whole)
    assert deferred.metrics["actor/entropy"] > 0.1
    assert deferred.metrics["rollout_corr/rollout_is_max"] > 1.5
    if not config.algo.kl_coef:
        assert torch.equal(deferred.trained.logp_ref, deferred.trained.logp_prox)


READERS = {
    "correction.reject": {"correction": {"reject": ["token_k1:0.5_2"]}},
    "correction.veto": {"correction": {"veto": 0.4}},
    "correction.batch_normalize": {"correction": {"batch_normalize": True}},
    "algo.kl_in_reward": {"algo": PPO | {"kl_in_reward": True, "kl_coef": 0.1}},
}


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_prox_before_the_update_gets_all_of_it(reader):
    run = Run(make_config(**READERS[reader]))
    assert sum(run.sizes) == 8
    assert run.scored.has_prox.all()
    assert torch.equal(run.trained.logp_prox, run.scored.logp_prox)
    if reader == "correction.batch_normalize":
        factor = run.metrics["rollout_corr/rollout_is_batch_norm_factor"]
        mismatch = (run.trained.logp_prox - run.trained.logp_behav).exp().clamp(max=2.0)
        assert factor == pytest.approx(mismatch[run.sampled.mask.bool()].mean().item(), rel=1e-5)
        assert run.metrics["rollout_corr/weight_mean"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("mode", ["decoupled", "auto"])
def test_a_step_that_trains_the_critic_only_has_a_prox_forward(mode):
    """No training forward of the policy follows that would give it."""
    options = {"critic": {"lr": 1e-2, "pretrain_steps": 3}, "correction": {"mode": mode}}
    config = make_config(PPO, **options)
    assert sum(Run(config, step=2).sizes) == 8
    assert sum(Run(config, step=3).sizes) == 6


def test_a_first_mini_batch_without_tokens_leaves_its_part_to_the_next():
    """Rows of an episode may have no trained token."""
    batch = sample()
    first, second, *_ = minibatches(8, 4, generator(0, "shuffle", STEP, 0))
    mask = batch.mask.index_fill(0, first, 0.0)
    batch = batch.replace(mask=mask, logp_behav=batch.logp_behav * mask)
    whole, deferred = Run(make_config(), batch, needs_prox=True), Run(make_config(), batch)
    assert deferred.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-5)
    assert deferred.metrics["actor/skipped_updates"] == 1
    for one, other in zip(deferred.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    auto = Run(make_config(correction={"mode": "auto"}), batch)
    assert auto.metrics["correction/gap_tail"] == pytest.approx(tail_of(batch, second))


def tail_of(batch, rows, clip_high=0.1):
    """Share of the tokens of these rows whose gap exceeds log(1 + clip_high), token by token."""
    with torch.no_grad():
        logp = tiny_policy().score(batch).logp
    gaps = [
        abs(float(logp[row, t] - batch.logp_behav[row, t]))
        for row in rows.tolist()
        for t in range(batch.mask.shape[1])
        if batch.mask[row, t]
    ]
    return sum(gap > math.log(1 + clip_high) for gap in gaps) / len(gaps)


AUTO = {"correction": {"mode": "auto"}}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_auto_takes_the_sampler_for_prox_while_they_agree(objective, epochs):
    """The step is that of a batch with behav for prox and weight 1 outside the first mini-batch."""
    algo, batch = {"objective": objective}, sample(noise=0.01)
    config = make_config(algo, {"epochs": epochs}, **AUTO)
    run, first = Run(config, batch), first_rows()
    assert run.sizes == []
    assert run.metrics["correction/prox_skipped"] == 1
    assert run.metrics["correction/gap_tail"] == 0
    is_first = torch.zeros(8, dtype=torch.bool).index_fill(0, first, True)
    assert torch.equal(run.trained.has_prox, is_first)
    assert torch.equal(run.trained.logp_prox[~is_first], batch.logp_behav[~is_first])
    assert torch.equal(run.trained.weight[~is_first], batch.mask[~is_first])

    with torch.no_grad():
        prox = torch.where(is_first[:, None], tiny_policy().score(batch).logp, batch.logp_behav)
    known = run.trained.replace(logp_prox=prox, has_prox=torch.ones_like(is_first))
    other = build_learner(make_config(algo, {"epochs": epochs}), tiny_policy())
    weight = torch.where(is_first[:, None], (prox - batch.logp_behav).exp(), 1.0) * batch.mask
    other.update(known.replace(weight=weight, shrink=torch.ones_like(weight)), STEP)
    pairs = zip(run.learner.policy.model.parameters(), other.policy.model.parameters(), strict=True)
    for one, expected in pairs:
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=0)


def test_metrics_of_a_skipped_prox_are_those_of_the_first_mini_batch():
    config, batch = make_config({"kl_coef": 0.1}, **AUTO), sample(noise=0.01)
    run, rows = Run(config, batch), first_rows()
    alone = build_learner(config, tiny_policy(), tiny_policy(seed=1).freeze_(), needs_prox=True)
    scored = alone.recompute(batch.select(rows), STEP)
    trainable = compare(correct(scored, cap=2.0), ESTIMATORS["grpo"])
    described = alone.describe(trainable, scored).items()
    expected = {name: value for name, value in described if "/advantages/" not in name}
    assert len(expected) > 20
    found = {name: run.metrics[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("arm", ARMS)
def test_auto_falls_back_before_the_weights_move(arm):
    """The step is then that of a prox forward for all rows."""
    sections = dict(ARMS[arm])
    auto = sections | {"correction": sections.get("correction", {}) | {"mode": "auto"}}
    whole, run = Run(make_config(**sections), needs_prox=True), Run(make_config(**auto))
    assert sum(run.sizes) == 6
    tail, is_skipped = (run.metrics.pop(f"correction/{x}") for x in ("gap_tail", "prox_skipped"))
    assert is_skipped == 0
    clip_high = make_config(**sections).algo.clip_high
    assert tail == pytest.approx(tail_of(run.sampled, first_rows(), clip_high))
    assert 0 < tail < 1
    assert run.trained.has_prox.all()
    assert_same_step(run, whole)


@pytest.mark.parametrize(("is_skipped", "kinds"), [(1.0, []), (0.0, ["fallback"])])
def test_a_step_that_falls_back_is_an_event(is_skipped, kinds):
    class Events(list):
        def event(self, kind, message, step):
            self.append((kind, message, step))

    events = Events()
    found = {"correction/gap_tail": 0.0123, "correction/prox_skipped": is_skipped}
    note(events, 7, {"reward/timeouts": 0, "actor/skipped_updates": 0} | found)
    assert [kind for kind, *_ in events] == kinds
    assert all("0.012 of" in message and step == 7 for _, message, step in events)


def test_the_batch_keeps_the_log_probs_of_each_rows_last_update():
    """R is 1 in the first mini-batch, whose weights had not moved, and not in the others."""
    trained = Run(make_config(batch={"minibatches": 4, "epochs": 1})).trained
    gap = ((trained.logp - trained.logp_prox) * trained.mask).abs().amax(-1)
    is_first = torch.zeros(8, dtype=torch.bool)
    is_first[first_rows(4)] = True
    assert (gap[is_first] == 0).all()
    assert (gap[~is_first] > 0).all()
