import dataclasses
import io
import json
import os
from pathlib import Path

import pytest

from qurl.config import Config, OptimConfig, build_config
from qurl.config.schema import SaveConfig, TrackConfig
from qurl.errors import ConfigError, DataError, TrainingError
from qurl.run.directory import METRICS, Run, Stopwatch, find_changes, flatten, read_jsonl


@pytest.fixture
def config(tmp_path):
    return Config(steps=10, run_dir=str(tmp_path / "run"))


def open_run(config, trackers=()):
    return Run.open(config, trackers=trackers, output=io.StringIO())


def printed(run):
    return run.progress._output.getvalue()


def strict_lines(path: Path) -> list[dict]:
    """Parse as another reader would: NaN and Infinity are no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} in {path}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


class RecordingTracker:
    def __init__(self):
        self.logged, self.is_closed = [], False

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.is_closed = True


class BrokenTracker(RecordingTracker):
    def log(self, step, metrics):
        super().log(step, metrics)
        raise ConnectionError("no route to host")


def test_a_new_run_saves_the_config_it_was_given(config):
    run = open_run(config)
    assert run.path == Path(config.run_dir)
    assert build_config(json.loads((run.path / "config.json").read_text())) == config
    assert not (run.path / "events.jsonl").exists()


def test_lines_are_readable_while_the_run_is_open(config):
    run = open_run(config)
    run.log(1, {"reward/mean": 0.25})
    run.sample(1, {"prompt": "2 + 2 =", "completion": "4", "reward": 1.0, "logp_prox": (-0.5,)})
    run.log(2, {"reward/mean": 0.5})
    assert read_jsonl(run.path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5},
    ]
    (sample,) = read_jsonl(run.path / "samples.jsonl")
    assert sample == {
        "step": 1,
        "prompt": "2 + 2 =",
        "completion": "4",
        "reward": 1.0,
        "logp_prox": [-0.5],
    }


def test_trackers_see_every_line_and_are_closed(config):
    tracker = RecordingTracker()
    with open_run(config, [tracker]) as run:
        run.log(1, {"reward/mean": 0.25})
    assert tracker.logged == [(1, {"reward/mean": 0.25})]
    assert tracker.is_closed


def test_a_tracker_that_fails_is_switched_off_loudly(config):
    broken, healthy = BrokenTracker(), RecordingTracker()
    run = open_run(config, [broken, healthy])
    run.log(1, {"a": 1.0})
    run.log(2, {"a": 2.0})
    assert len(broken.logged) == 1
    assert len(healthy.logged) == 2
    assert "BrokenTracker failed at step 1" in printed(run)
    assert "no route to host" in printed(run)


def test_a_tracker_that_cannot_be_closed_does_not_hide_how_the_run_ended(config):
    class Unclosable(RecordingTracker):
        def close(self):
            raise ConnectionError("no route to host")

    healthy = RecordingTracker()
    with (
        pytest.raises(TrainingError, match="the real reason"),
        open_run(config, [Unclosable(), healthy]) as run,
    ):
        raise TrainingError("the real reason")
    assert healthy.is_closed
    assert "Unclosable could not be closed" in printed(run)
    open_run(config)  # the directory is free again


def test_text_that_is_no_text_can_be_logged(config):
    """A lone surrogate, as in an answer of a task of one's own."""
    run = open_run(config)
    run.sample(0, {"answer": "a\ud800é"})
    assert read_jsonl(run.path / "samples.jsonl") == [{"step": 0, "answer": "a\ud800é"}]


def test_non_finite_numbers_are_strings(config):
    run = open_run(config)
    run.log(3, {"actor/loss": float("nan"), "grad": float("-inf"), "reward/mean": 1.0})
    run.sample(3, {"reward": float("inf"), "logp_behav": [0.0, float("-inf")]})
    (line,) = strict_lines(run.path / "metrics.jsonl")
    assert line == {"step": 3, "actor/loss": "nan", "grad": "-inf", "reward/mean": 1.0}
    (sample,) = strict_lines(run.path / "samples.jsonl")
    assert sample == {"step": 3, "reward": "inf", "logp_behav": [0.0, "-inf"]}


def test_only_warnings_and_alarms_are_printed(config):
    run = open_run(config)
    run.event("skip", "group dropped", group=7)
    run.event("alarm", "mismatch KL is 0.9")
    assert printed(run) == "ALARM: mismatch KL is 0.9\n"
    events = read_jsonl(run.path / "events.jsonl")
    assert [(e["kind"], e["message"]) for e in events] == [
        ("skip", "group dropped"),
        ("alarm", "mismatch KL is 0.9"),
    ]
    assert events[0]["group"] == 7


def test_rewind_forgets_later_steps_and_keeps_events(config):
    run = open_run(config)
    for step in range(5):
        run.log(step, {"x": step / 3})
        run.sample(step, {"reward": step})
        run.evaluation(step, "full", [True, False, step > 1])
        run.event("note", "hello", step=step)
    before = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    run.rewind(3)
    assert "WARNING: 2 logged steps have no checkpoint after them" in printed(run)
    assert (run.path / "metrics.jsonl").read_bytes() == b"".join(before[:3])
    assert [r["step"] for r in read_jsonl(run.path / "samples.jsonl")] == [0, 1, 2]
    evals = [(r["step"], r["outcomes"]) for r in read_jsonl(run.path / "evals.jsonl")]
    assert evals == [(0, "100"), (1, "100"), (2, "101"), (3, "101")], "of the weights of step 3 too"
    assert [e["kind"] for e in read_jsonl(run.path / "events.jsonl")] == ["note"] * 5 + ["warning"]
    run.log(3, {"x": 1.0})
    assert [r["step"] for r in read_jsonl(run.path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert not list(run.path.glob("*.tmp"))


def test_steps_whose_rows_are_lost_are_said_aloud(config):
    run = open_run(config)
    for step in (-1, 0, 1, 3, 4):
        run.log(step, {"x": 1.0})
    run.rewind(4)
    assert f"{METRICS} lacks 1 of the 4 steps before the checkpoint" in printed(run)
    (run.path / METRICS).unlink()
    run.rewind(4)
    assert f"{METRICS} lacks 4 of the 4 steps before the checkpoint" in printed(run)


def test_rewind_to_the_start_forgets_the_untrained_model_too(config):
    run = open_run(config)
    run.evaluation(0, "full", [True])
    run.log(-1, {"eval/full/accuracy": 0.5})
    run.log(0, {"x": 1.0})
    run.rewind(0)
    assert read_jsonl(run.path / "metrics.jsonl") == []
    assert read_jsonl(run.path / "evals.jsonl") == []


def test_a_reopened_row_is_replaced_when_it_is_logged_again(config):
    run = open_run(config)
    for step in (0, 1):
        run.log(step, {"x": float("nan")})
        run.evaluation(step + 1, "full", [True])
    run.reopen(1)
    assert [row["step"] for row in run.rows()] == [0]
    assert [r["step"] for r in read_jsonl(run.path / "metrics.jsonl")] == [0, 1], "not lost yet"
    assert [r["step"] for r in read_jsonl(run.path / "evals.jsonl")] == [1]
    run.log(1, {"x": 2.0})
    run.log(2, {"x": 3.0})
    assert strict_lines(run.path / "metrics.jsonl") == [
        {"step": 0, "x": "nan"},
        {"step": 1, "x": 2.0},
        {"step": 2, "x": 3.0},
    ]


def test_rewind_of_an_empty_run_is_nothing(config):
    run = open_run(config)
    run.rewind(0)
    assert {p.name for p in run.path.iterdir()} == {"config.json", ".lock"}


def test_what_a_killed_run_left_beside_a_file_may_be_unwritable(config):
    run = open_run(config)
    run.log(0, {"x": 1.0})
    (run.path / "metrics.jsonl.tmp").mkdir()
    with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        run.rewind(0)


@pytest.mark.parametrize("torn", ['{"step": 3, "x": 0.', '{"step": 3, "s": "\u00e9'])
def test_a_torn_last_line_is_dropped_and_not_glued_to(config, torn):
    run = open_run(config)
    for step in (1, 2):
        run.log(step, {"x": 1.0})
    run.close()
    path = run.path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(torn.encode()[:-1])
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]
    resumed = open_run(config)
    resumed.rewind(3)
    resumed.log(3, {"x": 2.0})
    assert strict_lines(path) == [{"step": s, "x": x} for s, x in ((1, 1.0), (2, 1.0), (3, 2.0))]


def test_a_last_line_that_lost_only_its_newline_is_kept(config):
    run = open_run(config)
    run.log(1, {"x": 1.0})
    run.close()
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert [r["step"] for r in read_jsonl(path)] == [1]
    resumed = open_run(config)
    resumed.rewind(2)
    resumed.log(2, {"x": 1.0})
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_jsonl(path)


@pytest.mark.parametrize("line", ["5", "[]", '{"step": "x"}', '{"step": null}', "[" * 100_000])
def test_a_line_that_no_run_writes_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is no.*; mend or remove"):
        read_jsonl(path)


def test_resume_with_the_same_recipe(config):
    open_run(config).log(1, {"x": 1.0})
    run = open_run(config)
    assert read_jsonl(run.path / "metrics.jsonl") == [{"step": 1, "x": 1.0}]
    (event,) = read_jsonl(run.path / "events.jsonl")
    assert (event["kind"], event["message"], event["changes"]) == ("resume", "run resumed", {})


def test_resume_may_change_what_does_not_matter(config):
    open_run(config)
    changed = dataclasses.replace(
        config, steps=20, threads=1, device="cpu", save=SaveConfig(5, 1), track=TrackConfig(0)
    )
    changed = dataclasses.replace(
        changed,
        eval=dataclasses.replace(config.eval, every=5),
        # what the error of a run that stopped may have asked for
        algo=dataclasses.replace(config.algo, max_gen_rounds=50),
        batch=dataclasses.replace(config.batch, microbatch_tokens=64),
        rollout=dataclasses.replace(config.rollout, kv_memory_frac=0.3),
    )
    run = open_run(changed)
    assert json.loads((run.path / "config.json").read_text())["steps"] == 20
    (event,) = read_jsonl(run.path / "events.jsonl")
    assert event["changes"]["steps"] == [10, 20]
    assert "steps 10 -> 20" in event["message"]


def test_resume_refuses_another_recipe_and_lists_all_of_it(config):
    open_run(config).log(0, {"x": 1.0})
    changed = dataclasses.replace(config, steps=20, seed=3, optim=OptimConfig(lr=1e-3))
    with pytest.raises(ConfigError) as error:
        open_run(changed)
    message = str(error.value)
    assert "seed: 0 there, 3 here" in message
    assert "optim.lr: 1e-06 there, 0.001 here" in message
    assert "- steps" not in message
    assert message.endswith(f"qurl fork {config.run_dir} --at STEP")
    saved = json.loads((Path(config.run_dir) / "config.json").read_text())
    assert saved["optim"]["lr"] == 1e-6


def test_a_run_that_never_made_a_step_may_be_mended(config):
    (open_run(config).path / "initial").mkdir()
    run = open_run(dataclasses.replace(config, seed=3))
    assert json.loads((run.path / "config.json").read_text())["seed"] == 3
    assert not (run.path / "initial").exists(), "it was made by the other recipe"


@pytest.mark.parametrize("keep", ["all", None, [1]])
def test_resume_of_another_version_that_counts_checkpoints_in_its_own_way(config, keep):
    open_run(config).close()
    file = Path(config.run_dir, "config.json")
    file.write_text(file.read_text().replace('"keep": 2', f'"keep": {json.dumps(keep)}'))
    assert find_changes(Path(config.run_dir), config) == {"save.keep": [keep, 2]}


def test_resume_names_keys_that_one_side_lacks(config):
    run = open_run(config)
    run.log(0, {"x": 1.0})
    run.close()
    path = run.path / "config.json"
    saved = json.loads(path.read_text())
    del saved["experimental"]["scale_o_proj"]  # as in a run from before it existed
    path.write_text(json.dumps(saved))
    open_run(config).close()
    changed = dataclasses.replace(config.experimental, scale_o_proj=True)
    with pytest.raises(ConfigError, match=r"experimental\.scale_o_proj: False there, True here"):
        open_run(dataclasses.replace(config, experimental=changed))
    saved["quant"]["old_key"] = 3
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"quant\.old_key: 3 there, 'absent' here"):
        open_run(config)


def test_rows_beyond_the_newest_checkpoint_need_checkpoints(config):
    """Without, they would be forgotten for good; up to it, a run goes on as it likes."""
    run = open_run(config)
    (run.path / "checkpoints" / "step-000002").mkdir(parents=True)
    for step in range(2):  # the last row describes the step that was saved
        run.log(step, {"x": 1.0})
    run.close()
    unsaved = dataclasses.replace(config, save=dataclasses.replace(config.save, keep=0))
    run = open_run(unsaved)
    run.log(2, {"x": 1.0})
    run.close()
    for again in (unsaved, config):
        with pytest.raises(ConfigError, match="has logged steps that no checkpoint covers"):
            open_run(again)


@pytest.mark.parametrize("content", ['{"architectures": ["X"]}', "[1]"])
def test_a_folder_that_is_no_run_is_left_alone(config, content):
    folder = Path(config.run_dir)
    (folder / "initial").mkdir(parents=True)
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is not a run's config"):
        open_run(config)
    assert (folder / "config.json").read_text() == content
    assert (folder / "initial").is_dir()


def test_fewer_steps_are_refused_before_anything_is_written(config):
    run = open_run(config)
    (run.path / "checkpoints" / "step-000009").mkdir(parents=True)
    run.close()
    with pytest.raises(ConfigError, match=r"steps = 8, but .* has been trained for 9 already"):
        open_run(dataclasses.replace(config, steps=8))
    assert json.loads((run.path / "config.json").read_text())["steps"] == config.steps


def test_more_steps_bend_a_schedule_aloud(config):
    config = dataclasses.replace(config, optim=OptimConfig(schedule="linear"))
    open_run(config).close()
    run = open_run(dataclasses.replace(config, steps=20))
    events = read_jsonl(run.path / "events.jsonl")
    assert [event["kind"] for event in events] == ["resume", "warning"]
    assert "optim.schedule = 'linear' was laid out for 10 steps" in events[1]["message"]


def test_metrics_without_a_config_are_not_overwritten(config):
    run = open_run(config)
    run.log(1, {"x": 1.0})
    run.close()
    (run.path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_run(config)
    assert len(read_jsonl(run.path / "metrics.jsonl")) == 1


def test_run_dir_that_is_a_file(config):
    Path(config.run_dir).write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_run(config)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the full device of Linux")
def test_a_full_disk_names_the_file(config):
    run = open_run(config)
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: No space left"):
        run.log(1, {"x": 1.0})


def test_stopwatch_adds_up_and_resets(monkeypatch):
    ticks = iter([-1.0, 0.0, 1.5, 10.0, 10.25, 20.0, 23.0, 24.0, 26.5])
    monkeypatch.setattr("qurl.run.directory.time.perf_counter", lambda: next(ticks))
    timer = Stopwatch()
    with timer("rollout"):
        pass
    with timer("rollout"):
        pass
    with pytest.raises(KeyError), timer("grade"):
        raise KeyError
    # From -1 to 24, then to 26.5.
    assert timer.lap() == {"timing_s/rollout": 1.75, "timing_s/grade": 3.0, "timing_s/step": 25.0}
    assert timer.lap() == {"timing_s/step": 2.5}


def test_flatten():
    assert flatten({"a": 1, "b": {"c": {"d": 2}}}) == {"a": 1, "b.c.d": 2}


def test_a_run_directory_has_one_process_at_a_time(tmp_path):
    config = Config(run_dir=str(tmp_path / "run"))
    with Run.open(config), pytest.raises(ConfigError, match="is in use by another process"):
        Run.open(config)
    Run.open(config).close()


@pytest.mark.parametrize(
    "name", ["initial", "checkpoints", "crash", "samples.jsonl", "evals.jsonl"]
)
def test_what_another_left_in_the_folder_is_not_lost(config, name):
    left = Path(config.run_dir) / name
    left.mkdir(parents=True)
    (left / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=rf"holds {name} but no config.json, .* move it away"):
        open_run(config)
    assert (left / "thesis.txt").read_text() == "precious"
