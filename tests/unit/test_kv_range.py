"""Centers of keys hold at every position, and an FP8 cache is closer to the model for them."""

from types import SimpleNamespace

import torch
from models import CPU, tiny_llama, tiny_policy

from qurl.rollout.local import LocalEngine
from qurl.rollout.local.architecture import Architecture
from qurl.rollout.local.kv_range import KVRange
from qurl.rollout.local.reference import rotate
from qurl.trainer.batches import pad
from qurl.types import Graded, Problem, SamplingParams

LONGEST = 4096
INV_FREQ = 1e6 ** (-torch.arange(16) / 16)
ARCH = Architecture(
    num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32, norm_eps=1e-6, windows=(None,)
)


def at_positions(keys, positions):
    angles = positions[:, None] * INV_FREQ
    return rotate(keys, angles.cos(), angles.sin())


def test_centers_and_ranges_hold_at_every_position():
    torch.manual_seed(0)
    bias = 50 * torch.randn(2, 32)
    weights = SimpleNamespace(arch=ARCH, device=CPU, inv_freq=INV_FREQ, max_positions=LONGEST)
    found = KVRange.empty(weights)
    k, v = bias + torch.randn(32, 2, 32), 3 * torch.randn(32, 2, 32)
    found.observe_(0, at_positions(k, torch.arange(32)), v)

    later = at_positions(bias + torch.randn(LONGEST, 2, 32), torch.arange(LONGEST))
    left = (later - found.center[0]).abs().amax((0, 2))
    assert (left < 1.5 * found.amax[0, 0]).all()
    assert torch.equal(found.amax[0, 1], v.abs().amax((0, 2)))
    slow = INV_FREQ.repeat(2) * LONGEST < 0.2
    assert (later - found.center[0])[..., slow].abs().amax() < 0.2 * later[..., slow].abs().amax()
    fast = INV_FREQ.repeat(2) > 0.3
    assert (found.center[0][:, fast].abs() < 0.35 * bias[:, fast].abs().amax()).all()


def test_keys_with_a_large_bias_cost_an_fp8_cache_little(monkeypatch):
    model = tiny_llama(attention_bias=True)
    for layer in model.model.layers:  # in the two channels of a head that turn slowest
        bias = layer.self_attn.k_proj.bias.data.unflatten(0, (2, 2, -1))
        bias[..., -1] = 20.0
    gaps = [mean_gap(model)]
    observe = KVRange.observe_

    def leave_where_they_are(self, layer, k, v):
        observe(self, layer, k, v)
        self.center[layer] = 0
        self.amax[layer, 0] = k.abs().amax((0, 2))

    monkeypatch.setattr(KVRange, "observe_", leave_where_they_are)
    gaps.append(mean_gap(model))
    assert gaps[0] < 0.3 * gaps[1]


def test_the_share_of_saturated_codes_is_seen_after_a_rollout(monkeypatch):
    problems = [Problem(str(i), [3 + i, 5, 7 + i]) for i in range(6)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    engine = LocalEngine(tiny_llama(), kv="fp8")
    assert engine.kv_saturated_frac is None
    engine.generate(problems, params)
    assert engine.kv_saturated_frac == 0.0
    monkeypatch.setattr("qurl.rollout.local.cache.KV_MARGIN", 2**-20)
    engine = LocalEngine(tiny_llama(), kv="fp8")  # a sync would refuse the jump of the gap
    engine.generate(problems, params)
    assert engine.kv_saturated_frac > 0.9
    plain = LocalEngine(tiny_llama())
    plain.generate(problems, params)
    assert plain.kv_saturated_frac is None


def mean_gap(model):
    policy = tiny_policy(model=model)
    engine = LocalEngine(model, policy.tokenizer, kv="fp8")
    problems = [Problem(str(i), [3 + i, 5, 7 + i]) for i in range(6)]
    rollouts = engine.generate(problems, SamplingParams(max_tokens=24, ignore_eos=True))
    batch = pad([Graded(r, [0.0], [{"accuracy": 0.0}]) for r in rollouts])
    return (
        float((policy.score(batch).logp - batch.logp_behav).detach().abs().sum()) / batch.num_tokens
    )
