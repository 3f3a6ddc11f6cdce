"""Two processes of accelerate on a CPU, with an engine each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(Path(__file__).with_name("two_processes.py")), str(folder)]
    places = [os.environ.get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    ran = subprocess.run(
        [sys.executable, *launch, *script],
        env=os.environ | paths | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


@pytest.fixture(params=["ppo_prox", "acr"])
def ranks(request, folder):
    name = request.param
    found = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
    return name, folder, found


def test_processes_stay_one_policy(ranks):
    _, folder, (first, second) = ranks
    assert first["num_processes"] == second["num_processes"] == 2
    assert first["weights"] == second["weights"]
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved")
    assert not hasattr(saved.config, "qurl_uaq")


def test_a_group_may_be_cut_between_processes(ranks):
    """Three groups of eight, twelve rows each: both have half of the second group."""
    _, _, (first, second) = ranks
    shared = {prompt for prompt, _ in first["sampled"]} & {p for p, _ in second["sampled"]}
    assert shared  # once per generation
    own, others = ([ids for _, ids in rank["sampled"]] for rank in (first, second))
    assert not any(ids in others for ids in own if len(ids) > 3)


def test_ppo_prox_is_trls_loss_in_both(ranks):
    objective, _, found = ranks
    for rank in found:
        assert len(rank["losses"]) == 8
        is_equal = [ours == theirs for ours, theirs in rank["losses"]]
        assert all(is_equal) if objective == "ppo_prox" else not all(is_equal)


def test_metrics_cover_both(ranks):
    _, _, (first, second) = ranks
    for own, other in zip(first["log"], second["log"], strict=True):
        for name in ("rollout_corr/k3_kl", "rollout_corr/rollout_is_max", "actor/entropy"):
            assert own[name] == other[name]
        # TRL gathers, too: its mean over micro-batches is near our mean over tokens.
        assert own["actor/entropy"] == pytest.approx(own["entropy"], rel=0.05)
