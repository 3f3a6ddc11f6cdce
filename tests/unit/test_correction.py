"""Importance weights, rejection and mismatch metrics, on numbers worked by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from qurl.correction import (
    LARGEST_TAIL,
    correct,
    correction_metrics,
    gap_tail,
    icepop_weights,
    importance_weights,
    mismatch_metrics,
)
from qurl.objectives import OBJECTIVES, parse_rejection
from qurl.types import Scored

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def make_batch(mismatch, mask=None):
    """A batch whose tokens have the given pi_prox / pi_behav."""
    log_mismatch = torch.tensor(mismatch, dtype=torch.float64).log()
    mask = torch.ones_like(log_mismatch) if mask is None else torch.tensor(mask).double()
    behav = torch.full_like(log_mismatch, -1.0)
    rows = len(log_mismatch)
    prox = behav + log_mismatch
    return Scored(
        token_ids=torch.zeros(log_mismatch.shape, dtype=torch.int64),
        lengths=torch.full((rows,), log_mismatch.shape[1]),
        mask=mask,
        logp_behav=behav,
        logp_prox=prox,
        logp_ref=prox,
        values=torch.zeros_like(prox),
        entropy=torch.zeros_like(prox),
        has_prox=torch.ones(rows, dtype=torch.bool),
        rewards=torch.zeros(rows),
        accuracies=torch.zeros(rows),
        group=torch.zeros(rows, dtype=torch.int64),
        problem_ids=[""] * rows,
        temperature=1.0,
    )


def correct_and_describe(scored, cap, **options):
    batch = correct(scored, cap=cap, **options)
    kept = {name: options[name] for name in ("batch_normalize", "level") if name in options}
    return batch, correction_metrics(batch, scored.mask, cap=cap, **kept)


def test_weights_by_hand():
    """rho = 4, 1, 1/4 with C = 2: w = 2, 1, 1/4 and r = 1/2, 1, 1."""
    weight, shrink = importance_weights(torch.tensor([4.0, 1.0, 0.25]).double().log(), 2.0)
    assert weight.tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert shrink.tolist() == pytest.approx([0.5, 1.0, 1.0])


def test_no_cap_truncates_nothing():
    weight, shrink = importance_weights(torch.tensor([1e5]).double().log(), None)
    assert weight.item() == pytest.approx(1e5)
    assert shrink.item() == 1.0


def test_icepop_keeps_the_band_only():
    weight, shrink = icepop_weights(torch.tensor([0.4, 0.5, 2.0, 6.0]).double().log(), 0.49, 5.0)
    assert weight.tolist() == pytest.approx([0.0, 0.5, 2.0, 0.0])
    assert shrink.tolist() == [1.0] * 4


def test_sequence_level_is_the_product():
    """rho = 2, 3 -> 6 on both tokens; C = 4: w = 4, r = 2/3."""
    batch = correct(make_batch([[2.0, 3.0]]), level="sequence", cap=4.0)
    assert batch.weight[0].tolist() == pytest.approx([4.0, 4.0])
    assert batch.shrink[0].tolist() == pytest.approx([2 / 3, 2 / 3])


def test_masked_tokens_have_no_weight_and_no_say():
    batch, metrics = correct_and_describe(
        make_batch([[2.0, 100.0]], [[1.0, 0.0]]), level="sequence", cap=4.0
    )
    assert batch.weight[0].tolist() == pytest.approx([2.0, 0.0])
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)


def test_batch_normalisation_divides_by_the_mean_and_leaves_r():
    batch, metrics = correct_and_describe(make_batch([[4.0, 1.0]]), batch_normalize=True, cap=2.0)
    assert batch.weight[0].tolist() == pytest.approx([2 / 1.5, 1 / 1.5])
    assert batch.shrink[0].tolist() == pytest.approx([0.5, 1.0])
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # rho per row: [1, 1], [2, 1/2] (geometric mean 1), [3, 3]
        ("token_k1:0.9_2.5", [[1, 1], [1, 0], [0, 0]]),
        ("token_k2:0.25", [[1, 1], [1, 1], [0, 0]]),  # ln(2)^2/2 = 0.24, ln(3)^2/2 = 0.60
        ("token_k3:0.25", [[1, 1], [0, 1], [0, 0]]),  # 2-ln2-1=0.31, 0.5+ln2-1=0.19
        ("seq_mean_k1:0.9_1.1", [[1, 1], [1, 1], [0, 0]]),
        ("seq_sum_k1:0.5_8", [[1, 1], [1, 1], [0, 0]]),
        ("seq_max_k1:0.9_2.5", [[1, 1], [0, 0], [0, 0]]),
        ("seq_max_k2:0.25", [[1, 1], [1, 1], [0, 0]]),
        ("seq_mean_k3:0.2", [[1, 1], [0, 0], [0, 0]]),  # (0.31 + 0.19) / 2 = 0.25
    ],
)
def test_rejection_rules(rule, expected):
    batch, metrics = correct_and_describe(
        make_batch([[1.0, 1.0], [2.0, 0.5], [3.0, 3.0]]), reject=(rule,), cap=2.0
    )
    assert batch.mask.tolist() == expected
    lost = 1 - sum(map(sum, expected)) / 6
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost)


def test_veto_drops_the_whole_sequence():
    batch, metrics = correct_and_describe(
        make_batch([[1.0, 1e-5], [1.0, 1e-3]]), veto=1e-4, cap=2.0
    )
    assert batch.mask.tolist() == [[0, 0], [1, 1]]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("geo:1", "does not start with one of token_k1"),
        ("token_k1:0.5", "needs a band"),
        ("token_k3:0.5_2", "needs one upper bound"),
        ("seq_mean_k1:2_0.5", "needs 0 < low < high"),
        ("token_k1:1.1_2", "needs a band with 1 in it"),
        ("seq_sum_k1:0.5_0.9", "needs a band with 1 in it"),
    ],
)
def test_bad_rules(rule, message):
    with pytest.raises(ValueError, match=message):
        parse_rejection(rule)


def test_every_mismatch_metric_by_hand():
    """pi_behav = 1/e everywhere; rho = 2, 1/2 in one sequence and 4 in another of one token.

    d = log rho = log 2, -log 2, 2 log 2; the ratios of the sequences are 1 and 4.
    """
    batch = make_batch([[2.0, 0.5], [4.0, 9.0]], [[1.0, 1.0], [1.0, 0.0]])
    metrics = mismatch_metrics(batch.logp_prox, batch.logp_behav, batch.mask, cap=1.5)
    log2, e = math.log(2), math.e
    assert metrics == pytest.approx(
        {
            "rollout_corr/kl": -2 * log2 / 3,  # -mean d
            "rollout_corr/k3_kl": (1.0 - 0.5 + 3.0 - 2 * log2) / 3,  # mean(rho - 1 - d)
            "rollout_corr/chi2_token": (4 + 0.25 + 16) / 3 - 1,  # mean(rho^2) - 1
            "rollout_corr/chi2_seq": (1 + 16) / 2 - 1,
            "rollout_corr/rollout_is_mean": 6.5 / 3,
            "rollout_corr/rollout_is_std": math.sqrt(20.25 / 3 - (6.5 / 3) ** 2),
            "rollout_corr/rollout_is_max": 4.0,
            "rollout_corr/rollout_is_min": 0.5,
            "rollout_corr/rollout_is_seq_max": 4.0,
            "rollout_corr/rollout_is_seq_min": 1.0,
            # mean log-probs of the sequences: behav -1, -1; prox -1, log 4 - 1
            "rollout_corr/training_ppl": (e + e / 4) / 2,
            "rollout_corr/rollout_ppl": e,
            "rollout_corr/log_ppl_diff": -log2,  # mean of behav - prox = 0, -log 4
            "rollout_corr/log_ppl_abs_diff": log2,
            # |pi_prox - pi_behav| = 1/e, 0.5/e, 3/e
            "training/rollout_probs_diff_mean": 1.5 / e,
            "training/rollout_probs_diff_max": 3 / e,
            "training/rollout_probs_diff_std": math.sqrt(10.25 / 3 - 1.5**2) / e,
            "rollout_corr/rollout_is_ratio_fraction_high": 2 / 3,  # rho > C
            "rollout_corr/rollout_is_ratio_fraction_low": 1 / 3,  # rho < 1 / C
        }
    )


def test_raw_and_truncated_are_both_reported():
    _, metrics = correct_and_describe(make_batch([[1e4, 1.0]]), cap=2.0)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1e4)
    assert metrics["rollout_corr/weight_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/truncated_frac"] == 0.5
    assert metrics["acr/shrink_min"] == pytest.approx(2e-4)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(9 / (2 * 5))


def test_metrics_of_unweighted_objectives_say_what_truncation_would_do():
    batch, metrics = correct_and_describe(
        make_batch([[1.0, 1e-5], [1.0, 3.0]]), veto=1e-4, cap=OBJECTIVES["ppo_prox"].cap(2.0)
    )
    assert batch.mask.tolist() == [[0, 0], [1, 1]]
    assert metrics["rollout_corr/truncated_frac"] == 0.5  # what truncation would do
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(9 / (2 * 5))
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25


def test_only_rows_with_a_prox_are_measured():
    """The second row has no prox: its mismatch of 8 counts nowhere."""
    given = make_batch([[4.0, 1.0], [8.0, 8.0]]).replace(has_prox=torch.tensor([True, False]))
    _, metrics = correct_and_describe(given, reject=("token_k1:0.5_3",), cap=2.0)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4.0)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert metrics["rollout_corr/weight_mean"] == pytest.approx(1.0)
    alone = make_batch([[4.0, 1.0]])
    assert metrics == correct_and_describe(alone, reject=("token_k1:0.5_3",), cap=2.0)[1]


def test_the_tail_of_the_gap_counts_both_sides():
    """Limit log 1.5: of the trained rho = 1, 1.4, 1.6, 0.5, the last two exceed it."""
    batch = make_batch([[1.0, 1.4, 1.6], [0.5, 9.0, 9.0]], [[1, 1, 1], [1, 0, 0]])
    assert gap_tail(batch, math.log(1.5)) == 0.5
    assert gap_tail(batch, math.log(2.1)) == 0


def test_the_limit_on_tails_is_between_bf16_and_int8_rollouts():
    runs = json.loads((RESULTS / "gap_tails.json").read_text())["runs"]
    tails = {name: run["tail"] for name, run in runs.items()}
    plain = tails.pop("math/bf16-seed0")
    assert plain < LARGEST_TAIL / 10
    assert min(tails.values()) > 10 * LARGEST_TAIL


def test_bypass_measures_nothing():
    given = make_batch([[1.0, 2.0]]).replace(has_prox=torch.tensor([False]))
    batch, metrics = correct_and_describe(given, mode="bypass", cap=2.0)
    assert metrics == {}
    assert batch.weight.tolist() == batch.shrink.tolist() == [[1.0, 1.0]]
    assert torch.equal(batch.mask, given.mask)
