"""The policy loss as SkyRL's worker calls it, beside SkyRL's own losses.

`make test-skyrl` runs this in an environment of its own; `make test` does not.
"""

import re
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.train.config import AlgorithmConfig
from skyrl.train.entrypoints import main_base

from qurl.correction import mismatch_metrics, weight_metrics
from qurl.errors import ConfigError
from qurl.integrations import skyrl as plugin
from qurl.losses import SURROGATES, policy_loss

B, T = 6, 10
HORIZON = 32
REDUCTIONS = {
    "token_mean": {"aggregation": "token-mean"},
    "sequence_mean": {"aggregation": "seq-mean-token-mean"},
    "seq_mean_token_sum_norm": {"aggregation": "seq-mean-token-sum-norm", "horizon": HORIZON},
}
ENTRY = "trainer.override_entrypoint=qurl.integrations.skyrl"


@pytest.fixture(scope="module")
def samples():
    """Log-probs of three policies, with some weights far above C and some ratios out of bounds."""
    generator = torch.Generator().manual_seed(10)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    lengths = torch.tensor([10, 3, 7, 1, 5, 10])
    prox = -noise(B, T).abs() - 0.05
    return {
        "mask": (torch.arange(T) < lengths[:, None]).float(),
        "logp_prox": prox,
        "logp_behav": prox - 0.8 * noise(B, T),
        "logp": prox + 0.3 * noise(B, T),
        "advantages": noise(B, 1).expand(B, T).contiguous(),
    }


def configure(*overrides):
    """The algorithm section as SkyRL parses it."""
    words = [f"trainer.algorithm.{word}" for word in overrides]
    return plugin.QurlTrainConfig.from_cli_overrides(words).trainer.algorithm


def in_skyrl(config, samples, reduction="token_mean", rows=None):
    """As `PolicyWorkerBase` does it: reduce the advantages of a mini-batch, then call the loss."""
    advantages = apply_loss_reduction_to_advantages_minibatch(
        samples["advantages"], samples["mask"], reduction, 1, HORIZON
    )
    rows = slice(None) if rows is None else rows
    logp = samples["logp"][rows].clone().requires_grad_()
    loss, metrics = PolicyLossRegistry.get(config.policy_loss_type)(
        logp,
        samples["logp_prox"][rows],
        advantages[rows],
        config=config,
        loss_mask=samples["mask"][rows],
        rollout_logprobs=samples["logp_behav"][rows],
    )
    loss.backward()
    return loss.detach(), metrics, logp.grad


def in_qurl(samples, **options):
    logp = samples["logp"].clone().requires_grad_()
    rest = (samples[name] for name in ("logp_prox", "logp_behav", "advantages", "mask"))
    loss, stats = policy_loss(logp, *rest, **options)
    loss.backward()
    return loss.detach(), stats, logp.grad


# The loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("objective", SURROGATES)
def test_the_loss_is_ours(samples, objective, reduction):
    config = configure(f"qurl.objective={objective}")
    theirs, _, their_gradient = in_skyrl(config, samples, reduction)
    ours, _, our_gradient = in_qurl(samples, objective=objective, **REDUCTIONS[reduction])
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(their_gradient, our_gradient, rtol=1e-5, atol=1e-8)
    assert their_gradient.abs().sum() > 0.01


def test_without_a_reduction_the_sum_is_ours_to_the_last_digit(samples):
    rest = (samples[name] for name in ("logp_prox", "logp_behav", "advantages", "mask"))
    ours, _ = policy_loss(samples["logp"], *rest, denominator=1.0)
    theirs, _ = plugin.qurl_loss(
        samples["logp"],
        samples["logp_prox"],
        samples["advantages"],
        configure(),
        loss_mask=samples["mask"],
        rollout_logprobs=samples["logp_behav"],
    )
    assert theirs == ours


def test_micro_batches_add_up(samples):
    parts = [torch.tensor(rows) for rows in ([0, 3], [1], [2, 4, 5])]
    total = sum(float(in_skyrl(configure(), samples, rows=rows)[0]) for rows in parts)
    assert total == pytest.approx(float(in_qurl(samples)[0]), abs=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tis_is_skyrls_own_truncation(samples, reduction):
    theirs = AlgorithmConfig(policy_loss_type="regular")
    theirs.off_policy_correction.tis_ratio_type = "token"
    assert theirs.off_policy_correction.token_tis_ratio_clip_high == 2.0
    expected = in_skyrl(theirs, samples, reduction)
    found = in_skyrl(configure("qurl.objective=tis"), samples, reduction)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-8)
    clipped = found[1]["rollout_corr/truncated_frac"]
    assert clipped == pytest.approx(expected[1]["tis_token_clip_high_ratio"])
    assert clipped > 0


@pytest.mark.parametrize("kind", ["regular", "dual_clip"])
def test_ppo_prox_is_skyrls_own_loss(samples, kind):
    far = {**samples, "logp": samples["logp"] + 1.5}
    expected = in_skyrl(AlgorithmConfig(policy_loss_type=kind), far)[0]
    options = ("qurl.objective=ppo_prox", f"qurl.dual_clip={kind == 'dual_clip'}")
    found = in_skyrl(configure(*options), far)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    others = ("qurl.objective=ppo_prox", f"qurl.dual_clip={kind != 'dual_clip'}")
    assert (in_skyrl(configure(*others), far)[0] - expected).abs() > 0.01


def test_options_reach_the_loss(samples):
    config = configure(
        "qurl.cap=1.5", "qurl.acr_max_bound=1.4", "eps_clip_low=0.1", "eps_clip_high=0.3"
    )
    options = {"cap": 1.5, "acr_max_bound": 1.4, "clip_low": 0.1, "clip_high": 0.3}
    expected = in_qurl(samples, **options)[0]
    torch.testing.assert_close(in_skyrl(config, samples)[0], expected, rtol=1e-6, atol=1e-7)
    assert (expected - in_qurl(samples)[0]).abs() > 1e-3


def test_metrics_have_our_names(samples):
    _, metrics, _ = in_skyrl(configure(), samples)
    _, stats, _ = in_qurl(samples)
    mask, rest = samples["mask"], (samples["logp_prox"], samples["logp_behav"])
    expected = {name: float(value) for name, value in stats.items()}
    expected |= mismatch_metrics(*rest, mask, cap=2.0)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert weight_metrics(mask, mask, mask).keys() <= metrics.keys()
    assert metrics["acr/rescued_frac"] > 0


def test_a_micro_batch_without_tokens_reports_under_the_same_names(samples):
    """SkyRL pads with such micro-batches, and reduces metrics over ranks name by name."""
    empty = {**samples, "mask": torch.zeros(B, T)}
    loss, metrics, gradient = in_skyrl(configure(), empty)
    assert loss == 0
    assert not gradient.any()
    assert metrics.keys() == in_skyrl(configure(), samples)[1].keys()
    assert metrics["rollout_corr/kl"] == 0
    assert metrics["rollout_corr/weight_max"] == 1


def test_skyrls_masks_take_tokens_out(samples):
    rho = (samples["logp_prox"] - samples["logp_behav"]).exp()
    mask = samples["mask"] * ((rho >= 0.5) & (rho <= 2.0))
    assert 0 < mask.sum() < samples["mask"].sum()
    bounds = ("low=0.5", "high=2.0")
    config = configure(*(f"off_policy_correction.token_mask_is_threshold_{b}" for b in bounds))
    found = in_skyrl(config, samples)[0]
    kept = in_qurl({**samples, "mask": mask}, denominator=float(samples["mask"].sum()))[0]
    torch.testing.assert_close(found, kept, rtol=1e-6, atol=1e-7)


# Refusals


def test_missing_log_probs_are_refused(samples):
    with pytest.raises(ConfigError, match=r"set generator\.sampling_params\.logprobs = 1"):
        plugin.qurl_loss(*(samples[n] for n in ("logp", "logp_prox", "advantages")), configure())


def test_the_name_alone_is_refused(samples):
    with pytest.raises(ConfigError, match=re.escape(ENTRY)):
        in_skyrl(AlgorithmConfig(policy_loss_type="qurl"), samples)


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("off_policy_correction.tis_ratio_type=token", "would weigh tokens a second time"),
        ("use_tis=true", "would weigh tokens a second time"),
        ("qurl.objective=acrr", r"qurl\.objective = 'acrr' is not one of ppo_prox, "),
        ("qurl.cap=0.5", r"qurl\.cap = 0.5 must be at least 1, or null"),
        ("qurl.acr_max_bound=1.0", r"qurl\.acr_max_bound = 1.0 must be above 1, or null"),
        ("qurl.kap=2", "kap"),
    ],
)
def test_bad_options_are_refused_before_training(word, error):
    with pytest.raises(ValueError, match=error):
        configure(word)


# The way to the workers


@pytest.fixture
def remote(monkeypatch):
    """What would be started by Ray, instead of starting it."""
    sent = []
    monkeypatch.setattr(main_base, "initialize_ray", lambda config: None)
    monkeypatch.setattr(main_base, "skyrl_entrypoint", type("Remote", (), {"remote": sent.append}))
    monkeypatch.setattr(main_base.ray, "get", lambda _: None)
    return sent


def test_skyrls_entry_point_comes_to_ours(monkeypatch, remote):
    words = [ENTRY, "trainer.algorithm.qurl.cap=3.0", "trainer.algorithm.eps_clip_high=0.28"]
    words += ["trainer.placement.policy_num_gpus_per_node=1", "trainer.policy.model.path=m"]
    words += ["generator.inference_engine.num_engines=1", "trainer.logger=console"]
    words += ["trainer.placement.critic_num_gpus_per_node=1", "trainer.train_batch_size=8"]
    words += ["trainer.placement.ref_num_gpus_per_node=1", "trainer.policy_mini_batch_size=4"]
    monkeypatch.setattr(sys, "argv", ["main_base", *words])
    main_base.main()
    (config,) = remote
    algorithm = config.trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.qurl.objective) == ("qurl", "acr")
    assert (algorithm.qurl.cap, algorithm.eps_clip_high) == (3.0, 0.28)
    assert algorithm.policy_loss_type not in ppo_utils.LOSSES_WITHOUT_OLD_LOGPROBS


def test_workers_get_the_loss_as_skyrl_sends_it(samples, tmp_path):
    """Its registry and Ray send functions and configurations by cloudpickle."""
    advantages = samples["advantages"] / samples["mask"].sum()
    tensors = (samples["logp"], samples["logp_prox"], advantages)
    loss, others = PolicyLossRegistry.get("qurl"), (samples["mask"], samples["logp_behav"])
    file = tmp_path / "sent"
    file.write_bytes(cloudpickle.dumps((loss, (*tensors, configure(), *others))))
    code = "import sys, cloudpickle; f, x = cloudpickle.load(open(sys.argv[1], 'rb'))"
    command = [sys.executable, "-c", f"{code}; print(float(f(*x)[0]))", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = float(in_skyrl(configure(), samples)[0])
    assert float(done.stdout.split()[-1]) == pytest.approx(expected, abs=1e-7)


def test_the_page_names_what_exists():
    page = (Path(__file__).parents[2] / "docs" / "skyrl.md").read_text()
    assert ENTRY in page
