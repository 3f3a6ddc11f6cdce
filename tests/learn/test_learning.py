"""Toy runs learn: every algorithm raises the reward with quantized rollouts, and ACR's arm too."""

import json
from random import Random
from statistics import fmean

import pytest
from models import as_flags, from_a_start

from qurl.config import load_config
from qurl.run.directory import read_jsonl
from qurl.train import train

TOY = {
    "threads": 1,
    "device": "cpu",
    "model.scratch.hidden_size": 32,
    "model.scratch.warm_start_steps": 120,
    "task.difficulty": 3,
    "batch.problems": 32,
    "sampling.max_tokens": 5,
    "sampling.group_size": 16,
    "optim.lr": 1.2e-3,
    "eval.every": 20,
    "eval.problems": 20,
}


def run(tmp_path, **settings):
    """Metrics rows of a toy run; keyword `a__b` is the key a.b."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    merged = from_a_start(TOY | {"run_dir": tmp_path / "run"} | named)
    path = train(load_config(None, as_flags(merged)))
    return [row for row in read_jsonl(path / "metrics.jsonl") if row["step"] >= 0]


def run_few(tmp_path, **settings):
    """The same with 16 problems, all asked at every step: learned soon, and no draw adds noise."""
    rng = Random(0)
    sums = [[rng.randrange(10) for _ in range(TOY["task.difficulty"])] for _ in range(16)]
    for name, terms in {"train": sums, "eval": [[9, 9, 9]]}.items():
        rows = [{"prompt": "+".join(map(str, t)) + "=", "answer": str(sum(t))} for t in terms]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"task__path": tmp_path / "train.jsonl", "task__eval_path": tmp_path / "eval.jsonl"}
    task = {"task__name": "file", "task__reward": "exact", **files}
    return run(tmp_path, batch__problems=16, sampling__group_size=8, **task, **settings)


def gain(rows, name="reward/accuracy", span=8):
    """Mean of the last rows less mean of the first."""
    values = [row[name] for row in rows if name in row]
    return fmean(values[-span:]) - fmean(values[:span])


@pytest.mark.learn
@pytest.mark.parametrize("format", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_grpo_learns_in_every_format(tmp_path, format):
    rows = run_few(tmp_path, steps=16, quant__format=format, algo__name="grpo")
    assert gain(rows, span=5) > 0.1
    largest = max(abs(row["rollout_corr/kl"]) for row in rows if "rollout_corr/kl" in row)
    assert largest < {"int8": 0.02, "fp8": 0.05}[format]


@pytest.mark.learn
def test_one_precision_flow_learns_without_correction(tmp_path):
    settings = {"quant__format": "fp8", "quant__backward": "all", "quant__kv": "fp8"}
    objective = {"algo__objective": "ppo_prox", "quant__unified": True}
    rows = run_few(tmp_path, steps=16, **objective, **settings)
    assert gain(rows, span=5) > 0.1
    assert max(abs(row["rollout_corr/kl"]) for row in rows) < 1e-6
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-5


@pytest.mark.learn
@pytest.mark.slow
def test_adapters_learn_in_an_int8_flow(tmp_path):
    settings = {"model__lora_rank": 8, "quant__unified": True, "algo__kl_coef": 1e-3}
    rows = run(tmp_path, steps=50, optim__lr=5e-3, optim__schedule="linear", **settings)
    assert gain(rows) > 0.1
    assert rows[0]["actor/ref_kl"] == 0 < rows[-1]["actor/ref_kl"]
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-5


@pytest.mark.learn
def test_adapters_learn_beside_a_base_in_nvfp4(tmp_path):
    """Without correction: the actor is the policy, but for the order of FP32 sums."""
    coded = {"model__lora_rank": 8, "model__base": "nvfp4", "quant__format": "nvfp4"}
    settings = {"optim__lr": 5e-3, "optim__schedule": "linear", "algo__objective": "ppo_prox"}
    rows = run(tmp_path, steps=30, eval__every=0, quant__track_rows=0, **coded, **settings)
    assert gain(rows) > 0.1
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4


@pytest.mark.learn
def test_dapo_learns_from_mixed_groups(tmp_path):
    rows = run_few(tmp_path, steps=16, algo__name="dapo", optim__warmup_steps=2)
    assert gain(rows, span=5) > 0.1
    kept = [row["sampling/groups_kept_frac"] for row in rows]
    assert 0 < min(kept) < 1


@pytest.mark.learn
def test_ppo_learns_and_its_critic_follows_the_returns(tmp_path):
    critic = {"critic__lr": 2e-3, "critic__pretrain_steps": 5}
    rows = run_few(tmp_path, steps=24, algo__name="ppo", **critic)
    assert gain(rows, span=5) > 0.1
    assert rows[0]["critic/value_mean"] < 0.5 * rows[0]["critic/return_mean"]
    for row in rows[-5:]:  # a fresh critic says 0
        assert row["critic/value_mean"] > 0.5 * row["critic/return_mean"]
    assert "actor/grad_norm" not in rows[0]  # value pre-training leaves the policy alone
    assert "actor/grad_norm" in rows[5]


@pytest.mark.learn
@pytest.mark.slow
def test_uaq_run_learns_and_records_its_updates(tmp_path):
    rows = run(tmp_path, steps=24, quant__update_scale=1.5)
    assert gain(rows) > 0.1
    for row in rows[1:]:
        assert row["uaq/update_norm"] > 0
        assert 0 < row["uaq/code_flip_frac"] < 1
        assert 0 < row["uaq/update_cosine"] <= 1
        assert 1e-6 < row["uaq/quant_error"] < 1e-3


@pytest.mark.learn
@pytest.mark.parametrize(("objective", "is_truncated"), [("decoupled", False), ("tis", True)])
def test_the_loop_truncates_the_weights_of_truncated_objectives_only(
    tmp_path, objective, is_truncated
):
    """INT4 makes a mismatch above C = 1.01; Eq. (4) must keep it, Eq. (5) must not."""
    rows = run(
        tmp_path,
        **{"steps": 2, "model__scratch__warm_start_steps": 20, "eval__every": 0},
        **{"quant__format": "int4", "algo__objective": objective, "algo__cap": 1.01},
    )
    assert len(rows) == 2
    for row in rows:
        assert row["rollout_corr/rollout_is_max"] > 1.02
        assert (row["rollout_corr/weight_max"] < 1.0101) == is_truncated
        assert (row["rollout_corr/truncated_frac"] > 0) == is_truncated


@pytest.mark.learn
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp"])
def test_the_other_algorithms_train_without_a_mismatch_in_full_precision(tmp_path, name):
    rows = run(tmp_path, steps=3, algo__name=name, quant__format="none", eval__every=0)
    assert max(abs(row["rollout_corr/kl"]) for row in rows) < 1e-5
    assert all(row["actor/grad_norm"] > 0 for row in rows)
