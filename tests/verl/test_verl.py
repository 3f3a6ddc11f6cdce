"""The policy loss in verl's own ppo_loss, and recipes in verl's own config.

`make test-verl` runs this in an environment of its own; `make test` does not.
"""

import logging
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, InstantiationException
from models import tiny_policy
from transformers import AutoModelForCausalLM
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.utils.losses import ppo_loss

from qurl.correction import weight_metrics
from qurl.errors import ConfigError
from qurl.integrations import verl as plugin
from qurl.losses import SURROGATES, count, policy_loss
from qurl.run.export import export, rescale

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "verl").glob("*.sh"))
USE = ("hydra.searchpath=[pkg://qurl.integrations.verl]", "+qurl=acr")
LOSS = "actor_rollout_ref.actor.policy_loss"
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
FIELDS = ("responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights")
B, P, T = 6, 4, 10  # sequences, prompt and response positions


def resolve(*overrides):
    """verl's own config with these overrides."""
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def actor(config, **changes):
    section = config.actor_rollout_ref.actor
    section = {**section, "ppo_micro_batch_size_per_gpu": 1, **changes}
    return omega_conf_to_dataclass(type(config)(section, parent=config.actor_rollout_ref))


@pytest.fixture(scope="module")
def config():
    return resolve(*USE)


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


def trainers_batch(samples, config):
    """What verl's trainer makes of the samples: a DataProto with its weights."""
    mask = samples["mask"]
    attention = torch.cat([torch.ones(B, P), mask], -1).long()
    tensors = {
        "input_ids": torch.ones(B, P + T, dtype=torch.long) * attention,
        "prompts": torch.ones(B, P, dtype=torch.long),
        "responses": torch.ones(B, T, dtype=torch.long) * mask.long(),
        "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1,
        "response_mask": mask,
        "old_log_probs": samples["logp_prox"] * mask,
        "rollout_log_probs": samples["logp_behav"] * mask,
        "advantages": samples["advantages"],
    }
    batch = DataProto.from_single_dict(tensors)
    return compute_rollout_correction_and_add_to_batch(batch, config.algorithm.rollout_correction)


def micro_batch(batch, rows, samples, is_nested, **info):
    """What verl's worker hands its loss: model output, data; and the leaf of the log-probs."""
    data = batch.select_idxs(rows).to_tensordict()
    mask = samples["mask"][rows].bool()
    if is_nested:  # as the trainers with a transfer queue send it
        lengths = {"prompts": [P] * len(rows)}
        for name in ("prompts", *FIELDS):
            ends = lengths.get(name, mask.sum(-1).tolist())
            parts = [row[:end] for row, end in zip(data[name], ends, strict=True)]
            data[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        tensordict_utils.assign_non_tensor(data, max_response_len=T)
    info = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, **info}
    tensordict_utils.assign_non_tensor(data, **info)
    logp = samples["logp"][rows].clone().requires_grad_()
    # Position t of the model's output scores token t + 1.
    shifted = torch.cat([torch.zeros(len(rows), P - 1), logp, torch.zeros(len(rows), 1)], -1)
    attention = torch.cat([torch.ones(len(rows), P), mask], -1).bool()
    return {"log_probs": shifted[attention]}, data, logp


def in_verl(actor_config, samples, config, rows=None, is_nested=False, **info):
    batch, _ = trainers_batch(samples, config)
    rows = torch.arange(B) if rows is None else rows
    output, data, logp = micro_batch(batch, rows, samples, is_nested, **info)
    loss, metrics = ppo_loss(actor_config, output, data)
    loss.backward()
    return loss.detach(), {k: v.aggregate() for k, v in metrics.items()}, logp.grad


def in_qurl(samples, **options):
    logp = samples["logp"].clone().requires_grad_()
    rest = (samples[name] for name in ("logp_prox", "logp_behav", "advantages", "mask"))
    loss, stats = policy_loss(logp, *rest, dual_clip=3.0, **options)
    loss.backward()
    return loss.detach(), stats, logp.grad


# The loss


def test_verl_loads_the_plug_in_by_itself(is_loaded_by_verl):
    assert is_loaded_by_verl, "the entry point verl.plugins"
    assert get_policy_loss_fn("qurl") is plugin.qurl_loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("objective", SURROGATES)
def test_the_loss_is_ours_in_verls_own_ppo_loss(config, samples, objective, mode):
    policy = {**config.actor_rollout_ref.actor.policy_loss, "objective": objective}
    theirs, _, their_gradient = in_verl(
        actor(config, policy_loss=policy, loss_agg_mode=mode), samples, config
    )
    ours, _, our_gradient = in_qurl(samples, objective=objective, aggregation=mode)
    assert (theirs - ours).abs() <= 1e-7 * ours.abs().clamp(min=1)
    torch.testing.assert_close(their_gradient, our_gradient, rtol=1e-5, atol=1e-8)
    assert their_gradient.abs().sum() > 0.1


@pytest.mark.parametrize("is_nested", [False, True])
def test_acr_to_the_last_digit(config, samples, is_nested):
    found = in_verl(actor(config), samples, config, is_nested=is_nested)[0]
    assert found == in_qurl(samples)[0]
    assert found != in_qurl(samples, objective="tis")[0], "some bound is widened"


@pytest.mark.parametrize("mode", [*MODES, "token-sum"])
def test_micro_batches_on_two_ranks_give_the_whole(config, samples, mode):
    """Ranks average their gradients; each adds up its micro-batches."""
    actor_config = actor(config, loss_agg_mode=mode, loss_scale_factor=32)
    info = {"batch_num_tokens": int(samples["mask"].sum()), "global_batch_size": B}
    parts = [([0, 3], [1]), ([5], [2, 4])]
    total = 0.0
    for rank in parts:
        for rows in rank:
            loss, _, _ = in_verl(
                actor_config, samples, config, torch.tensor(rows), dp_size=2, **info
            )
            total += float(loss) / len(parts)
    ours = {"aggregation": mode, "horizon": 32.0}
    if mode == "token-sum":
        ours = {"denominator": 1.0}
    torch.testing.assert_close(total, float(in_qurl(samples, **ours)[0]), rtol=1e-6, atol=1e-7)


def test_a_global_batch_must_be_known_with_several_ranks(config, samples):
    with pytest.raises(ValueError, match="batch_num_tokens must be in global_batch_info"):
        in_verl(actor(config), samples, config, dp_size=2)


@pytest.mark.parametrize("mode", [*MODES, "token-sum"])
def test_tis_is_verls_own_truncation(config, samples, mode):
    """verl's vanilla loss with weights that verl truncated at 2."""
    policy = {**config.actor_rollout_ref.actor.policy_loss, "objective": "tis"}
    ours = in_verl(actor(config, policy_loss=policy, loss_agg_mode=mode), samples, config)
    plain = resolve("algorithm.rollout_correction.rollout_is=token")
    theirs = in_verl(actor(plain, loss_agg_mode=mode), samples, plain)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-8)


def test_ppo_prox_is_verls_vanilla_loss(config, samples):
    policy = {**config.actor_rollout_ref.actor.policy_loss, "objective": "ppo_prox"}
    ours = in_verl(actor(config, policy_loss=policy), samples, config)
    plain = resolve()
    theirs = in_verl(actor(plain), samples, plain)
    assert ours[0] == theirs[0]
    for name in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        assert ours[1][name] == pytest.approx(theirs[1][name], abs=1e-6), name


def test_options_reach_the_loss(config, samples):
    policy = {**config.actor_rollout_ref.actor.policy_loss, "cap": 1.5, "acr_max_bound": 1.4}
    changes = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "policy_loss": policy}
    theirs = in_verl(actor(config, **changes), samples, config)[0]
    options = {"cap": 1.5, "acr_max_bound": 1.4, "clip_low": 0.1, "clip_high": 0.3}
    assert theirs == in_qurl(samples, **options)[0]
    assert theirs != in_qurl(samples)[0]


def half_tis(tokens):
    """An objective of one's own, named as module:function."""
    return 0.5 * SURROGATES["tis"](tokens)[0]


half_tis.facts = SURROGATES["tis"].facts


def test_an_objective_of_ones_own(config, samples, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    policy = {**config.actor_rollout_ref.actor.policy_loss, "objective": "test_verl:half_tis"}
    theirs = in_verl(actor(config, policy_loss=policy), samples, config)[0]
    torch.testing.assert_close(theirs, in_qurl(samples, objective="tis")[0] / 2)


def test_metrics_have_our_names(config, samples):
    _, metrics, _ = in_verl(actor(config), samples, config)
    _, stats, _ = in_qurl(samples)
    for name, value in stats.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-6), name
    assert metrics["acr/rescued_frac"] > 0
    mask = samples["mask"]
    assert weight_metrics(mask, mask, mask).keys() <= metrics.keys()
    rho = (samples["logp_prox"] - samples["logp_behav"]).exp()[mask.bool()]
    truncated = float((rho > 2).float().mean())
    assert 0 < truncated < 1
    assert metrics["rollout_corr/truncated_frac"] == pytest.approx(truncated)
    assert metrics["rollout_corr/weight_max"] == 2.0


def test_rejection_by_verl_takes_tokens_out(samples):
    rule = ("rollout_rs=token_k1", "rollout_rs_threshold='0.5_2.0'")
    config = resolve(*USE, *(f"algorithm.rollout_correction.{key}" for key in rule))
    rho = (samples["logp_prox"] - samples["logp_behav"]).exp()
    mask = samples["mask"] * ((rho >= 0.5) & (rho <= 2.0))
    assert 0 < count(mask, "token-mean") < count(samples["mask"], "token-mean")
    ours = in_qurl({**samples, "mask": mask})[0]
    torch.testing.assert_close(in_verl(actor(config), samples, config)[0], ours, rtol=1e-6, atol=0)


def test_log_probs_come_back_up_to_the_guard(config, samples):
    """verl clamps log rho to +-20, as QuRL does, so the loss is the same beyond it."""
    far = samples["logp_prox"] - 25.0 * samples["mask"]
    wild = {**samples, "logp_behav": far}
    batch, _ = trainers_batch(wild, config)
    weights = batch.batch["rollout_is_weights"]
    found = plugin.recover_behaviour(samples["logp_prox"], weights, samples["mask"])
    gap = (samples["logp_prox"] - found)[samples["mask"].bool()]
    torch.testing.assert_close(gap, torch.full_like(gap, 20.0))
    assert in_verl(actor(config), wild, config)[0] == in_qurl(wild)[0]
    batch, _ = trainers_batch(samples, config)
    weights = batch.batch["rollout_is_weights"]
    found = plugin.recover_behaviour(samples["logp_prox"], weights, samples["mask"])
    error = (found - samples["logp_behav"]).abs()[samples["mask"].bool()]
    assert error.max() < 1e-6


# Refusals


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("rollout_is_threshold=2.0", r"rollout_is_threshold = 2.0 cuts the weights; set 1e9"),
        ("rollout_is_threshold='0.5_5.0'", r"rollout_is_threshold = '0.5_5.0' cuts the weights"),
        ("rollout_is_threshold='0_9000000000'", r"rollout_is_threshold = '0_9000000000' cuts"),
        ("rollout_is_threshold=null", r"rollout_is_threshold = None cuts the weights"),
        ("rollout_is=sequence", r"rollout_is = 'sequence' must be token"),
        ("rollout_is=null", r"rollout_is = None must be token"),
        ("rollout_is_batch_normalize=true", r"rollout_is_batch_normalize = True rescales"),
        ("bypass_mode=true", r"bypass_mode = True takes pi_behav for pi_prox"),
    ],
)
def test_weights_that_are_not_raw_are_refused_before_training(setting, error):
    changed = resolve(*USE, f"algorithm.rollout_correction.{setting}")
    with pytest.raises(InstantiationException, match=error) as raised:
        actor(changed)
    assert isinstance(raised.value.__cause__, ConfigError)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("objective=acrr", r"objective = 'acrr' is not one of ppo_prox, .*, nor module:function"),
        ("objective=nowhere:f", r"objective = 'nowhere:f': there is no module 'nowhere'"),
        ("cap=0.5", r"cap = 0.5 must be at least 1, or null"),
        ("cap=nan", r"cap = nan must be at least 1, or null"),
        ("acr_max_bound=1", r"acr_max_bound = 1 must be above 1, or null"),
        ("loss_mode=vanilla", r"loss_mode = 'vanilla' must be qurl"),
        ("rollout_correction=null", r"policy_loss.rollout_correction is missing; add \+qurl=acr"),
    ],
)
def test_bad_options_are_refused_before_training(setting, error):
    with pytest.raises(InstantiationException, match=error):
        actor(resolve(*USE, f"{LOSS}.{setting}"))


def test_missing_weights_are_refused(config, samples):
    with pytest.raises(ConfigError, match="got no rollout_is_weights: set actor_rollout_ref"):
        in_verl(actor(config), samples, resolve())


def test_dropped_weights_are_refused(config, samples):
    other = resolve(
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold='0.5_2.0'",
    )
    with pytest.raises(ConfigError, match="a weight of 0 or NaN on a trained token"):
        in_verl(actor(config), samples, other)


def test_the_name_alone_is_refused(samples):
    plain = resolve(f"{LOSS}.loss_mode=qurl", "algorithm.rollout_correction.rollout_is=token")
    with pytest.raises(ConfigError, match=r"_target_ is not qurl\.integrations\.verl\.Qurl"):
        in_verl(actor(plain), samples, plain)


def test_a_line_is_logged_once(config, caplog):
    plugin._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="qurl.integrations.verl"):
        actor(config)
        actor(config)
    lines = [r.message for r in caplog.records if r.name == "qurl.integrations.verl"]
    assert len(lines) == 1
    assert lines[0].endswith("policy loss qurl, objective = acr, cap = 2.0")
    assert plugin.logger.isEnabledFor(logging.INFO), "verl's root logger stops at WARNING"


# Recipes


def overrides_of(recipe, folder, *more):
    """The arguments that the script hands to verl, found by a `python` that only prints them."""
    fake = folder / "python"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([recipe, *more], env=environment, capture_output=True, check=True)
    module, *overrides = done.stdout.decode().splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    return overrides


def test_there_is_a_recipe():
    assert [recipe.name for recipe in RECIPES] == ["gsm8k-grpo-acr.sh"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_verl_accepts_the_recipe(recipe, tmp_path):
    overrides = overrides_of(recipe, tmp_path, f"{LOSS}.cap=4")
    config = resolve(*overrides)
    validate_config(config, use_reference_policy=False, use_critic=False)
    options = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    assert (options.objective, options.cap) == ("acr", 4)
    updates = config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert updates > 1, "with one update per batch acr is tis"
    assert config.actor_rollout_ref.rollout.calculate_log_probs


def test_a_wrong_key_in_a_recipe_would_be_found(tmp_path):
    overrides = overrides_of(RECIPES[0], tmp_path, "actor_rollout_ref.rollout.quantisation=fp8")
    with pytest.raises(ConfigCompositionException, match="quantisation"):
        resolve(*overrides)


# UAQ


def test_uaq_through_verls_checkpoint_and_merger(tmp_path):
    """rescale, then what verl saves and merges (in BF16), then export: the model comes back."""
    original = tiny_policy()
    original.save(tmp_path / "model")
    scaled = rescale(str(tmp_path / "model"), tmp_path / "scaled", 1.5)
    saved, merged = tmp_path / "global_step_1" / "actor", tmp_path / "merged"
    saved.mkdir(parents=True)
    (saved / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 1}')
    model = AutoModelForCausalLM.from_pretrained(scaled, dtype=torch.float32)
    torch.save(model.state_dict(), saved / "model_world_size_1_rank_0.pt")
    settings = {"backend": "fsdp", "local_dir": str(saved), "target_dir": str(merged)}
    options = ModelMergerConfig("merge", hf_model_config_path=str(scaled), **settings)
    FSDPModelMerger(options).merge_and_save()
    plain = AutoModelForCausalLM.from_pretrained(export(merged, tmp_path / "plain", "float32"))
    assert not hasattr(plain.config, "qurl_uaq")
    for name, weight in original.model.state_dict().items():
        error = (plain.state_dict()[name] - weight).abs() / weight.abs().clamp(min=1e-6)
        assert error.max() <= 2**-8, name
    assert math.isclose(model.config.qurl_uaq["scale"], 1.5)
