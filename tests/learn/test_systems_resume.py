"""Runs with history, budgets, replay and sub-selection resume exactly, and their parts act."""

import json

import pytest
import torch
from models import as_flags, first_quick
from test_resume import TINY, rows, run_until, weights
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from qurl.config import load_config
from qurl.quant.linear import frozen_scales
from qurl.run.assembly import initial_model
from qurl.run.directory import read_jsonl
from qurl.train import train

pytestmark = pytest.mark.xdist_group("systems_resume")  # one warm start for all tests
NUM_PROBLEMS = 20
"""So few that a run of nine steps asks each of them several times."""
ARMS = {
    "greso, dynamic sampling, budgets in pieces, pods, frozen scales": {
        "quant.scales": "frozen",
        "sampling.select": "greso",
        "algo.dynamic_sampling": True,
        "algo.max_gen_rounds": 60,
        "sampling.budget": "e3",
        "sampling.chunk": 3,
        "batch.subselect": "pods",
        "systems.pods.keep": 3,
        "optim.base_batch": 16,
    },
    "dots, replay, thermostat, pairs, drafts": {
        "sampling.select": "dots",
        "systems.dots.references": 4,
        "sampling.replay": "recent",
        "sampling.thermostat": "e3",
        "sampling.keep_responses": True,
        "rollout.drafts": "histospec",
        "batch.subselect": "shuffle-r1",
        "systems.shuffle_r1.rounds": 2,
    },
    "adapters beside codes, noise": {
        "model.lora_rank": 4,
        "model.base": "nvfp4",
        "quant.format": "nvfp4",
        "quant.noise": "aqn",
        "systems.aqn.stages": 3,
        "optim.lr": 1e-3,
    },
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Flags of a warm-started model and of a file with few problems."""
    folder = tmp_path_factory.mktemp("start")
    words = ["--task.difficulty", "2", "--model.scratch.hidden_size", "32"]
    config = load_config(None, [*words, "--model.scratch.warm_start_steps", "150"])
    model = initial_model(config, folder, torch.device("cpu"))
    sums = [(i % 5, i // 5) for i in range(NUM_PROBLEMS)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in sums]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text('{"prompt": "9+9=", "answer": "18"}')
    files = {"task.path": folder / "train.jsonl", "task.eval_path": folder / "eval.jsonl"}
    scratch = ("model.scratch.hidden_size", "model.scratch.warm_start_steps", "task.difficulty")
    keys = {key: value for key, value in TINY.items() if key not in scratch}
    return keys | files | {"model.path": model, "task.name": "file", "task.reward": "exact"}


def flags(start, arm, run_dir):
    return as_flags(start | ARMS[arm] | {"run_dir": run_dir})


@pytest.mark.learn
@pytest.mark.parametrize("arm", first_quick(ARMS, 1))
def test_systems_resume_exactly(arm, start, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(load_config(None, flags(start, arm, whole)))
    words = flags(start, arm, broken)
    run_until(words, broken, 6)
    train(load_config(None, words))

    for uninterrupted, resumed in zip(rows(whole), rows(broken), strict=True):
        assert uninterrupted == resumed
    assert read_jsonl(whole / "samples.jsonl") == read_jsonl(broken / "samples.jsonl")
    assert_close(weights(broken), weights(whole), rtol=0, atol=0)

    last = rows(whole)[-1]
    if "greso" in arm:
        assert max(row.get("sampling/skipped_frac", 0) for row in rows(whole)) > 0
        assert last["sampling/group_size_min"] < 4 < last["sampling/group_size_max"]
        assert last["actor/lr"] == pytest.approx(TINY["optim.lr"] * 2**0.5)
        state = torch.load(whole / "checkpoints" / "step-000009" / "state.pt", weights_only=True)
        first = AutoModelForCausalLM.from_pretrained(start["model.path"], dtype=torch.float32)
        for name, scale in frozen_scales(first, "int8", torch.float32).items():
            assert torch.equal(state["scales"][name], scale)
    elif "noise" in arm:
        # Three stages: none, then from start to end. Quantization makes no gap, noise does.
        sigmas = [row["aqn/sigma"] for row in rows(whole) if "aqn/sigma" in row]
        assert sigmas == pytest.approx([0.0] * 3 + [1e-2] * 3 + [1e-4] * 3)
        assert max(row.get("sync/canary_gap", 0) for row in rows(whole)) < 1e-3
        gaps = [row["rollout_corr/k3_kl"] for row in rows(whole) if "aqn/sigma" in row]
        assert max(gaps[:3]) < 1e-8 < min(gaps[3:6])
    else:
        assert last["draft/tokens_per_step"] > 1
        assert last["replay/buffer"] > 0
        assert last["replay/age"] > 0
        assert len({row["sampling/temperature"] for row in rows(whole)[1:]}) > 5


@pytest.mark.learn
def test_drafts_change_nothing_but_the_speed(start, tmp_path):
    drafted, plain = tmp_path / "drafted", tmp_path / "plain"
    keys = start | {"sampling.keep_responses": True, "eval.every": 0}
    for run_dir, drafts in ((drafted, "histospec"), (plain, "off")):
        settings = keys | {"rollout.drafts": drafts, "run_dir": run_dir}
        train(load_config(None, as_flags(settings)))
    first, *_, last = rows(drafted)
    assert first["draft/step_frac"] == 0  # nothing is known in the first epoch
    assert last["draft/step_frac"] > 0.3
    assert last["draft/tokens_per_step"] > 1.2
    assert read_jsonl(drafted / "samples.jsonl") == read_jsonl(plain / "samples.jsonl")
    for with_drafts, without in zip(rows(drafted), rows(plain), strict=True):
        assert {k: v for k, v in with_drafts.items() if not k.startswith("draft/")} == without
    assert_close(weights(drafted), weights(plain), rtol=0, atol=0)
