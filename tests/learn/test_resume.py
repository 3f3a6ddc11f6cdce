"""Killed at any moment and resumed, a run gives the same metrics and weights, to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from models import TINY_RUN, as_flags, first_quick, from_a_start, logged_rows
from safetensors.torch import load_file
from torch.testing import assert_close

from qurl.config import load_config
from qurl.errors import ConfigError, ModelError
from qurl.run.directory import read_jsonl
from qurl.run.evaluation import evaluate
from qurl.run.export import export
from qurl.train import train

SRC = Path(__file__).parents[2] / "src"
STEPS = 9
TINY = TINY_RUN | {"steps": STEPS, "save.every": 2, "eval.every": 3, "eval.problems": 10}
ARMS = {
    "dapo, int8, UAQ, reference": {
        "algo.name": "dapo",
        "algo.max_gen_rounds": 40,
        "algo.kl_coef": 0.01,
        "quant.update_scale": 1.5,
    },
    "grpo, one flow with an FP8 cache, 8-bit moments, BF16 masters": {
        "optim.moments": "8bit",
        "optim.masters": "bf16",
        "model.compute_dtype": "bfloat16",
        "algo.kl_coef": 0.01,
        "quant.format": "fp8",
        "quant.unified": True,
        "quant.kv": "fp8",
    },
    "grpo, int8, LoRA, reference, FP16 moments": {
        "model.lora_rank": 4,
        "algo.kl_coef": 0.01,
        "optim.lr": 5e-3,
        "optim.name": "hadam",
        "optim.moments": "fp16",
    },
    "ppo, fp8, dithered": {
        "algo.name": "ppo",
        "quant.format": "fp8",
        "critic.lr": 1e-3,
        "batch.epochs": 2,
        "experimental.dither": True,
        "model.compute_dtype": "bfloat16",
    },
}
CLOCKS = (
    *("timing_s/", "perf/rollout_tokens_per_s", "perf/train_tokens_per_s", "sync/seconds"),
    *("perf/cpu_memory_used_gb", "perf/draft_index_seconds"),
)


def flags(arm, run_dir):
    return as_flags(from_a_start(TINY | ARMS[arm] | {"run_dir": run_dir}))


rows = partial(logged_rows, without=CLOCKS)


def weights(run_dir):
    folder = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    critic = folder / "critic.pt"
    extra = torch.load(critic, weights_only=True) if critic.exists() else {}
    (policy,) = (folder / "policy").glob("*.safetensors")
    return load_file(policy) | extra


def start(words, **streams):
    command = [sys.executable, "-m", "qurl", "train", *words]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SRC)}, **streams)


def run_until(words, run_dir, num_rows, number=signal.SIGKILL):
    """Start the command, signal it as soon as metrics.jsonl has `num_rows` rows; its exit code."""
    process = start(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_rows:
            process.send_signal(number)
            process.communicate(timeout=60)
            return process.returncode
        time.sleep(0.005)
    pytest.fail(f"the run ended before row {num_rows}: {process.communicate()[1].decode()[-2000:]}")


@pytest.mark.learn
@pytest.mark.parametrize("arm", first_quick(ARMS, 2))
def test_killed_and_resumed_is_never_interrupted(arm, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(load_config(None, flags(arm, whole)))
    words = flags(arm, broken)
    # Between two checkpoints; one arm also before the first, where nothing is to be restored.
    kills = [1, 6] if arm == next(iter(ARMS)) else [6]
    for num_rows in kills:
        run_until(words, broken, num_rows)
    train(load_config(None, words))
    assert_same_run(whole, broken)
    kinds = [event["kind"] for event in read_jsonl(broken / "events.jsonl")]
    assert kinds.count("resume") == len(kills)


def assert_same_run(whole, broken):
    assert len(rows(whole)) == STEPS + 1
    for uninterrupted, resumed in zip(rows(whole), rows(broken), strict=True):
        assert uninterrupted == resumed
    for name in ("samples.jsonl", "evals.jsonl"):
        assert read_jsonl(whole / name) == read_jsonl(broken / name)
    assert_close(weights(broken), weights(whole), rtol=0, atol=0)


@pytest.mark.learn
@pytest.mark.parametrize("arm", first_quick(ARMS, 2))
def test_an_evaluation_that_failed_is_repeated(arm, tmp_path, monkeypatch):
    """Its second precision fails at steps 2 and 8, and at 8 once more when it is repeated."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(load_config(None, flags(arm, whole)))
    outcomes = iter(["ok", "fails", "ok", "ok", "fails", "fails", "ok"])

    def failing(config, engine, problems, pool, precision):
        if precision != "full" and next(outcomes) == "fails":
            raise RuntimeError("no room for the cache")
        return evaluate(config, engine, problems, pool, precision)

    monkeypatch.setattr("qurl.train.evaluate", failing)
    config = load_config(None, flags(arm, broken))
    for first_lost in (2, 8, 8):
        with pytest.raises(RuntimeError, match="no room"):
            train(config)
        assert rows(broken)[-1]["step"] == first_lost
        assert not any(name.startswith("eval/") for name in rows(broken)[-1])
    train(config)
    assert not list(outcomes)
    assert_same_run(whole, broken)


@pytest.mark.learn
def test_a_finished_run_may_be_evaluated_later(tmp_path):
    words = [*flags("ppo, fp8, dithered", tmp_path), "--steps", "2"]
    train(load_config(None, [*words, "--eval.every", "0"]))
    [*before, last] = rows(tmp_path)
    train(load_config(None, words))
    assert rows(tmp_path)[:-1] == before
    found = {k: v for k, v in rows(tmp_path)[-1].items() if not k.startswith("eval/")}
    assert (found, len(found) < len(rows(tmp_path)[-1])) == (last, True)
    assert {record["step"] for record in read_jsonl(tmp_path / "evals.jsonl")} == {2}


@pytest.mark.learn
def test_a_run_on_adapters_goes_on_when_they_are_merged(tmp_path, monkeypatch):
    """Earlier versions began such runs, and saved adapters whose base was not to be had."""
    first, whole, broken, merged = (tmp_path / name for name in ("a", "b", "c", "merged"))
    arm = "grpo, int8, LoRA, reference, FP16 moments"
    train(load_config(None, [*flags(arm, first), "--steps", "2"]))
    adapters = first / "checkpoints" / "step-000002" / "policy"
    words = ["--model.path", str(adapters), "--eval.every", "0", "--save.every", "1"]
    with monkeypatch.context() as earlier:
        earlier.setattr("qurl.trainer.policy.refuse_adapters", lambda path: None)
        train(load_config(None, [*flags(arm, whole), *words, "--steps", "3"]))
        train(load_config(None, [*flags(arm, broken), *words, "--steps", "2"]))
    with pytest.raises(ModelError, match=f"merge them with `qurl export {adapters} OUT --dtype"):
        train(load_config(None, [*flags(arm, broken), *words, "--steps", "3"]))

    export(adapters, merged, "float32")
    recipe = json.loads((broken / "config.json").read_text())
    recipe["model"]["path"] = str(merged)
    (broken / "config.json").write_text(json.dumps(recipe))
    words[1] = str(merged)
    train(load_config(None, [*flags(arm, broken), *words, "--steps", "3"]))
    assert rows(broken) == rows(whole)
    export(broken, tmp_path / "out", "float32")


class Interrupting:
    """A tracker that sends its own run a signal after a step."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def log(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), self.number)

    def close(self):
        pass


def assert_step_was_saved(run_dir):
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    done = rows(run_dir)[-1]["step"] + 1
    assert 1 <= done < STEPS
    assert checkpoint.name == f"step-{done:06d}"
    assert not (run_dir / "crash").exists()


@pytest.mark.learn
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_run_ends_its_step_and_saves_it(number, tmp_path):
    words = [*flags("ppo, fp8, dithered", tmp_path), "--save.every", "0"]
    before = signal.signal(number, signal.default_int_handler)  # under nohup SIGHUP is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            train(load_config(None, words), trackers=[Interrupting(1, number)])
    finally:
        signal.signal(number, before)
    assert_step_was_saved(tmp_path)


@pytest.mark.learn
def test_a_process_that_is_told_to_end_saves_its_step(tmp_path):
    """At any moment of a step, and with the exit code of an interrupted command."""
    words = [*flags("ppo, fp8, dithered", tmp_path), "--save.every", "0"]
    assert run_until(words, tmp_path, 2, signal.SIGTERM) == 130
    assert_step_was_saved(tmp_path)


@pytest.mark.learn
def test_a_run_without_checkpoints_is_not_overwritten(tmp_path):
    words = [
        *flags("ppo, fp8, dithered", tmp_path),
        "--save.every",
        "0",
        "--save.keep",
        "0",
        "--steps",
        "2",
    ]
    train(load_config(None, words))
    assert not (tmp_path / "checkpoints").exists()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for again in (words, [*words, "--save.keep", "1"]):
        with pytest.raises(ConfigError, match=r"save.keep = 0, .* choose another run_dir"):
            train(load_config(None, again))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        assert json.loads((tmp_path / "config.json").read_text())["save"]["keep"] == 0


@pytest.mark.learn
def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    words = [*flags("ppo, fp8, dithered", tmp_path / "run"), "--steps", "2"]
    train(load_config(None, words))
    before = rows(tmp_path / "run")
    assert "steps are done" not in capsys.readouterr().out
    train(load_config(None, words))
    assert "all 2 steps are done; raise steps to go on, or choose" in capsys.readouterr().out
    assert rows(tmp_path / "run") == before


@pytest.mark.learn
def test_fewer_steps_than_were_trained_are_refused(tmp_path):
    words = flags("ppo, fp8, dithered", tmp_path)
    train(load_config(None, [*words, "--steps", "3"]))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"steps = 2, but .* has been trained for 3 already"):
        train(load_config(None, [*words, "--steps", "2"]))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.learn
def test_a_run_outlives_whoever_reads_its_output(tmp_path):
    """As with `qurl train ... 2>&1 | head`."""
    words = [*flags("ppo, fp8, dithered", tmp_path), "--steps", "3"]
    process = start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(timeout=90)
    assert len(rows(tmp_path)) == 4
    assert (tmp_path / "checkpoints" / "step-000003").exists()
