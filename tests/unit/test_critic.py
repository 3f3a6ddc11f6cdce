"""The value model: what a value may depend on, and that it learns."""

import torch
from models import random_batch, tiny_policy

from qurl.trainer.critic import Critic


def awake(critic):
    """A critic whose head is not the zeros that it starts with."""
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-1, 1, 32)[None])
        critic.head.bias.fill_(0.5)
    return critic


def test_a_fresh_critic_says_zero():
    policy = tiny_policy()
    batch = random_batch(policy)
    values = Critic(policy)(policy.layout(batch))
    assert values.shape == batch.mask.shape
    assert (values == 0).all()


def test_the_value_of_a_token_is_read_before_it():
    policy = tiny_policy()
    batch, critic = random_batch(policy), awake(Critic(policy))
    changed = batch.token_ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 99
    batches = (batch, batch.replace(token_ids=changed))
    before, after = (critic(policy.layout(b)) for b in batches)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    later = batch.mask[:, 6].bool()
    assert later.any()
    assert (before[:, 6] != after[:, 6])[later].all()


def test_values_by_hand():
    """V_t = head(h_{t-1}), and 0 outside the mask."""
    policy = tiny_policy()
    batch, critic = random_batch(policy), awake(Critic(policy))
    states = policy.model.base_model(input_ids=batch.token_ids).last_hidden_state
    expected = states[:, :-1] @ torch.linspace(-1, 1, 32) + 0.5
    values = critic(policy.layout(batch))
    torch.testing.assert_close(values[:, 1:], expected * batch.mask[:, 1:])
    assert (values[:, 0] == 0).all()


def test_gradients_reach_head_and_backbone_but_not_the_policy():
    policy = tiny_policy()
    critic = awake(Critic(policy))
    critic(policy.layout(random_batch(policy))).square().sum().backward()
    assert all(p.grad is not None for p in critic.parameters())
    assert all(p.grad.abs().sum() > 0 for p in critic.parameters())
    assert all(p.grad is None for p in policy.model.parameters())
    shared = {p.data_ptr() for p in policy.model.parameters()}
    assert not shared & {p.data_ptr() for p in critic.parameters()}
