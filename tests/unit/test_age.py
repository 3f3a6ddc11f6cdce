"""Rollouts of older weights: what a checkpoint keeps of them, and the parts of their mismatch."""

import io
import math

import pytest
import torch

from qurl.sampling import Sampled
from qurl.sampling.age import NUM_ROWS, age_metrics, rescore
from qurl.trainer.batches import pad, spread
from qurl.types import Completion, Graded, Problem, Rollout, Trained


def sampled(num_groups, *, version=3, temperature=1.0):
    """Groups of two completions, of two tokens and of one, behind a prompt of two."""
    found = []
    for index in range(num_groups):
        completions = [
            Completion((7, 8), (-1.0, -2.0), "ab", "stop", versions=(version, version)),
            Completion((9,), (-0.5,), "c", "length", versions=(version,)),
        ]
        problem = Problem(f"p{index}@1", (5, 6), "ab", {"prompt": "5 6"})
        rollout = Rollout(problem, completions, version, temperature)
        details = [{"accuracy": 1.0, "timed_out": 0.0}, {"accuracy": 0.0, "timed_out": 0.0}]
        found.append(Graded(rollout, [1.0, -0.5], details))
    return found


def train_on(batch, shift):
    """The batch as trained, with log pi_prox = log pi_behav + shift on the trained tokens."""
    zeros, ones = torch.zeros_like(batch.mask), torch.ones_like(batch.mask)
    prox = batch.logp_behav + shift * batch.mask
    names = ("logp_ref", "values", "entropy", "advantages", "returns")
    added = dict.fromkeys(names, zeros) | {"logp_prox": prox, "logp": prox, "shrink": ones}
    has_prox = torch.ones(len(batch), dtype=torch.bool)
    return batch.into(Trained, **added, weight=ones, has_prox=has_prox)


class Shifted:
    """An engine whose newest weights give each token `shift` more than the batch has."""

    def __init__(self, batch, shift):
        self.batch, self.shift, self.asked = batch, shift, []

    def score(self, token_ids):
        self.asked.append(list(token_ids))
        length = len(token_ids)
        rows = self.batch.token_ids[:, :length].tolist()
        row = next(i for i, ids in enumerate(rows) if ids == token_ids)
        return self.batch.logp_behav[row, 1:length] + self.shift


def test_the_mismatch_is_the_sum_of_age_and_quantization():
    """Age moves log-probs by 0.3 and quantization by -0.1, so rho = exp(0.2) everywhere."""
    graded = sampled(2)
    batch = pad(graded)
    rescored = rescore(Shifted(batch, 0.3), batch, longest=100)
    metrics = age_metrics(graded, 4, rescored, train_on(batch, 0.2))
    assert metrics == {
        "rollout_corr/age": 1.0,
        "rollout_corr/kl_age": pytest.approx(-0.3),
        "rollout_corr/kl_quant": pytest.approx(0.1),
        "rollout_corr/k3_kl_age": pytest.approx(math.exp(0.3) - 0.3 - 1),
        "rollout_corr/k3_kl_quant": pytest.approx(math.exp(-0.1) + 0.1 - 1, rel=1e-5),
    }


def test_few_rows_are_scored_and_only_their_beginning():
    """Rows of 4 and 3 tokens, of which the first 3 are scored: one trained token in each."""
    batch = pad(sampled(NUM_ROWS))
    engine, rows = Shifted(batch, 0.3), spread(NUM_ROWS, len(batch))
    assert (rows[0], rows[-1]) == (0, len(batch) - 1)
    rescored = rescore(engine, batch.select(rows), longest=3)
    assert rescored is not None
    assert len(engine.asked) == NUM_ROWS < len(batch)
    assert {len(ids) for ids in engine.asked} == {3}
    assert rescored.mask.sum(-1).tolist() == [1.0] * NUM_ROWS


def test_other_temperatures_and_rows_without_a_prox_only_have_an_age():
    graded = sampled(1, temperature=0.7)
    batch = pad(graded)
    assert rescore(Shifted(batch, 0.3), batch, longest=100) is None
    assert age_metrics(graded, 3, None, train_on(batch, 0.2)) == {"rollout_corr/age": 0.0}
    batch = pad(graded := sampled(1))
    rescored = rescore(Shifted(batch, 0.3), batch, longest=100)
    bypassed = train_on(batch, 0.0).replace(has_prox=torch.zeros(len(batch), dtype=torch.bool))
    assert age_metrics(graded, 4, rescored, bypassed) == {"rollout_corr/age": 1.0}


def test_rollouts_come_back_from_a_checkpoint_as_they_were():
    everything = sampled(3)
    before = Sampled([everything[2], everything[0]], everything, {"reward/mean": 0.25})
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = Sampled.load(torch.load(file, weights_only=True))
    assert after.metrics == before.metrics
    assert [g.rollout.problem.id for g in after.graded] == ["p2@1", "p0@1"]
    assert all(any(kept is found for found in after.everything) for kept in after.graded)
    one, other = (vars(pad(found.graded)) for found in (before, after))
    for name in ("token_ids", "lengths", "mask", "logp_behav", "rewards", "accuracies"):
        assert torch.equal(one[name], other[name]), name
    for one, other in zip(everything, after.everything, strict=True):
        assert (one.rewards, one.details) == (other.rewards, other.details)
        assert one.rollout.version == other.rollout.version
        texts = [[(c.text, c.finish) for c in g.rollout.completions] for g in (one, other)]
        assert texts[0] == texts[1]
