"""A fork repeats the rest of its run to the bit, or differs by its keys alone."""

import json
import shutil

import pytest
from models import TINY_RUN, as_flags, logged_rows
from safetensors.torch import load_file
from torch.testing import assert_close

from qurl.cli import main
from qurl.config import load_config
from qurl.run.directory import read_jsonl
from qurl.train import train

TINY = TINY_RUN | {"steps": 4, "save.every": 2, "eval.every": 2, "eval.problems": 10}
pytestmark = pytest.mark.xdist_group("fork")  # one original for all tests


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("fork") / "run"
    return train(load_config(None, as_flags(TINY | {"run_dir": run_dir})))


def weights(run_dir):
    return load_file(run_dir / "checkpoints/step-000004/policy/model.safetensors")


def fork(original, target, *flags, step="2"):
    return main(["fork", str(original), "--at", step, "--run-dir", str(target), *flags])


def test_without_a_changed_key_it_repeats_the_run(original, tmp_path, capsys):
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    target = tmp_path / "the same"
    assert fork(original, target) == 0
    assert capsys.readouterr().out == f"{target}\ncontinue with: qurl train '{target}'\n"
    assert [row["step"] for row in logged_rows(target)] == [-1, 0, 1]
    assert main(["train", str(target)]) == 0
    assert logged_rows(target) == logged_rows(original)
    for name in ("samples.jsonl", "evals.jsonl"):
        assert read_jsonl(target / name) == read_jsonl(original / name)
    assert_close(weights(target), weights(original), rtol=0, atol=0)
    assert [event["kind"] for event in read_jsonl(target / "events.jsonl")][:2] == [
        "fork",
        "resume",
    ]
    assert {path: path.read_bytes() for path in original.rglob("*") if path.is_file()} == before


def test_a_changed_key_changes_what_comes_after_it(original, tmp_path):
    """The rollouts of the first step are the same; the updates made of them are not."""
    target = tmp_path / "hot"
    assert fork(original, target, "--optim.lr", "2e-3") == 0
    assert main(["train", str(target)]) == 0
    ours, theirs = logged_rows(target), logged_rows(original)
    assert ours[:3] == theirs[:3]
    assert ours[3]["reward/mean"] == theirs[3]["reward/mean"]
    assert (ours[3]["actor/lr"], theirs[3]["actor/lr"]) == (2e-3, 1e-3)
    assert ours[4]["actor/entropy"] != theirs[4]["actor/entropy"]
    event = read_jsonl(target / "events.jsonl")[0]
    assert event["changes"] == {"optim.lr": [1e-3, 2e-3]}
    assert (event["source"], event["step"]) == (str(original), 2)
    assert json.loads((target / "config.json").read_text())["optim"]["lr"] == 2e-3


@pytest.mark.parametrize("flags", [["--eval.problems", "12"], ["--seed", "1"]])
def test_other_held_out_problems_start_with_the_fork(original, tmp_path, flags):
    """Earlier answers were to other problems: a fall from them would be a false alarm."""
    target = tmp_path / "harder"
    assert fork(original, target, *flags, "--steps", "2") == 0
    assert not (target / "evals.jsonl").exists()
    assert main(["train", str(target)]) == 0
    marks = [("eval/full/accuracy" in row, "reward/mean" in row) for row in logged_rows(target)]
    assert marks == [(False, False), (False, True), (True, True)]
    assert {record["step"] for record in read_jsonl(target / "evals.jsonl")} == {2}


def test_rollouts_of_another_precision(original, tmp_path):
    """Blocks of rows are watched then, which the tracker's snapshot does not hold."""
    target = tmp_path / "blocks"
    assert fork(original, target, "--quant.format", "fp8-block", "--steps", "3") == 0
    assert main(["train", str(target)]) == 0
    assert [row["step"] for row in logged_rows(target)] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("flags", "step", "message"),
    [
        ([], "3", "has no checkpoint of step 3, only those of steps 2, 4"),
        (["--model.lora_rank", "4"], "2", "a fork cannot change model.lora_rank: its checkpoint"),
        (["--algo.advantage", "gae"], "2", "a fork cannot change algo.advantage"),
        (["--steps", "1"], "2", "steps = 1, but the fork starts after 2 steps already"),
        ([], "two", "--at 'two' is not the number of a step"),
        (["--task.grade_timeout", "0"], "2", "task.grade_timeout = 0.0: must be greater than 0"),
    ],
)
def test_what_cannot_be_forked(original, tmp_path, capsys, flags, step, message):
    assert fork(original, tmp_path / "never", *flags, step=step) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_an_existing_run_is_not_overwritten(original, capsys):
    assert fork(original, original) == 2
    assert "exists already; choose another --run-dir" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "../run", "checkpoints/.."])
def test_a_fork_of_the_present_folder_is_beside_it(original, monkeypatch, name):
    monkeypatch.chdir(original)
    assert main(["fork", name, "--at", "2"]) == 0
    target = original.with_name("run-at-2")
    assert target.is_dir()
    assert [path for path in original.rglob("*") if "-at-" in path.name] == []
    shutil.rmtree(target)


def test_a_damaged_checkpoint_is_not_forked(original, tmp_path, capsys):
    source = shutil.copytree(original, tmp_path / "source")
    (source / "checkpoints" / "step-000002" / "optimizer.pt").write_bytes(b"x")
    assert fork(source, tmp_path / "never") == 1
    assert "is damaged: optimizer.pt does not match its checksum; fork" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_what_is_no_run_is_not_forked(tmp_path, capsys):
    assert fork(tmp_path / "nowhere", tmp_path / "never") == 2
    assert "there is no recipe and no run at" in capsys.readouterr().err
