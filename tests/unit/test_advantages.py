"""Advantages against worked numbers and their definitions."""

from contextlib import contextmanager

import pytest
import torch

from qurl.advantages import ESTIMATORS, compare, gae, group_advantages, token_rewards, whiten
from qurl.errors import ConfigError
from qurl.types import Corrected


def test_gae_vectors(vectors):
    for case in vectors("systems.json")["gae"]:
        rewards = torch.tensor(case["rewards"], dtype=torch.float64)
        values = torch.tensor(case["values"], dtype=torch.float64)
        advantages, returns = gae(rewards, values, gamma=case["gamma"], lam=case["lam"])
        assert advantages.tolist() == pytest.approx(case["advantages"], abs=1e-9)
        assert returns.tolist() == pytest.approx(case["returns"], abs=1e-9)


def test_gae_steps_over_masked_positions():
    """A gap in the middle gives the same numbers as the sequence without it."""
    rewards = torch.tensor([[0.0, 9.0, 0.0, 1.0, 7.0]]).double()
    values = torch.tensor([[0.3, 5.0, 0.2, 0.8, -3.0]]).double()
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    kept = mask[0].bool()
    expected, expected_returns = gae(rewards[0, kept], values[0, kept], gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[0, kept], expected)
    torch.testing.assert_close(returns[0, kept], expected_returns)
    assert advantages[0, ~kept].tolist() == [0.0, 0.0]


def test_whiten_uses_the_unbiased_variance():
    """[1, 2, 3]: mean 2, unbiased variance 1."""
    values = torch.tensor([[1.0, 2.0, 3.0, 99.0]]).double()
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert whiten(values, mask)[0].tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-7)


def test_group_vectors(vectors):
    for case in vectors("systems.json")["group_advantages"]:
        for kind in ("grpo", "dr_grpo", "rloo"):
            result = group_advantages(case["rewards"], kind)
            assert result.tolist() == pytest.approx(case[kind], abs=1e-9), kind


def test_equal_rewards_give_zero():
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce_pp"):
        result = group_advantages(torch.ones(3, 4).double(), kind)
        assert result.abs().max().item() < 1e-12


def test_rewards_may_be_integers():
    expected = group_advantages([[0.0, 1.0, 1.0, 1.0]], "dr_grpo")
    torch.testing.assert_close(group_advantages(torch.tensor([[0, 1, 1, 1]]), "dr_grpo"), expected)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1.1, 100.1])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_equal_rewards_in_fp32_give_zero(reward, kind):
    """A mean in FP32 is off by a digit, and so small a deviation does not hide it."""
    result = group_advantages(torch.full((3, 16), reward), kind)
    assert result.dtype == torch.float32
    assert result.abs().max().item() < 1e-6


def test_reinforce_pp_normalises_over_all_groups():
    """Groups [0, 2] and [5, 5]: centred -1, 1, 0, 0; unbiased variance 2/3."""
    result = group_advantages([[0.0, 2.0], [5.0, 5.0]], "reinforce_pp")
    expected = [-(1.5**0.5), 1.5**0.5, 0.0, 0.0]
    assert result.flatten().tolist() == pytest.approx(expected, abs=1e-7)


def test_ragged_groups_by_index():
    """Groups of two and of three, interleaved, equal the same groups alone."""
    rewards = torch.tensor([1.0, 5.0, 0.0, 6.0, 10.0]).double()
    group = torch.tensor([7, 2, 7, 2, 2])
    for kind in ("grpo", "dr_grpo", "rloo"):
        result = group_advantages(rewards, kind, group=group)
        torch.testing.assert_close(result[[0, 2]], group_advantages([1.0, 0.0], kind))
        torch.testing.assert_close(result[[1, 3, 4]], group_advantages([5.0, 6.0, 10.0], kind))


def test_groups_named_in_the_shape_of_the_rewards():
    rewards, group = torch.tensor([[1.0, 5.0], [0.0, 6.0]]), torch.tensor([[7, 2], [7, 2]])
    assert group_advantages(rewards, "dr_grpo", group=group).tolist() == [[0.5, -0.5], [-0.5, 0.5]]


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind = 'ppo' is not one of grpo"):
        group_advantages([1.0, 0.0], "ppo")


def _batch(**fields):
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]).double()
    defaults = {
        "token_ids": torch.zeros(2, 3, dtype=torch.int64),
        "lengths": torch.tensor([3, 2]),
        "mask": mask,
        "logp_behav": torch.zeros(2, 3),
        "rewards": torch.tensor([1.0, 0.0]).double(),
        "accuracies": torch.tensor([1.0, 0.0]).double(),
        "group": torch.tensor([0, 0]),
        "problem_ids": ["a", "a"],
        "temperature": 1.0,
        **dict.fromkeys(("logp_prox", "logp_ref", "values", "shrink"), torch.zeros(2, 3)),
        "entropy": torch.zeros(2, 3),
        "has_prox": torch.ones(2, dtype=torch.bool),
        "weight": torch.ones(2, 3),
    }
    return Corrected(**(defaults | fields))


def test_group_advantage_is_spread_over_the_response():
    batch = compare(_batch(), ESTIMATORS["dr_grpo"])
    assert batch.advantages.tolist() == [[0.0, 0.5, 0.5], [0.0, -0.5, 0.0]]


def test_outcome_lands_on_the_last_token_less_the_kl():
    batch = _batch(
        logp_prox=torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, 0.0]]).double(),
        logp_ref=torch.tensor([[0.0, -1.5, -2.0], [0.0, -0.5, 0.0]]).double(),
    )
    plain = token_rewards(batch)
    assert plain.tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    with_kl = token_rewards(batch, kl_coef=0.1)
    assert with_kl.flatten().tolist() == pytest.approx([0.0, -0.05, 1.0, 0.0, 0.05, 0.0])


def test_gae_in_a_batch():
    batch = compare(
        _batch(values=torch.tensor([[0.0, 0.25, 0.5], [0.0, 0.5, 0.0]]).double()), ESTIMATORS["gae"]
    )
    assert batch.advantages.flatten().tolist() == pytest.approx([0, 0.75, 0.5, 0, -0.5, 0])
    assert batch.returns.flatten().tolist() == pytest.approx([0, 1.0, 1.0, 0, 0.0, 0])


def test_an_estimate_that_fails_does_so_before_ranks_wait_for_each_other():
    """Else a rank whose own estimate failed would leave the others in a sum."""
    left = []

    @contextmanager
    def agreeing():
        try:
            yield
        except ConfigError:
            left.append("agreed")
            raise

    def fail(batch):
        raise ConfigError("no advantage")

    def pool(value):
        raise AssertionError("waits for other ranks")

    with pytest.raises(ConfigError):
        compare(_batch(), fail, is_whitened=True, pool=pool, agreeing=agreeing())
    assert left == ["agreed"]
