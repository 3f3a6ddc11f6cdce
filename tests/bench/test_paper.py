"""`benchmarks/paper`: arms, how they run and stop, what is kept of them, and what the page says."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import tiny_llama

from benchmarks.paper import (
    checks,
    epochs,
    figure_8,
    figures_2_3,
    figures_4_9,
    graders,
    math_data,
    page,
    plots,
    results,
    run,
    time_to_accuracy,
)
from benchmarks.paper.__main__ import SECTIONS
from benchmarks.paper.arms import COLUMNS, EXPERIMENTS, LAYER_GROUPS, TABLE_1, TOY_CHECK
from benchmarks.paper.baseline import answer_greedily
from benchmarks.paper.results import Eval, Result
from qurl.config import load_config
from qurl.errors import ConfigError, DataError
from qurl.rollout.hf import HFEngine
from qurl.run.directory import lock_run
from qurl.tasks.tokenizer import build_tokenizer
from qurl.types import Problem, SamplingParams

ROOT = Path(__file__).parents[2]

# Arms


def job(experiment=TOY_CHECK, arm=0, folder=Path("."), **settings):
    places = (folder / "runs", folder / "out")
    return run.Job(experiment.name, experiment.arms[arm], 0, settings, *places)


@pytest.mark.parametrize(
    ("experiment", "arm"),
    [(e, i) for e in EXPERIMENTS.values() for i in range(len(e.arms))],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_every_arm_is_a_valid_recipe(experiment, arm):
    config = job(experiment, arm).config
    assert config.quant.format == "none" or config.eval.precision in ("full", "both")
    if experiment is TABLE_1:
        assert (config.eval.problems, config.steps) == (1319, 435)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.name)
def test_arms_of_an_experiment_differ(experiment):
    configs = [results.portable(job(experiment, i).config) for i in range(len(experiment.arms))]
    assert len({json.dumps(c, sort_keys=True) for c in configs}) == len(configs)
    assert len({arm.name for arm in experiment.arms}) == len(configs)


def test_kept_metrics_are_logged_somewhere():
    package = ROOT / "src" / "qurl"
    readers = (package / "run" / "report", package / "run" / "trackers.py")  # others log these
    files = [p for p in package.rglob("*.py") if not any(p.is_relative_to(r) for r in readers)]
    source = "".join(path.read_text() for path in files)
    plain = [name for name in COLUMNS if not name.startswith(("timing_s/", "uaq/"))]
    assert [name for name in plain if f'"{name}"' not in source] == []


def parse(*words):
    return run.parse([*words])


def planned(*words):
    return [job.name for job in run.plan(parse(*words))]


def test_the_most_wanted_arms_come_first_in_all_seeds(tmp_path):
    names = planned("table1", "--out", str(tmp_path))
    first = ["bf16", "int8-ppo_prox", "int8-tis", "int8-acr"]
    assert names[:8] == [f"{arm}-seed{seed}" for seed in (0, 1) for arm in first]
    assert names[8] == "fp8-ppo_prox-seed0"
    assert names[-1] == "int8-ppo_behav-seed1"


def test_arms_and_seeds_can_be_chosen(tmp_path):
    words = ("table1", "--out", str(tmp_path), "--arms", "int8-acr,bf16", "--seeds", "3")
    assert planned(*words) == ["int8-acr-seed3", "bf16-seed3"]
    with pytest.raises(ConfigError, match="no arm 'int9'; it has bf16"):
        planned("table1", "--arms", "int9")


def test_arms_whose_time_counts_do_not_share_a_machine():
    with pytest.raises(ConfigError, match="cannot share"):
        planned("speed", "--jobs", "2")


def test_arms_whose_time_counts_want_the_gpu_for_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (139 * 2**30, 140 * 2**30))
    assert planned("speed", "--out", str(tmp_path))[0] == "bf16-seed0"
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (100 * 2**30, 140 * 2**30))
    with pytest.raises(ConfigError, match=r"others hold 40\.0 GiB of the GPU"):
        planned("speed", "--out", str(tmp_path))


# Running

TRAINER = """
import json, pathlib, signal, sys, time
folder, num_rows, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if sys.argv[4] == "obeys" else None)
folder.mkdir(exist_ok=True)
for step in range(num_rows):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": step / 8}) + "\\n")
    time.sleep(pause)
sys.exit("out of luck")
"""


@pytest.fixture
def fake_trainer(monkeypatch, tmp_path):
    """Arms that log rows, then fail."""

    def install(num_rows, pause=0.05, obeys="obeys"):
        def start(job):
            job.run_dir.parent.mkdir(parents=True, exist_ok=True)
            words = [sys.executable, "-c", TRAINER, job.run_dir, num_rows, pause, obeys]
            with job.beside(".log").open("a") as log:
                return subprocess.Popen([str(w) for w in words], stdout=log, stderr=log)

        monkeypatch.setattr(run, "start", start)
        monkeypatch.setattr(run, "COLLECT_S", 0.2)

    return install


def run_toy(folder, *words):
    places = ("--runs", str(folder / "runs"), "--out", str(folder / "out"))
    return run.main(["toy", *places, "--seeds", "0", *words])


def record(folder, arm="int8-acr"):
    return json.loads((folder / "out" / "toy" / f"{arm}-seed0.json").read_text())


def test_at_the_limit_arms_stop_and_what_they_logged_stays(fake_trainer, tmp_path, capsys):
    fake_trainer(1000)
    start = time.monotonic()
    assert run_toy(tmp_path, "--limit-s", "2", "--jobs", "1") == 0
    assert time.monotonic() - start < 10
    found = record(tmp_path, "int8-tis")
    assert found["status"] == "stopped"
    assert found["curves"]["step"] == list(range(found["steps"]))
    assert found["steps"] > 3
    assert [attempt["jobs"] for attempt in found["attempts"]] == [1]
    assert "int8-acr-seed0: not started" in capsys.readouterr().out


def test_an_arm_that_does_not_stop_is_killed(fake_trainer, tmp_path):
    fake_trainer(1000, obeys="never")
    run_toy(tmp_path, "--limit-s", "1.5", "--grace-s", "0.5", "--arms", "int8-acr")
    assert record(tmp_path)["status"] == "stopped"


def test_a_failure_is_told_and_its_curve_kept(fake_trainer, tmp_path, capsys):
    fake_trainer(3, pause=0.0)
    assert run_toy(tmp_path, "--arms", "int8-acr") == 1
    assert record(tmp_path)["status"] == "failed: out of luck"
    assert record(tmp_path)["steps"] == 3
    assert "failed: out of luck at step 3" in capsys.readouterr().out


def test_an_arm_that_others_kill_has_failed(tmp_path, monkeypatch):
    words = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    monkeypatch.setattr(run, "start", lambda job: subprocess.Popen(words))
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    assert run_toy(tmp_path, "--arms", "int8-acr") == 1


def begun_job(folder, keep):
    """An arm that has logged something."""
    mine = job(folder=folder, **{"save.keep": keep, "save.every": 0})
    mine.run_dir.mkdir(parents=True)
    (mine.run_dir / "metrics.jsonl").touch()
    mine.beside(run.ATTEMPTS).write_text("[]")
    return mine


@pytest.mark.parametrize("keep", [0, 1])
def test_an_arm_that_keeps_no_checkpoints_starts_anew(tmp_path, keep):
    mine = begun_job(tmp_path, keep)
    run.discard_lost(mine)
    assert mine.run_dir.exists() == mine.beside(run.ATTEMPTS).exists() == (keep == 1)


def test_checkpoints_of_an_earlier_command_are_not_discarded(tmp_path):
    mine = begun_job(tmp_path, keep=0)
    checkpoint = mine.run_dir / "checkpoints" / "step-000100"
    checkpoint.mkdir(parents=True)
    run.discard_lost(mine)
    assert checkpoint.exists()


def test_an_arm_that_is_running_is_not_discarded(tmp_path):
    mine = begun_job(tmp_path, keep=0)
    with lock_run(mine.run_dir), pytest.raises(ConfigError, match="in use by another process"):
        run.discard_lost(mine)
    assert mine.run_dir.exists()


def test_an_arm_that_is_stopped_while_it_imports_has_not_failed(tmp_path, monkeypatch):
    """Python has no handler yet, and dies of the signal."""
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(60)"
    monkeypatch.setattr(run, "start", lambda job: subprocess.Popen([sys.executable, "-c", code]))
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    assert run_toy(tmp_path, "--limit-s", "1", "--arms", "int8-acr") == 0


@pytest.mark.parametrize("status", ["finished at step 3", "stopped at step 2"])
@pytest.mark.parametrize("is_dropped", [True, False])
def test_checkpoints_of_finished_arms_can_be_dropped(tmp_path, capsys, status, is_dropped):
    mine = dataclasses.replace(job(folder=tmp_path), is_dropped=is_dropped)
    checkpoints = mine.run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert run.finish(SimpleNamespace(job=mine, collect=lambda: (status, True)))
    assert status in capsys.readouterr().out
    assert checkpoints.exists() == (not is_dropped or status.startswith("stopped"))


def test_results_come_while_arms_run(fake_trainer, tmp_path, monkeypatch):
    """A machine that goes away loses no more than the last seconds."""
    fake_trainer(1000)
    monkeypatch.setattr(run, "finish", lambda attempt: True)
    run_toy(tmp_path, "--limit-s", "2.5", "--arms", "int8-acr")
    assert record(tmp_path)["steps"] > 0


TINY = {
    "model.scratch.hidden_size": 32,
    "model.scratch.warm_start_steps": 20,
    "batch.problems": 8,
    "sampling.group_size": 4,
    "save.every": 2,
    "eval.every": 3,
    "eval.problems": 20,
}


@pytest.mark.learn
def test_a_stopped_arm_resumes_to_the_same_curve(tmp_path):
    words = [w for key, value in TINY.items() for w in ("--set", f"{key}={value}")]
    settings = {**TINY, "steps": 7}
    whole, broken = (
        run.Attempt(job(arm=1, folder=tmp_path / name, **settings), 1) for name in ("a", "b")
    )
    metrics = broken.job.run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline, broken.job.beside(".log").read_text()
        time.sleep(0.02)
    broken.interrupt()
    for attempt in (whole, broken):
        attempt.process.wait()
        run.finish(attempt)
    stopped = record(tmp_path / "b")
    assert stopped["status"] == "stopped"
    assert 4 <= stopped["steps"] < 7

    assert run_toy(tmp_path / "b", "--arms", "int8-acr", "--steps", "7", *words) == 0
    uninterrupted, resumed = record(tmp_path / "a"), record(tmp_path / "b")
    assert resumed["status"] == "finished"
    assert len(resumed["attempts"]) == 2
    kinds = [event["kind"] for event in resumed["events"]]
    # A run this short may also raise an alarm.
    assert [kind for kind in kinds if kind != "alarm"] == ["resume"]
    assert without_clocks(resumed) == without_clocks(uninterrupted)
    assert [e["step"] for e in resumed["evals"] if e["precision"] == "full"] == [0, 3, 6, 7]
    visible = {f"uaq/code_flip_frac/{group}" for group in LAYER_GROUPS}
    needed = {"rollout_corr/kl", "rollout_corr/rollout_is_max", "actor/pg_clipfrac", *visible}
    assert needed <= resumed["curves"].keys()
    assert str(tmp_path) not in json.dumps(resumed)

    assert run_toy(tmp_path / "b", "--arms", "int8-acr", "--steps", "7", *words) == 0
    assert record(tmp_path / "b") == resumed, "a finished arm does not run again"


def without_clocks(record):
    curves = {k: v for k, v in record["curves"].items() if not k.startswith(("timing", "perf"))}
    return curves, record["evals"], record["config"]


# Results


def test_a_shorter_curve_never_replaces_a_longer_one(tmp_path):
    path = tmp_path / "x" / "arm.json"
    long, short = (
        {"steps": n, "evals": [], "curves": {"step": [*range(n)]}, "status": "stopped"}
        for n in (5, 3)
    )
    assert results.keep_longer(path, short)
    assert results.keep_longer(path, long)
    assert not results.keep_longer(path, short)
    assert not results.keep_longer(path, {**long, "status": "failed: once more"})
    assert json.loads(path.read_text()) == long
    assert not results.keep_longer(tmp_path / "empty.json", {"curves": {}})
    assert not (tmp_path / "empty.json").exists()


def test_curves_of_different_recipes_are_not_mixed(tmp_path):
    mine = job(folder=tmp_path, **{"optim.lr": 1e-3})
    mine.result.parent.mkdir(parents=True)
    config = results.portable(job(folder=tmp_path, **{"steps": 3, "optim.lr": 2e-3}).config)
    mine.result.write_text(json.dumps({"config": config}))
    with pytest.raises(DataError, match=r"another recipe \(optim.lr 0.002 there, 0.001 here\)"):
        results.check_same_recipe(mine.result, mine.config)
    other = job(folder=tmp_path, **{"steps": 9, "optim.lr": 2e-3, "save.every": 1})
    results.check_same_recipe(other.result, other.config)
    words = ("toy", "--out", str(tmp_path / "out"), "--set", "optim.lr=1e-3")
    with pytest.raises(DataError, match="another recipe"):
        planned(*words)


@pytest.mark.parametrize(
    "path", sorted(results.RESULTS.glob("*/*-seed*.json")), ids=lambda p: p.stem
)
def test_committed_results_are_of_the_arms_that_are_there(path):
    """Else the command that made them refuses to run."""
    found = json.loads(path.read_text())
    arm = EXPERIMENTS[found["experiment"]].arm(found["arm"])
    files = {key: found["config"][key] for key in results.PATHS}
    overrides = results.carry_over(found["overrides"])
    settings = {k: v for k, v in overrides.items() if k not in arm.overrides}
    here = run.Job(found["experiment"], arm, found["seed"], settings | files, Path(), Path())
    results.check_same_recipe(path, here.config)


def test_what_comes_back_from_a_run(tmp_path):
    rows = [{"step": 0, "reward/mean": 1 / 3, "rollout_corr/kl": "nan"}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {"step": 2, "precision": "int8", "outcomes": "01101"}
    (tmp_path / "evals.jsonl").write_text(json.dumps(answers) + "\n")
    found = results.measure(tmp_path, load_config(None))
    assert found["evals"] == [answers]
    assert found["steps"] == 1
    assert found["curves"] == {
        "step": [0, 2],
        "reward/mean": [0.33333, None],
        "rollout_corr/kl": ["nan", None],
    }


def test_evaluations_are_keyed_by_the_number_of_updates(tmp_path):
    """A run logs the evaluation after k updates in row k - 1, that of the untrained model in -1."""
    rows = [
        {"step": -1, "timing_s/eval": 1.0, "timing_s/sync": 9.0},
        {"step": 0, "reward/mean": 0.5, "timing_s/sync": 3.0},
        {"step": 1, "reward/mean": 0.75, "timing_s/sync": 4.0, "timing_s/eval": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [{"step": step, "precision": "full", "outcomes": "01"} for step in (0, 2)]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(e) + "\n" for e in answers))
    found = results.measure(tmp_path, load_config(None))
    assert [e["step"] for e in found["evals"]] == [0, 2]
    assert found["steps"] == 2
    assert found["curves"] == {
        "step": [0, 1, 2],
        "reward/mean": [0.5, 0.75, None],
        "timing_s/sync": [3.0, 4.0, None],
        "timing_s/eval": [1.0, None, 2.0],
    }


def test_only_finite_values_are_drawn():
    curves = {"step": [0, 1, 2, 3], "x": [1.0, None, "nan", "inf"]}
    assert Result({"curves": curves}).curve("x") == [(0, 1.0)]
    assert Result({"curves": curves}).curve("y") == []


# Comparisons


def outcomes(correct, total=1000):
    return "1" * correct + "0" * (total - correct)


def test_difference_by_hand():
    """d = (1, 0, 1, -1): mean 1/4, deviation sqrt((9 + 1 + 9 + 25) / 16 / 3)."""
    d, (low, high) = page.difference([(Eval(5, "1110"), Eval(5, "0101"))])
    spread = 1.96 * math.sqrt(44 / 48) / 2
    assert (d, low, high) == pytest.approx((0.25, 0.25 - spread, 0.25 + spread))


def test_several_evaluations_are_averaged_by_problem():
    pairs = [(Eval(5, "11"), Eval(5, "00")), (Eval(9, "01"), Eval(9, "10"))]
    d, (low, high) = page.difference(pairs)  # problems: (1 - 1) / 2 and (1 + 1) / 2
    spread = 1.96 * math.sqrt(0.5) / math.sqrt(2)
    assert (d, low, high) == pytest.approx((0.5, 0.5 - spread, 0.5 + spread))


def arm_result(arm, seed, *evals, problems=1000, **more):
    rows = [
        {"step": step, "precision": "full", "outcomes": outcomes(correct, problems)}
        for step, correct in evals
    ]
    fields = {"arm": arm, "seed": seed, "steps": evals[-1][0], "status": "stopped", "evals": rows}
    return Result({**fields, "curves": {"step": []}, **more})


def test_arms_are_compared_over_the_later_half_of_what_both_have():
    steps = ((0, 200), (20, 300), (40, 400), (60, 420))
    a = [arm_result("a", 0, *steps, (80, 999)), arm_result("a", 1, (0, 1))]
    b = [arm_result("b", 0, (0, 200), (20, 0), (40, 390), (60, 400)), arm_result("b", 1, (0, 1))]
    (found,) = page.compare_arms(a, b)
    assert (found.seed, found.steps) == (0, [40, 60])
    assert found.difference == pytest.approx(0.015)
    assert found.text.startswith("seed 0, step 40-60: +1.5 (+")


def test_seeds_are_compared_at_the_same_steps():
    long, short = ((20, 300), (40, 400), (60, 420)), ((20, 310), (40, 390))
    a = [arm_result("a", 0, *long), arm_result("a", 1, *short)]
    b = [arm_result("b", 0, *long), arm_result("b", 1, *long)]
    assert [(c.seed, c.steps) for c in page.compare_arms(a, b)] == [(0, [40]), (1, [40])]


@pytest.mark.parametrize(
    ("differences", "is_equality", "conclusion"),
    [
        ([], False, ""),
        ([0.1, 0.1], False, "seen in both seeds"),
        ([0.1, 0.11, 0.12], False, "seen in all 3 seeds"),
        ([0.06, 0.07, 0.4], False, "inconclusive"),  # over seeds: -30 to +66 points
        ([0.1], False, "one seed: no conclusion"),
        ([0.1, 0.01], False, "inconclusive"),
        ([0.1, -0.1], False, "inconclusive"),
        ([-0.1, -0.1], False, "opposite seen in both seeds"),
        ([0.01, -0.01], True, "no difference seen in both seeds"),
        ([0.1, 0.1], True, "they differ in both seeds"),
        ([0.01, 0.1], True, "inconclusive"),
    ],
)
def test_no_more_is_concluded_than_all_seeds_support(differences, is_equality, conclusion):
    intervals = [(d - 0.05, d + 0.05) for d in differences]
    found = [page.Comparison(0, [20], d, i) for d, i in zip(differences, intervals, strict=True)]
    claim = page.Claim("", "a", "b", is_equality=is_equality)
    assert page.conclude(claim, found) == conclusion


def test_claims_say_what_was_not_run_and_what_cannot_be_compared():
    claim = page.Claim("A over B", "a", "b", 2.0)
    a = [arm_result("a", seed, (20, 300), (40, 320)) for seed in (0, 1)]
    b = [arm_result("b", seed, (25, 200), (50, 220)) for seed in (0, 1)]
    (row,) = page.claims_table([*a, *b], [claim]).splitlines()[2:]
    assert row == "| A over B | +2.00 | no evaluation at the same step |  |"
    (row,) = page.claims_table(a, [claim]).splitlines()[2:]
    assert row == "| A over B | +2.00 | not run |  |"


def test_means_of_seeds_have_an_interval_from_three_on():
    assert page.mean_of_seeds([0.01]) == []
    assert page.mean_of_seeds([0.01, 0.02]) == ["mean +1.5"]
    assert page.mean_of_seeds([0.01, 0.02, 0.03]) == ["mean +2.0 (95 % over seeds: -0.5 to +4.5)"]


def test_a_table_of_accuracies_says_what_was_not_run():
    result = arm_result("bf16", 1, (0, 220), (60, 400))
    lines = page.accuracy_table(TABLE_1, {"table1": [result]}, "paper").splitlines()
    cells = "| BF16 | 55.35 | 1 | 60 | 22.0 (19.5 to 24.7) | 40.0 (37.0 to 43.1) | 60 |"
    assert lines[2] == f"{cells}  |"
    assert lines[3] == "| INT8, uncorrected, Eq. (1) | 48.78 |  | not run |  |  |  |  |"
    actor = [{**e, "precision": "int8"} for e in result.record["evals"]]
    result.record["evals"].extend(actor)
    lines = page.accuracy_table(TABLE_1, {"table1": [result]}, "paper").splitlines()
    assert lines[2] == f"{cells} 40.0 (37.0 to 43.1) |"
    assert len(lines) == 2 + len(TABLE_1.arms)


def test_fifths_of_a_run_that_has_hardly_begun():
    curves = {"step": [0, 1, 2, 3], "rollout_corr/kl": [1e-3, 2e-3, 3e-3, 4e-3]}
    config = {"algo.objective": "tis"}
    found = arm_result("bf16", 0, (4, 1), curves=curves, config=config)
    assert figures_2_3.mismatch_cells(found, 4)[3:5] == ["1.0e-03", "4.0e-03"]


def test_step_times_are_medians_after_the_warm_up():
    curves = {"step": [0, 1, 2, 3, 4]}
    curves |= {f"timing_s/{part}": [90.0, 80.0, 1.0, 2.0, 6.0] for part in figure_8.PARTS}
    curves["response_length/mean"] = [1.0, 1.0, 70.0, 90.0, 80.0]
    timed = arm_result("bf16", 0, (5, 1), curves=curves, attempts=[{"jobs": 1}])
    assert figure_8.step_seconds(timed) == dict.fromkeys(figure_8.PARTS, 2.0)
    assert figure_8.seconds_per_token(timed) == 2.0 * len(figure_8.PARTS) / 80.0


def test_steps_are_held_against_bf16_of_the_same_algorithm_token_by_token():
    def timed(arm, seconds, tokens):
        curves = {"step": [0, 1, 2], "response_length/mean": [tokens] * 3}
        curves |= {f"timing_s/{part}": [seconds] * 3 for part in figure_8.PARTS}
        curves["perf/rollout_tokens_per_s"] = [9e4] * 3
        return arm_result(arm, 0, (3, 1), curves=curves, attempts=[{"jobs": 1}])

    arms = (("bf16", 3.0, 200.0), ("int8", 2.0, 200.0), ("fp8", 2.0, 100.0), ("grpo-int8", 1, 100))
    stopped = arm_result("grpo-bf16", 0, (1, 1), curves={"step": [0]}, attempts=[{"jobs": 1}])
    found = [stopped, *(timed(*arm) for arm in arms)]
    lines = figure_8.step_table({"speed": found}).splitlines()[2:]
    speed_ups = {line.split(" | ")[0][2:]: line.split(" | ")[-1] for line in lines}
    assert speed_ups["PPO, INT8"] == "1.50x |"
    assert speed_ups["PPO, FP8"] == "0.75x |"  # as fast as INT8, over half as many tokens
    assert speed_ups["GRPO, BF16"] == " |"  # stopped while it warmed up
    assert speed_ups["GRPO, INT8"] == " |"  # has nothing to be held against


def test_time_to_accuracy_by_hand():
    """BF16 goes from 20 % to 40 %, so halfway is 30 % and nine tenths of the way are 38 %.

    INT8 has 28 % at step 10 and 32 % at step 20: 30 % at step 15, after 15 steps of 2 parts x 1 s
    and, by tokens, 15 x 100 tokens x 10 ms. It never has 38 %. Its first step took a minute more.
    """
    bf16 = arm_result("bf16", 0, (0, 2), (10, 4), problems=10)
    curves = {"step": [*range(20)], "response_length/mean": [100.0] * 20}
    curves |= {f"timing_s/{part}": [31.0, *[1.0] * 19] for part in ("rollout", "update")}
    int8 = arm_result("int8", 0, (0, 5), (10, 7), (20, 8), curves=curves, problems=25)
    half, most = time_to_accuracy.levels([bf16, int8])
    assert (half, most) == pytest.approx((0.3, 0.38))
    steps = time_to_accuracy.steps_to(int8, half)
    assert steps == pytest.approx(15)
    assert time_to_accuracy.steps_to(int8, most) is None
    each = time_to_accuracy.own_seconds(int8)
    assert time_to_accuracy.seconds_until(each, 15.5) == pytest.approx(31)
    assert time_to_accuracy.seconds_until(each, 20.0) == pytest.approx(40)
    curves = {"step": [0, 1, 2], "response_length/mean": [200.0] * 3}
    curves |= {
        f"timing_s/{part}": [0.4] * 3 for part in figure_8.PARTS
    }  # 5 parts, 200 tokens: 10 ms
    timed = arm_result("int8", 0, (3, 1), curves=curves, attempts=[{"jobs": 1}])
    each = time_to_accuracy.seconds_by_tokens(int8, timed)
    assert time_to_accuracy.seconds_until(each, steps) == pytest.approx(15)


def test_problems_of_math_are_chosen_by_level_and_not_held_out():
    rows = [
        {"problem": "Find $x$.", "answer": "1", "level": "Level 3", "type": "Algebra"},
        {"problem": "Find $y$.", "answer": "2", "level": "Level 5"},
        {"problem": "Find $z$.", "answer": "3", "level": "Level 2"},
    ]
    chosen = math_data.select(rows, [{"problem": "find  y"}])
    assert list(chosen) == [{"problem": "Find $x$.", "answer": "1"}]


def test_visibility_is_a_mean_over_the_steps_by_group():
    group = LAYER_GROUPS[0]
    values = {"update_norm": 2e-8, "quant_error": 4e-4, "code_flip_frac": 0.01}
    values |= {"update_cosine": 0.5, "update_proj": 0.75}
    curves = {f"uaq/{name}/{group}": [0.0, 2 * v, 99.0] for name, v in values.items()}
    found = arm_result("bf16", 3, (3, 1), curves={"step": [0, 1, 2], **curves})
    first, second, *_ = figures_4_9.visibility_cells(found, range(2))
    assert first == ["3", group, "2.0e-08", "4.0e-04", "5.0e-05", "1.000%", "0.500", "0.75"]
    assert second[2:] == [""] * 6


def test_times_of_arms_that_shared_the_machine_are_refused():
    timed = arm_result("bf16", 0, (5, 1), attempts=[{"jobs": 1}, {"jobs": 3}])
    with pytest.raises(AssertionError, match="shared"):
        figure_8.step_seconds(timed)


# The page


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.name)
def test_the_page_shows_what_was_measured(section):
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == section.place(text, results.read_results()), "run `make tables`"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.name)
def test_figures_show_what_was_measured(section):
    for plot in section.plots(results.read_results()):
        path = plots.FIGURES / f"{plot.name}.svg"
        assert path.exists() == plot.has_points, "run `make tables`"
        assert not plot.has_points or plot.digest in path.read_text(), "run `make tables`"


def test_growth_is_held_against_runs_that_corrected_it():
    def run(arm, *k3):
        curves = {"step": list(range(len(k3))), "rollout_corr/k3_kl": list(k3)}
        return Result({"arm": arm, "seed": 0, "steps": len(k3), "curves": curves})

    found = {"table1": [run("int8-acr", 1, 1, *[2e-3] * 20), run("int8-ppo_prox", 9.0)]}
    bf16, int8, fp8 = figures_2_3.growth_table(found).splitlines()[2:]
    files = (figures_2_3.UNTRAINED, figures_2_3.TRAINED)
    measured = [f"{figures_2_3._k3_by_format(path)['int8']:.1e}" for path in files]
    assert int8.split(" | ")[1:] == [*measured, "2.0e-03 (22) |"]
    assert bf16.endswith("not run |")
    assert fp8.endswith("not run |")


def test_every_section_draws_results(tmp_path):
    """Of all arms, with all curves; every link leads to a file."""
    step = [*range(90)]
    found = {
        name: [
            arm_result(
                arm.name,
                seed,
                *[(i, 200 + i) for i in range(0, 90, 20)],
                curves={"step": step, **{c: [0.5 + i / 90 for i in step] for c in COLUMNS}},
                config={"algo.objective": "acr"},
                attempts=[{"jobs": 1}],
                problems=1319,
            )
            for arm in experiment.arms
            for seed in experiment.seeds
        ]
        for name, experiment in EXPERIMENTS.items()
    }
    text = page.PAGE.read_text(encoding="utf-8")
    for section in SECTIONS:
        text = section.place(text, found)
        for plot in section.plots(found):
            plots.draw(plot, tmp_path / "figures")
    links = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(links) == 12
    assert all((tmp_path / link).exists() for link in links)
    tables = text[text.index("## Table 1") : text.index("## Figure 8")]
    assert "| not run" not in tables


def test_a_section_has_one_place():
    section = page.Section("x", lambda _: "new")
    begin, end = "<!-- x: begin (make tables) -->", "<!-- x: end -->"
    text = f"before\n{begin}\n\nold\n\n{end}\nafter\n"
    assert section.place(text, {}) == text.replace("old", "new")
    with pytest.raises(AssertionError, match="once"):
        section.place(text + text, {})


def test_a_plot_is_the_same_bytes_again_and_names_its_data(tmp_path):
    line = plots.Line("a", [(0, 1.0), (1, 2.0)], [(0.5, 1.5), (1.5, 2.5)])
    plot = plots.Plot("p", [plots.Panel("t", [line])])
    first, second = (plots.draw(plot, tmp_path / name).read_bytes() for name in "ab")
    assert first == second
    assert plot.digest.encode() in first
    moved = plots.Plot("p", [plots.Panel("t", [plots.Line("a", [(0, 1.0), (1, 2.5)])])])
    assert moved.digest != plot.digest


def test_long_curves_are_thinned():
    points = [(float(i), float(i % 2)) for i in range(10 * plots.MOST_POINTS)]
    assert plots.thin(points)[:2] == [(4.5, 0.5), (14.5, 0.5)]
    assert {y for _, y in plots.thin(points, max)} == {1.0}
    assert plots.thin(points[:5]) == points[:5]
    assert plots.thin([]) == []


# Graders and the plain evaluation


@pytest.mark.parametrize(
    ("completion", "answer", "is_right"),
    [
        ("So 3 + 4 = 7.", "#### 7", True),
        (r"It costs \boxed{\$1,250.50}.", "1250.5", True),
        ("It is -4", "-4", True),
        ("72 apples in 3 boxes", "72", False),
        ("no number", "72", False),
    ],
)
def test_the_last_number_decides(completion, answer, is_right):
    assert graders.is_last_number_right(completion, answer) is is_right


def test_differences_between_graders_are_listed():
    rows = [
        {"completion": r"so \boxed{72}", "answer": "some working\n#### 72"},
        {"completion": r"\boxed{72} apples in 3 boxes", "answer": "72"},
        {"completion": r"It is \boxed{5}", "answer": "72"},
    ]
    found = graders.compare(rows, workers=1)
    assert (found["ours_right"], found["last_number_right"]) == (2, 1)
    difference = {"ours": True, "last_number": False, "answer": "72"}
    assert found["differences"] == [{**difference, "completion": rows[1]["completion"]}]


def test_plain_greedy_answers_are_those_of_the_engine():
    """Prompts of several lengths in one batch: padding must not change an answer."""
    model, tokenizer = tiny_llama(), build_tokenizer()
    prompts = ["1+2=", "345+6=", "7=", "8+9+10="]
    problems = [Problem(p, tuple(tokenizer(p).input_ids), "") for p in prompts]
    rollouts = HFEngine(model, tokenizer).generate(
        problems, SamplingParams(max_tokens=12, temperature=0.0)
    )
    texts = answer_greedily(model, tokenizer, problems, max_tokens=12, batch=3)
    assert texts == [r.completions[0].text for r in rollouts]
    assert len(set(texts)) > 1


def test_step_0_is_held_against_the_plain_evaluation():
    """220 of 1000 are 19.5 to 24.7 %: 24 % lie within, 25 % do not."""
    plain = {"outcomes": outcomes(220), "dtype": "bfloat16"}
    evals = [arm_result("bf16", seed, (0, correct)) for seed, correct in ((0, 240), (1, 250))]
    lines = checks.baseline_table(plain, {"table1": evals}).splitlines()
    assert lines[2] == "| transformers alone, bfloat16 | 22.0 (19.5 to 24.7) |  |  |"
    assert "| +2.0 (+1.1 to +2.9) |" in lines[3]  # 20 of 1000 differ, all one way
    assert lines[3].endswith("| yes |")
    assert "table1 bf16 1" in lines[4]
    assert lines[4].endswith("| **no** |")


def test_differences_between_graders_are_shown():
    found = {"completions": 9, "ours_right": 5, "last_number_right": 4, "differences": []}
    assert checks.grader_text(found).endswith("They disagree on 0.")
    difference = {"ours": True, "last_number": False, "answer": "72", "completion": "a|b\n`72`"}
    text = checks.grader_text({**found, "differences": [difference] * 11})
    assert "They disagree on 11." in text
    assert text.count("| right | wrong | 72 | `a/b '72'` |") == checks.SHOWN


def run_of_epochs(rewards: list[float]) -> Result:
    curves = {"step": list(range(len(rewards))), epochs.REWARD: rewards}
    return Result({"curves": curves})


@pytest.mark.parametrize("window", epochs.WINDOWS)
def test_jumps_of_epochs_are_found_and_trends_are_none(window):
    """29.2 steps an epoch: a line of slope 0.001, and 0.02 more from each boundary on.

    Step 29 lies in two epochs, and its reward must not matter.
    """
    rewards = [0.2 + 0.001 * step + 0.02 * int(step / 29.19) for step in range(100)]
    rewards[29] = 1.0
    first, *others = epochs.jumps(run_of_epochs(rewards), 0.0, window)
    assert first == pytest.approx(0.02)
    assert len(others) == (2 if window < 13 else 1)  # a window after step 87.6 needs 100 steps
    assert epochs.jump_at([0.3 + 0.01 * step for step in range(60)], 30.4, window) == pytest.approx(
        0
    )
    assert epochs.jump_at(rewards, 5.0, window) is None
