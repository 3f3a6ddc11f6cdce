"""The demo's task with vLLM as its engine, end to end, and resumed."""

import json

import pytest

from qurl.cli import main

pytest.importorskip("vllm")
FLAGS = {
    "rollout.engine": "vllm",
    "rollout.vllm.options": "enforce_eager true kv_cache_memory_bytes 33554432",
    "model.scratch.heads": "2",  # heads of 32 channels
    "batch.problems": "16",
    "batch.minibatches": "2",
    "sampling.group_size": "8",
    "save.every": "1",
}


def train(run_dir, **changes) -> list[dict]:
    """Rows of metrics.jsonl."""
    flags = FLAGS | {"run-dir": str(run_dir)} | changes
    words = [word for key, value in flags.items() for word in (f"--{key}", *value.split())]
    assert main(["train", "recipes/arithmetic-cpu.toml", *words]) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_and_resumes(tmp_path):
    whole = train(tmp_path / "whole", steps="4", **{"eval.every": "0"})
    train(tmp_path / "cut", steps="2", **{"eval.every": "0"})
    resumed = train(tmp_path / "cut", steps="4", **{"eval.every": "0"})
    assert [row["step"] for row in resumed] == [0, 1, 2, 3]
    for row in whole:
        assert 0 < row["sync/canary_gap"] < 0.5
        assert row["rollout_corr/kl"] < 0.1
    assert any(row["actor/grad_norm"] > 0 for row in whole[:2]), "nothing was learned from"
    # The same weights, problems and seeds sample the same answers.
    for name in ("reward/mean", "response_length/mean", "actor/grad_norm"):
        assert [row[name] for row in resumed] == pytest.approx([row[name] for row in whole])


def test_evaluations_in_both_precisions(tmp_path):
    changes = {"steps": "1", "eval.every": "1", "eval.problems": "20", "save.every": "0"}
    rows = train(tmp_path / "run", **changes)
    assert [row["step"] for row in rows] == [-1, 0]
    for row in rows:
        assert {"eval/full/accuracy", "eval/int8/accuracy"} <= row.keys()


def test_heads_that_vllm_has_no_kernel_for(tmp_path, capsys):
    words = ["--run-dir", str(tmp_path / "run"), "--rollout.engine", "vllm"]
    words += ["--model.scratch.warm-start-steps", "1"]
    assert main(["train", "recipes/arithmetic-cpu.toml", *words]) != 0
    assert "heads of 16 channels" in capsys.readouterr().err
