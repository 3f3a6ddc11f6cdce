"""Checkpoints: exact, atomic, pruned, and honest about a disk that is full."""

import errno

import pytest
import torch
from models import CPU, build_learner, full_disk, random_batch, recompute, tiny_policy
from torch.testing import assert_close

from qurl.config import ModelConfig, build_config
from qurl.errors import CheckpointError
from qurl.run.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_saved_policy,
    save_checkpoint,
)

CONFIG = build_config(
    {
        "steps": 5,
        "algo": {"name": "ppo", "advantage": "gae"},
        "batch": {"problems": 3, "minibatches": 2},
        "optim": {"lr": 1e-2, "weight_decay": 0.1},
        "critic": {"lr": 1e-2},
    }
)


def make_learner(policy=None):
    return build_learner(CONFIG, policy or tiny_policy())


def update(learner, step):
    batch = recompute(learner, random_batch(learner.policy, seed=step), step)
    return learner.update(batch.replace(returns=batch.mask * (step + 1)), step)[1]


def resume(path):
    learner = make_learner(load_saved_policy(path, ModelConfig(), CPU))
    return learner, load_checkpoint(path, learner)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_learner_goes_on_to_the_bit(tmp_path):
    learner = make_learner()
    update(learner, 0)
    tracker = {"model.layers.0.self_attn.q_proj": torch.arange(6.0).reshape(2, 3)}
    torch.manual_seed(7)
    path = save_checkpoint(tmp_path, 1, learner, {"position": 12, "tracker": tracker}, keep=2)
    assert path == tmp_path / "step-000001"
    drawn = torch.rand(3)
    torch.manual_seed(99)

    resumed, state = resume(path)
    assert torch.equal(torch.rand(3), drawn), "torch's own random state is restored"
    assert (state["step"], state["position"]) == (1, 12)
    torch.testing.assert_close(state["tracker"], tracker)
    expected, found = update(learner, 1), update(resumed, 1)
    assert found == expected
    for ours, theirs in (
        (learner.policy.model, resumed.policy.model),
        (learner.critic, resumed.critic),
    ):
        assert_close(theirs.state_dict(), ours.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("optim", [{}, {"moments": "8bit"}, {"name": "hadam", "moments": "fp16"}])
def test_settings_of_the_optimizer_are_those_of_the_recipe(tmp_path, optim):
    """A fork may change them; what an optimizer has found out by itself it keeps."""
    old, new = (
        build_learner(build_config({"optim": optim | settings}), tiny_policy())
        for settings in (
            {"weight_decay": 0.1},
            {"weight_decay": 0.2, "eps": 1e-3, "betas": (0.5, 0.9)},
        )
    )
    update(old, 0)
    for group in old.optimizer.param_groups:
        group |= {name: 7 for name in ("scale", "good_steps") if name in group}
    path = save_checkpoint(tmp_path, 1, old, {"position": 0}, keep=1)
    load_checkpoint(path, new)
    matrices, norms = new.optimizer.param_groups[:2]
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.2, 0.0)
    assert (matrices["eps"], matrices["betas"]) == (1e-3, (0.5, 0.9))
    assert [matrices.get(name, 7) for name in ("scale", "good_steps")] == [7, 7]


def test_only_the_newest_are_kept(tmp_path):
    learner = make_learner()
    for step in (2, 9, 10, 1_000_000):
        save_checkpoint(tmp_path, step, learner, {}, keep=2)
    assert names(tmp_path) == ["step-000010", "step-1000000"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_saving_a_step_again_replaces_it(tmp_path):
    learner = make_learner()
    save_checkpoint(tmp_path, 1, learner, {"position": 1}, keep=2)
    path = save_checkpoint(tmp_path, 1, learner, {"position": 2}, keep=2)
    assert resume(path)[1]["position"] == 2
    assert names(tmp_path) == ["step-000001"]


def test_what_is_not_a_checkpoint_is_ignored(tmp_path):
    others = ("step-backup", "step-000004.old", "step-²", "notes")
    for name in (".step-000009.partial", "step-000003", *others):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == [tmp_path / "step-000003"]
    assert latest_checkpoint(tmp_path / "notes") is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def fail_in_torch_save(monkeypatch):
    real, calls = torch.save, []

    def torn(value, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"torn")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(value, path)

    monkeypatch.setattr(torch, "save", torn)


def fail_in_replace(monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qurl.run.checkpoint.os.replace", full)


@pytest.mark.parametrize("fail", [fail_in_torch_save, fail_in_replace])
def test_a_failed_save_leaves_the_one_before(tmp_path, monkeypatch, fail):
    learner = make_learner()
    first = save_checkpoint(tmp_path, 1, learner, {"position": 5}, keep=1)
    update(learner, 1)
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(tmp_path, 2, learner, {"position": 6}, keep=1)
    message = str(error.value)
    assert f"{tmp_path / 'step-000002'} could not be written" in message
    assert "No space left on device" in message
    assert "Nothing else was changed" in message
    assert names(tmp_path) == ["step-000001"]
    assert resume(first)[1]["position"] == 5


@pytest.mark.parametrize("size", [1_000, 20_000, 200_000])
def test_a_disk_that_takes_no_more(tmp_path, size):
    """Really fails in write(2): the weights, the critic or the optimizer, whichever is too long."""
    learner = make_learner()
    update(learner, 0)
    first = save_checkpoint(tmp_path, 1, learner, {}, keep=2)
    largest = max(p.stat().st_size for p in first.rglob("*"))
    assert largest > 200_000
    with full_disk(size), pytest.raises(CheckpointError, match="step-000002 could not be"):
        save_checkpoint(tmp_path, 2, learner, {}, keep=2)
    assert names(tmp_path) == ["step-000001"]
    resume(first)


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "state.pt", "critic.pt", "policy/model.safetensors"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "garbage"])
def test_an_unreadable_checkpoint_is_named(tmp_path, file, damage):
    path = save_checkpoint(tmp_path, 3, make_learner(), {}, keep=2)
    contents = (path / file).read_bytes()
    if damage == "missing":
        (path / file).unlink()
    else:
        kept = {"empty": b"", "torn": contents[: len(contents) // 2], "garbage": b"garbage"}
        (path / file).write_bytes(kept[damage])
    with pytest.raises(CheckpointError) as error:
        resume(path)
    message = str(error.value)
    assert message.startswith(f"checkpoint {path} cannot be read")
    assert "Remove that folder to resume from the one before it" in message
