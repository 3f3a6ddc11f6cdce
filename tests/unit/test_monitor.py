"""Alarms: rows worked out by hand, the committed curves of real runs, and faults in tiny runs."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path
from random import Random

import pytest
import torch
from models import logged_rows, tiny_policy

import qurl.train
import qurl.trainer.learner
from qurl.cli import main
from qurl.config import build_config, load_config
from qurl.config.rules import find_mistakes, find_warnings
from qurl.config.schema import AlarmsConfig
from qurl.errors import SyncError, TrainingError
from qurl.rollout.canary import verify
from qurl.rollout.local import LocalEngine
from qurl.run import assembly
from qurl.run.directory import Run, read_jsonl
from qurl.run.evaluation import wilson_interval
from qurl.run.interrupt import Interrupt
from qurl.run.monitor import ALARMS
from qurl.sampling import Sampler
from qurl.train import train

PAPER = Path(__file__).parents[2] / "benchmarks/results/paper"
BY_NAME = {alarm.name: alarm for alarm in ALARMS}


def find(name, rows, **changes):
    """What an alarm says after the last of these rows, with windows of three steps."""
    config = dataclasses.replace(AlarmsConfig(), window=3, no_signal_steps=3, **changes)
    return BY_NAME[name].find([{"step": i} | row for i, row in enumerate(rows)], config)


def column(metric, values):
    return [{metric: value} for value in values]


def test_every_key_belongs_to_an_alarm_and_every_alarm_to_keys():
    keys = {alarm.name for alarm in ALARMS} | {alarm.threshold for alarm in ALARMS} - {""}
    assert {"window", *keys} == {field.name for field in dataclasses.fields(AlarmsConfig)}


FLAT = {
    "reward/std": 0.0,
    "reward/mean": 0.25,
    "reward/frac_all_correct": 0.0,
    "critic/advantages/max": 0.5,
    "critic/advantages/min": -0.5,
}
GROUPED = FLAT | {"reward/std": 0.4, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
VARIED = FLAT | {"reward/std": 0.4}
SOLVED = FLAT | {"reward/frac_all_correct": 1.0, "reward/mean": 1.0}


@pytest.mark.parametrize(
    ("rows", "is_on"),
    [
        ([FLAT] * 3, True),
        ([FLAT] * 2, False),
        ([VARIED] + [FLAT] * 3, True),
        ([FLAT, FLAT, VARIED], False),
        ([GROUPED] * 3, True),  # rewards differ between groups, which group advantages ignore
        ([SOLVED] * 3, False),  # nothing left to learn
        ([FLAT | {"reward/std": math.nan}] + [FLAT] * 3, True),
    ],
)
def test_no_signal(rows, is_on):
    cause = find("no_signal", rows)
    assert (cause is not None) == is_on
    if cause:
        assert cause.value == 3
        assert "for 3 steps no reward differed" in cause.message


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([FLAT] * 3, "(they are all 0.25)"),
        ([GROUPED] * 3, "(they are equal within each group)"),
        ([GROUPED | {"reward/frac_equal": 1.0}] * 3, "(they are equal within each group)"),
        ([GROUPED | {"reward/frac_equal": 0.75}] * 3, "Look at the function of algo.advantage"),
        # once is enough, as group advantages differ wherever rewards do
        (
            [GROUPED | {"reward/frac_equal": x} for x in (1.0, 0.75, 1.0)],
            "for 3 steps nothing was learned: in 1 of them rewards differ",
        ),
        ([FLAT | {"reward/frac_equal": 1.0}] * 3, "(they are all 0.25)"),
    ],
)
def test_no_signal_says_whether_rewards_or_advantages_are_equal(rows, said):
    cause = find("no_signal", rows)
    assert cause is not None
    assert said in cause.message
    assert ("samples.jsonl" in cause.message) != ("algo.advantage" in cause.message)


@pytest.mark.parametrize(
    ("name", "metric", "values", "expected"),
    [
        # in each of the last three steps above 0.95
        ("truncated", "response_length/clip_ratio", [0.1, 0.96, 0.97, 0.99], 0.99),
        ("truncated", "response_length/clip_ratio", [0.96, 0.95, 0.99], None),
        ("truncated", "response_length/clip_ratio", [0.99, 0.99], None),
        # the best mean of three is (0.4 + 0.5 + 0.6) / 3 = 0.5, and 0.24 / 0.5 = 0.48
        ("reward_collapse", "reward/mean", [0.0, 0.4, 0.5, 0.6, 0.1, 0.2, 0.24], 0.48),
        ("reward_collapse", "reward/mean", [0.0, 0.4, 0.5, 0.6, 0.1, 0.25, 0.2], None),
        ("reward_collapse", "reward/mean", [-0.4, -0.5, -0.6, -1.0, -1.0, -1.0], None),
        # a reward so rare that even the best three steps have one without it
        ("reward_collapse", "reward/mean", [0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.0], None),
        ("reward_collapse", "reward/mean", [0.0, 0.1, 0.1, 0.2, 0.0, 0.0, 0.0], 0.0),
        # the start is the first three steps: 0.05 * (1 + 2 + 3) / 3 = 0.1
        ("entropy_collapse", "actor/entropy", [1.0, 2.0, 3.0, 9.0, 0.09, 0.08, 0.02], 0.01),
        ("entropy_collapse", "actor/entropy", [1.0, 2.0, 3.0, 0.1, 0.08, 0.02], None),
        ("length_collapse", "response_length/mean", [100.0] * 3 + [19.0, 15.0, 10.0], 0.1),
        ("length_collapse", "response_length/mean", [100.0] * 3 + [21.0, 15.0, 10.0], None),
        # the smallest of the last three against four times the median of the first three
        ("mismatch_growth", "rollout_corr/k3_kl", [0.002] * 3 + [0.01, 0.012, 0.02], 5.0),
        ("mismatch_growth", "rollout_corr/k3_kl", [0.002] * 3 + [0.008, 0.012, 0.02], None),
        # one spike in the start is not the start: 0.01 / 0.002, while the mean would be 0.018
        ("mismatch_growth", "rollout_corr/k3_kl", [0.05, 0.002, 0.002, 0.01, 0.01, 0.01], 5.0),
        # nor is one late spike a growth
        ("mismatch_growth", "rollout_corr/k3_kl", [0.002] * 3 + [0.002, 0.05, 0.002], None),
        # a hundredfold growth to a level that does not matter
        ("mismatch_growth", "rollout_corr/k3_kl", [1e-5] * 3 + [1e-3] * 3, None),
        ("sample_size", "rollout_corr/rollout_is_eff_sample_size", [0.4, 0.3, 0.49], 0.49),
        ("sample_size", "rollout_corr/rollout_is_eff_sample_size", [0.4, 0.3, 0.5], None),
        ("repeated_problems", "sampling/distinct_frac", [0.25], 0.25),
        ("repeated_problems", "sampling/distinct_frac", [0.25, 0.5], None),
        ("unified_gap", "rollout_corr/rollout_is_ratio_fraction_high", [0.0, 1e-4], 1e-4),
        ("unified_gap", "rollout_corr/rollout_is_ratio_fraction_high", [1e-4, 0.0], None),
        ("grader_timeouts", "reward/timeouts", [0.0, 2.0], 2.0),
        ("grader_timeouts", "eval/full/num_timeouts", [3.0], 3.0),
        ("grader_timeouts", "reward/timeouts", [2.0, 0.0], None),
        # NaN is the affair of non_finite alone: neither high nor low, nor a part of the start
        ("truncated", "response_length/clip_ratio", [math.nan] * 3, None),
        ("unified_gap", "rollout_corr/rollout_is_ratio_fraction_high", [math.nan], None),
        ("entropy_collapse", "actor/entropy", [math.nan] + [1.0] * 6, None),
        ("entropy_collapse", "actor/entropy", [math.nan] + [1.0] * 3 + [0.01] * 3, 0.01),
        ("mismatch_growth", "rollout_corr/k3_kl", [0.002] * 3 + [0.01, math.nan], None),
    ],
)
def test_watches(name, metric, values, expected):
    cause = find(name, column(metric, values))
    assert (cause and cause.value) == pytest.approx(expected)


def test_a_gap_is_an_alarm_where_sampler_and_policy_are_one():
    alarm = BY_NAME["unified_gap"]
    assert alarm.is_wanted(build_config({"quant": {"unified": True}}))
    assert not alarm.is_wanted(build_config({}))
    off = {"quant": {"unified": True}, "alarms": {"unified_gap": "off"}}
    assert not alarm.is_wanted(build_config(off))


def test_a_fall_of_held_out_accuracy_beyond_its_interval():
    def row(accuracy, width=0.02):
        metric = "eval/full/accuracy"
        return {
            metric: accuracy,
            f"{metric}_low": accuracy - width,
            f"{metric}_high": accuracy + width,
        }

    assert find("held_out_collapse", [row(0.3), {}, row(0.28)]) is None
    cause = find("held_out_collapse", [row(0.3), {}, row(0.35), row(0.30)])
    assert cause is not None
    assert cause.message.startswith("eval/full/accuracy fell from 35.0% (after step 2) to 30.0%")
    early = find("held_out_collapse", [row(0.3) | {"step": -1}, row(0.1)])
    assert early is not None
    assert "fell from 30.0% (before training) to 10.0%" in early.message
    # Three evaluations: z = 2.24 for 1.96, so a fall of 0.05 passes 0.0457, but not with sixty:
    # 3.34 / 1.96 * 0.04 = 0.068.
    assert find("held_out_collapse", [row(0.35), row(0.30)] + [row(0.33)] * 57 + [row(0.3)]) is None
    assert find("held_out_collapse", [row(0.35)] + [row(0.33)] * 58 + [row(0.28)]) is not None
    assert find("held_out_collapse", [row(0.3), row(0.1), {}]) is None, "only where it is measured"


@pytest.mark.parametrize("num_problems", [30, 200, 1319])
def test_chance_alone_is_no_fall_of_held_out_accuracy(num_problems):
    """Sound policies that answer by a coin flip, with fifty evaluations each."""
    draw = Random(0)

    def rows_of(num_evaluations, accuracy):
        for _ in range(num_evaluations):
            right = sum(draw.random() < accuracy for _ in range(num_problems))
            low, high = wilson_interval(right, num_problems)
            name = "eval/full/accuracy"
            yield {name: right / num_problems, f"{name}_low": low, f"{name}_high": high}

    def goes_off(rows):
        return any(find("held_out_collapse", rows[:end]) for end in range(2, len(rows) + 1))

    assert sum(goes_off(list(rows_of(50, 0.5))) for _ in range(40)) <= 2
    assert num_problems == 30 or all(
        find("held_out_collapse", [*rows_of(49, 0.5), *rows_of(1, 0.25)]) for _ in range(40)
    )


def test_a_metric_that_is_not_finite():
    cause = find("non_finite", [{"actor/grad_norm": math.inf, "x": 1.0}])
    assert cause is not None
    assert cause.message == "actor/grad_norm = inf"


def read_curves(path):
    """The rows of a run, with the accuracies that its evaluations had."""
    run = json.loads(path.read_text())
    curves = run["curves"]
    rows = {
        step: {name: values[i] for name, values in curves.items() if values[i] is not None}
        for i, step in enumerate(curves["step"])
    }
    for found in run["evals"]:
        right, total = found["outcomes"].count("1"), len(found["outcomes"])
        low, high = wilson_interval(right, total)
        metric, step = f"eval/{found['precision']}/accuracy", found["step"] - 1
        scores = {metric: right / total, f"{metric}_low": low, f"{metric}_high": high}
        rows.setdefault(step, {"step": step}).update(scores)
    return [rows[step] for step in sorted(rows)]


FAILED = {
    "table1/int8-ppo_prox-seed0": {
        "held_out_collapse": 49,
        "mismatch_growth": 71,
        "reward_collapse": 74,
        "truncated": 95,
    },
    "table1/int8-ppo_prox-seed1": {
        "held_out_collapse": 49,
        "reward_collapse": 60,
        "mismatch_growth": 62,
        "truncated": 83,
    },
    "low_rate/int8-ppo_prox-lr1e-6-seed0": {
        "mismatch_growth": 109,
        "reward_collapse": 146,
        "held_out_collapse": 149,
        "truncated": 177,
    },
    "grpo_rate/int8-ppo_prox-seed0": {
        "held_out_collapse": 49,
        "reward_collapse": 53,
        "mismatch_growth": 55,
    },
    "dapo_correction/int8-ppo_prox-lr3e-6-seed0": {"held_out_collapse": 49},
    "long_horizon/bf16-lr1e-5-seed0": {"held_out_collapse": 24, "reward_collapse": 64},
    "long_horizon/int8-acr-lr1e-5-seed0": {"held_out_collapse": 24, "reward_collapse": 52},
    "long_horizon/int8-ppo_prox-lr1e-5-seed0": {"held_out_collapse": 24, "reward_collapse": 32},
    "long_horizon/int8-tis-lr1e-5-seed0": {"held_out_collapse": 24, "reward_collapse": 57},
}
"""First step after which each alarm is on, by default; docs/alarms.md has the table."""


@pytest.mark.parametrize("folder", sorted(p.name for p in PAPER.iterdir() if p.is_dir()))
def test_defaults_on_runs_that_failed_and_on_sound_ones(folder):
    paths = sorted((PAPER / folder).glob("*.json"))
    failed = {name.partition("/")[2] for name in FAILED if name.startswith(f"{folder}/")}
    assert paths
    assert failed <= {path.stem for path in paths}
    for path in paths:
        rows, first = read_curves(path), {}
        for alarm in ALARMS:
            for end in range(1, len(rows) + 1):
                if alarm.find(rows[:end], AlarmsConfig()):
                    first[alarm.name] = rows[end - 1]["step"]
                    break
        assert first == FAILED.get(f"{folder}/{path.stem}", {}), path.stem


def test_actions_that_cannot_work():
    alarms = {"mismatch_growth": "full"}
    unified = build_config({"alarms": alarms, "quant": {"unified": True}})
    (mistake,) = find_mistakes(unified)
    assert mistake.startswith("alarms.mismatch_growth = 'full' does not go with quant.unified")
    warnings = find_warnings(build_config({"alarms": alarms, "quant": {"format": "none"}}))
    assert any("alarms with the action 'full' only warn" in w for w in warnings)


# Tiny runs.

RECIPE = """
steps = 8
run_dir = "run"
device = "cpu"
threads = 1
[model.scratch]
hidden_size = 32
warm_start_steps = 5
warm_start_batch = 8
[batch]
problems = 4
minibatches = 2
[sampling]
max_tokens = 4
group_size = 4
[algo]
kl_coef = 0.0
[optim]
lr = 1e-3
[alarms]
window = 2
no_signal_steps = 3
"""
LETTERS = "return float(sum(map(ord, text)) % 7)"
"""A reward that differs within every group."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def run(*flags):
    return main(["train", "recipe.toml", *flags])


def write_reward(folder, body):
    (folder / "mine.py").write_text(f"def reward(text, answer, extra):\n    {body}\n")
    return ["--task.reward", "mine:reward", "--task.grade-workers", "1"]


def alarms(folder, name="run"):
    events = read_jsonl(folder / name / "events.jsonl")
    return [event for event in events if event["kind"] == "alarm"]


def rows(folder, name="run"):
    return logged_rows(folder / name)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "run/checkpoints").iterdir())


def test_a_reward_that_is_always_zero_stops_the_run(folder, capsys):
    flags = write_reward(folder, "return 0.0")
    assert run(*flags) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "TrainingError: the alarm no_signal stopped the run after step 2: for 3"
    )
    assert "All 3 steps are saved in run; fix the cause, or add --alarms.no_signal warn" in error
    assert checkpoints(folder) == ["step-000003"]
    [event] = alarms(folder)
    found = {key: event[key] for key in ("name", "step", "value", "threshold", "action")}
    assert found == {
        "name": "no_signal",
        "step": 2,
        "value": 3.0,
        "threshold": 3.0,
        "action": "stop",
    }
    assert (folder / "run/report.html").exists()
    assert run(*flags) == 1, "the cause is still there"
    assert len(rows(folder)) == 4
    write_reward(folder, LETTERS)
    assert run(*flags, "--steps", "5") == 0, "the reward was mended"


def test_an_advantage_of_zeros_is_not_blamed_on_the_rewards(folder, capsys):
    flags = write_reward(folder, LETTERS)
    (folder / "zeros.py").write_text(
        "import torch\n\n\ndef zeros(batch):\n    return torch.zeros_like(batch.mask)\n"
    )
    assert run(*flags, "--algo.advantage", "zeros:zeros") == 1
    error = capsys.readouterr().err
    assert "for 3 steps nothing was learned: rewards differ within groups, but all" in error
    assert "advantages are equal (at last 0). Look at the function of algo.advantage" in error


def test_a_run_may_go_on_whatever_the_alarm_says(folder):
    flags = write_reward(folder, "return 0.0")
    assert run(*flags, "--alarms.no_signal", "warn", "--steps", "5") == 0
    assert [event["step"] for event in alarms(folder)] == [2], "said once"


def test_a_run_too_short_for_the_alarm_gets_a_word(folder):
    assert run(*write_reward(folder, "return 0.0"), "--steps", "2") == 0
    [event] = alarms(folder)
    assert (event["name"], event["action"], event["value"]) == ("no_signal", "warn", 2)
    assert run("--run-dir", "one", *write_reward(folder, "return 0.0"), "--steps", "1") == 0
    assert "no_signal, step 0: in the last step no reward" in alarms(folder, "one")[0]["message"]
    assert run("--run-dir", "other", *write_reward(folder, LETTERS), "--steps", "2") == 0
    assert not (folder / "other/events.jsonl").exists() or not alarms(folder, "other")


def test_answers_that_are_all_cut(folder):
    assert run(*write_reward(folder, LETTERS), "--sampling.max_tokens", "1", "--steps", "5") == 0
    [event] = [event for event in alarms(folder) if event["name"] == "truncated"]
    assert (event["step"], event["threshold"]) == (1, 0.95), "once, and not in every step"


@pytest.mark.parametrize(("num_sound", "step"), [(0, -1), (1, 0)])
def test_graders_that_hang_in_an_evaluation_stop_the_run(folder, capsys, num_sound, step):
    """The first answer that is graded while the file is there, after so many evaluations."""
    body = 'if __import__("os").path.exists("hang"): __import__("time").sleep(60)'
    flags = write_reward(folder, f"{body}\n    {LETTERS}")
    flags += ["--task.grade_timeout", "0.5", "--eval.every", "1", "--eval.problems", "1"]
    flags += ["--eval.precision", "full", "--steps", "2", "--alarms.grader_timeouts", "stop"]
    real, num_before = qurl.train.evaluate, iter(range(9))

    def evaluate(*args):
        if next(num_before) >= num_sound:
            (folder / "hang").touch()
        try:
            return real(*args)
        finally:
            (folder / "hang").unlink(missing_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qurl.train, "evaluate", evaluate)
        assert run(*flags) == 1
    [event] = alarms(folder)
    assert "killed at task.grade_timeout: 1 in eval/full; " in event["message"]
    assert event["step"] == rows(folder)[-1]["step"] == step
    assert (folder / "run/report.html").exists()
    if step < 0:
        assert "stopped the run before its first step" in (printed := capsys.readouterr().err)
        assert "Nothing was saved in run; fix the cause" in printed
        assert not (folder / "run/checkpoints").exists()
    else:
        assert checkpoints(folder) == ["step-000001"]


def test_a_row_that_fills_the_batch(folder):
    tiny_policy().save(folder / "llama")
    (folder / "data.jsonl").write_text('{"prompt": "6*7=", "answer": "42"}\n' * 4)
    data = ["--task.name", "file", "--task.path", "data.jsonl", "--model.path", "llama"]
    assert run(*data, "--steps", "1") == 0
    event = alarms(folder)[0]
    assert (event["name"], event["value"]) == ("repeated_problems", 0.25)
    messages = [event["message"] for event in read_jsonl(folder / "run/events.jsonl")]
    assert any(message.startswith("no held-out problems are evaluated") for message in messages)


def test_a_metric_that_is_nan_stops_the_run_if_asked_to(folder, monkeypatch, capsys):
    monkeypatch.setattr(qurl.train, "peak_memory", lambda device: {"perf/memory": math.nan})
    assert run(*write_reward(folder, LETTERS), "--alarms.non_finite", "stop") == 1
    assert "the alarm non_finite stopped the run after step 0: perf/memory = nan" in (
        capsys.readouterr().err
    )
    assert alarms(folder)[0]["threshold"] is None


class Breaking:
    """A tracker that makes the file `broken` after step 3."""

    def log(self, step, metrics):
        if step == 3:
            Path("broken").touch()

    def close(self):
        pass


def stop_in_mid_run(folder, body, *flags):
    """Train with a fault that appears after step 3; returns (alarm, step) pairs and the error."""
    flags = [*write_reward(folder, body), "--alarms.no_signal", "off", *flags]
    with pytest.raises(TrainingError) as error:
        train(load_config("recipe.toml", flags), trackers=[Breaking()])
    return {event["name"]: event["step"] for event in alarms(folder)}, str(error.value)


def test_a_grader_that_breaks_in_mid_run(folder):
    """It accepts everything, then nothing. A held-out accuracy is judged at once."""
    body = 'return 0.0 if __import__("os").path.exists("broken") else 1.0'
    evals = ["--eval.every", "1", "--eval.problems", "8", "--eval.precision", "full"]
    found, error = stop_in_mid_run(folder, body, *evals, "--alarms.reward_collapse", "stop")
    assert found == {"held_out_collapse": 4, "reward_collapse": 5}
    assert error.startswith("the alarm reward_collapse stopped the run after step 5")
    assert "All 6 steps are saved" in error
    assert checkpoints(folder) == ["step-000006"]


def one_answer(patch):
    """From step 4 on the policy's logits are a hundred times as large: it explores no more."""
    real = qurl.train.sync

    def sync(config, parts, run, step):
        if step == 4:
            parts.learner.policy.model.get_output_embeddings().weight.data *= 100
        return real(config, parts, run, step)

    patch.setattr(qurl.train, "sync", sync)


def early_ends(patch):
    """From step 4 on every completion ends after one token."""
    real = assembly.Sampler

    def sampler(config, *parts):
        *_, step, _ = parts
        sampling = dataclasses.replace(config.sampling, max_tokens=1 if step > 3 else 8)
        return real(dataclasses.replace(config, sampling=sampling), *parts)

    patch.setattr(assembly, "Sampler", sampler)


def wrong_log_probs(patch):
    """Once broken, the engine overstates the log-probs of four tokens in five."""
    real = qurl.trainer.learner.pad_rows

    def pad_rows(rows):
        batch = real(rows)
        draws = torch.rand(batch.logp_behav.shape, generator=torch.Generator().manual_seed(0))
        wrong = 6.0 * (draws < 0.8) * Path("broken").exists()
        return dataclasses.replace(batch, logp_behav=batch.logp_behav + wrong)

    patch.setattr(qurl.trainer.learner, "pad_rows", pad_rows)


def test_a_policy_and_a_sampler_that_break_in_mid_run(folder, monkeypatch):
    """Each fault sets off the alarms of its own metrics, in the second step that it lasts."""
    for fault in (one_answer, early_ends, wrong_log_probs):
        fault(monkeypatch)
    flags = ["--optim.lr", "1e-6", "--alarms.reward_collapse", "off"]
    found, error = stop_in_mid_run(folder, LETTERS, *flags, "--alarms.sample_size", "stop")
    faults = {"entropy_collapse", "length_collapse", "sample_size", "mismatch_growth", "truncated"}
    assert found == dict.fromkeys(faults, 5)
    assert error.startswith("the alarm sample_size stopped the run after step 5")
    assert checkpoints(folder) == ["step-000006"]


def break_syncs(patch, engines):
    """From version 3 on, quantized engines of this list keep their old weights."""
    real = LocalEngine.sync

    def sync(self, source, *, version):
        if self.quant != "none" and not engines:
            engines.append(self)
        if self in engines and version >= 3:
            return dataclasses.replace(self.report, version=version)
        self.report = real(self, source, version=version)
        return self.report

    patch.setattr(LocalEngine, "sync", sync)


DRIFTING = ["--optim.lr", "5e-2", "--alarms.mismatch_growth_above", "20", "--steps", "9"]
DRIFTING += ["--alarms.truncated", "off"]


@pytest.mark.parametrize("action", ["warn", "requantize", "full"])
def test_a_sampler_that_is_left_behind(folder, monkeypatch, action):
    """Its mismatch grows. A new engine mends it here, and so does full precision."""
    engines = []
    break_syncs(monkeypatch, engines)
    flags = [*write_reward(folder, LETTERS), *DRIFTING, "--alarms.mismatch_growth", action]
    assert run(*flags) == 0
    event = alarms(folder)[0]
    assert (event["name"], event["action"], event["threshold"]) == ("mismatch_growth", action, 20)
    kl = [row["rollout_corr/k3_kl"] for row in rows(folder)]
    assert max(kl[:3]) < 0.01
    assert min(kl[event["step"] - 1 : event["step"] + 1]) > 0.02
    after = kl[event["step"] + 1 :]
    assert after
    if action == "warn":
        assert min(after) > 0.02
    else:
        assert max(after) < 0.01
    marks = ["rollout/full_precision" in row for row in rows(folder)]
    assert marks == [action == "full" and step > event["step"] for step in range(len(kl))]


def test_a_sampler_that_is_no_longer_the_unified_policy(folder, monkeypatch):
    break_syncs(monkeypatch, [])
    flags = [*write_reward(folder, LETTERS), *DRIFTING, "--algo.cap", "1.2"]
    assert run(*flags, "--quant.unified", "true") == 0
    event = next(event for event in alarms(folder) if event["name"] == "unified_gap")
    shares = [row["rollout_corr/rollout_is_ratio_fraction_high"] for row in rows(folder)]
    assert max(shares[: event["step"]]) == 0 < event["value"] == shares[event["step"]]


@pytest.mark.parametrize(
    "age",
    [
        ["--rollout.ahead", "1"],
        ["--sampling.replay", "recent", "--correction.mode", "decoupled"],
    ],
)
def test_the_age_of_rollouts_is_no_gap_of_the_unified_policy(folder, age):
    flags = [*write_reward(folder, LETTERS), *DRIFTING, "--algo.cap", "1.2", *age]
    assert run(*flags, "--quant.unified", "true") == 0
    assert any(row["rollout_corr/rollout_is_ratio_fraction_high"] > 0 for row in rows(folder))
    assert "unified_gap" not in {event["name"] for event in alarms(folder)}


def test_a_run_that_fell_back_resumes_in_full_precision(folder):
    """Interrupted after any step, it goes on as the uninterrupted run did."""
    flags = [*write_reward(folder, LETTERS), *DRIFTING, "--alarms.mismatch_growth", "full"]
    with pytest.MonkeyPatch.context() as patch:
        break_syncs(patch, [])
        assert run(*flags, "--run-dir", "whole") == 0
        fell_back = alarms(folder, "whole")[0]["step"]
        assert fell_back < 7
    with pytest.MonkeyPatch.context() as patch:
        break_syncs(patch, [])
        assert run(*flags, "--steps", str(fell_back + 1)) == 0  # just before it acts
    for steps in (fell_back + 2, 9):
        assert run(*flags, "--steps", str(steps)) == 0
    assert rows(folder) == rows(folder, "whole")
    assert run(*flags, "--steps", "10", "--alarms.mismatch_growth", "warn") == 0
    assert "rollout/full_precision" not in rows(folder)[-1], "no longer asked for"


def test_an_error_that_nobody_foresaw_costs_one_step(folder):
    """It keeps its traceback, and the run is saved as it was before the step."""
    flags = write_reward(folder, LETTERS)
    assert run(*flags, "--run-dir", "whole", "--steps", "4") == 0
    real = Sampler.collect

    def collect(sampler):
        return {}["gone"] if sampler.step == 2 else real(sampler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "collect", collect)
        with pytest.raises(KeyError, match="gone"):
            run(*flags, "--steps", "4")
    assert checkpoints(folder) == ["step-000002"]
    text = (folder / "run/crash/step-000002/error.txt").read_text()
    assert text.startswith("Traceback")
    assert text.endswith("KeyError: 'gone'\n")
    assert alarms(folder)[0]["message"].endswith("the same command then continues with step 2")
    assert run(*flags, "--steps", "4") == 0
    assert rows(folder) == rows(folder, "whole")


def test_a_step_whose_row_is_lost_is_repeated(folder):
    """The disk has no room for the row of step 1, but for a checkpoint."""
    flags = [*write_reward(folder, LETTERS), "--steps", "3"]
    assert run(*flags, "--run-dir", "whole") == 0
    real = Run.log

    def log(self, step, metrics):
        if step == 1:
            raise TrainingError("cannot append")
        real(self, step, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "log", log)
        assert run(*flags) == 1
    assert not (folder / "run/checkpoints").exists()
    assert run(*flags) == 0
    assert rows(folder) == rows(folder, "whole")


def test_weights_between_two_steps_are_not_saved(folder):
    """The second of two updates fails."""
    flags, calls = write_reward(folder, LETTERS), []
    real = torch.optim.AdamW.step

    def step(self, *args, **options):
        calls.append(self)
        if len(calls) == 4:  # of step 1
            raise ZeroDivisionError
        return real(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(ZeroDivisionError):
            run(*flags, "--model.scratch.warm_start_steps", "0")
    assert len(calls) == 4
    assert not (folder / "run/checkpoints").exists()


class Signalling:
    """A tracker that gets this process a signal after step 1."""

    def log(self, step, metrics):
        if step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def close(self):
        pass


def test_a_warning_of_the_scheduler_saves_and_stops(folder):
    flags = write_reward(folder, LETTERS)
    with pytest.raises(KeyboardInterrupt):
        train(load_config("recipe.toml", flags), trackers=[Signalling()])
    assert checkpoints(folder) == ["step-000002"]
    assert len(rows(folder)) == 2
    assert not (folder / "run/crash").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_warnings_may_come_often_and_the_end_once_more(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        for sent in (number, number, signal.SIGTERM, number):
            os.kill(os.getpid(), sent)
            assert interrupt.is_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) is before


def test_weights_that_are_nan_are_not_blamed_on_the_copy():
    good, bad = torch.zeros(3), torch.tensor([0.0, math.nan, 0.0])
    with pytest.raises(SyncError, match=r"trainer's own log-probs .* weights hold NaN") as error:
        verify(bad, bad, bound=1.0, version=0)
    assert "copy" not in str(error.value)
    with pytest.raises(SyncError, match="the engine's log-probs are not finite; the engine's copy"):
        verify(good, bad, bound=1.0, version=0)


def test_own_data_gets_checkpoints_and_evaluations(folder):
    files = ["--task.name", "file", "--task.path", "a.jsonl", "--task.eval_path", "b.jsonl"]
    files += ["--model.path", "m"]
    config = load_config("recipe.toml", files)
    assert (config.save.every, config.eval.every) == (20, 20)
    asked = load_config("recipe.toml", [*files, "--save.every", "0", "--eval.every=0"])
    assert (asked.save.every, asked.eval.every) == (0, 0)
    assert load_config("recipe.toml", [*files, "--save.keep", "0"]).save.every == 0
    plain = load_config("recipe.toml")
    assert (plain.save.every, plain.eval.every) == (0, 0)
