"""What a run remembers of its problems."""

import io

import numpy as np
import pytest
import torch
from models import group

from qurl.sampling.history import REMEMBERED, History, Outcome, Running


def test_a_running_mean_is_numpys_in_any_split():
    values = np.random.default_rng(0).normal(3, 2, 57)
    whole = Running().add(values.tolist())
    pieces = Running()
    for piece in np.split(values, [1, 2, 20, 20, 41]):
        pieces = pieces.add(piece.tolist())
    for found in (whole, pieces):
        assert found.count == 57
        assert found.mean == pytest.approx(values.mean(), rel=1e-12)


def test_a_group_leaves_its_accuracy_length_and_version():
    history = History(10)
    history.record(3, group([5], [[7], [8, 9, 9]], [1.0, 0.0]))
    assert history.outcomes(3) == [Outcome(0, 2, 0.5, 2.0, is_mixed=True)]
    assert history[3] == [0.5]
    assert history.total(3) == Running(2, 0.5)
    assert (list(history), len(history)) == ([3], 1)
    assert history.outcomes(4) == []
    assert history.total(4).count == 0


def test_accuracies_count_and_shaped_rewards_do_not():
    history = History(1)
    history.record(0, group([5], [[7], [8]], [0.0, -0.5], accuracies=[0, 0]))
    assert history.outcomes(0)[0].accuracy == 0


def test_single_groups_are_forgotten_and_totals_are_not():
    history = History(1)
    for i in range(REMEMBERED + 4):
        history.record(0, group([5], [[7], [8]], [float(i >= 4), 0.0]))
    assert history[0] == [0.5] * REMEMBERED
    assert history.total(0).count == 2 * (REMEMBERED + 4)
    assert history.total(0).mean == pytest.approx(REMEMBERED / 2 / (REMEMBERED + 4))


@pytest.mark.parametrize("keeps_responses", [True, False])
def test_a_history_survives_a_checkpoint(keeps_responses):
    history = History(10, keeps_responses=keeps_responses)
    history.num_taken = 23
    history.record(3, group([5], [[7], [8, 9]], [1.0, 0.0]))
    state = history.state_dict()
    history.record(3, group([5], [[1], [2]], [1.0, 1.0]))  # a state is not changed afterwards
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    resumed = History(10, keeps_responses=keeps_responses)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.outcomes(3) == [Outcome(0, 2, 0.5, 1.5, is_mixed=True)]
    assert resumed.total(3) == Running(2, 0.5)
    assert resumed.num_taken == 23
    kept = [tokens.tolist() for tokens in resumed.responses(3)]
    assert kept == ([[7], [8, 9]] if keeps_responses else [])


def test_checkpoints_of_earlier_versions_have_accuracies_only():
    history = History(4)
    history.load_state_dict({"num_taken": 6, "accuracies": {2: [0.5, 1.0]}})
    assert history[2] == [0.5, 1.0]
    assert history.total(2).mean == 0.75


def test_checkpoints_of_earlier_versions_may_have_more_numbers():
    """The deviations of accuracies; or fewer: not whether a group was mixed."""
    history = History(4)
    outcomes, totals = {2: ((3, 2, 0.5, 1.5),)}, {2: (2, 0.5, 0.5)}
    history.load_state_dict({"num_taken": 6, "outcomes": outcomes, "totals": totals})
    assert history.outcomes(2) == [Outcome(3, 2, 0.5, 1.5)]
    assert history.total(2) == Running(2, 0.5)
