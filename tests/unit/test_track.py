import io
import sys
import types
from dataclasses import replace

import pytest

from qurl.config import Config
from qurl.config.schema import TrackConfig
from qurl.errors import MissingExtra
from qurl.run.directory import Run
from qurl.run.trackers import Progress, TensorBoardTracker, WandbTracker, progress_line

METRICS = {
    "reward/mean": 0.5123,
    "eval/full/accuracy": 0.4375,
    "eval/full/accuracy_low": 0.3,
    "eval/int8/accuracy": 0.42,
    "rollout_corr/k3_kl": 1.234e-3,
    "perf/rollout_tokens_per_s": 5230.0,
}


def test_progress_line():
    assert progress_line(12, 100, METRICS, 201.4) == (
        "step 12/100  reward 0.512  held-out full 43.8% int8 42.0%  KL 1.2e-03  5.2k tok/s"
        "  ETA 0:03:21"
    )
    assert progress_line(1, 9, {"perf/rollout_tokens_per_s": 87.3}, None) == "step 1/9  87 tok/s"
    assert progress_line(9, 9, {"reward/mean": float("nan")}, 0.0) == "step 9/9  reward nan"


def test_lines_of_metrics_and_warnings(monkeypatch):
    file, ticks = io.StringIO(), iter(range(100))
    monkeypatch.setattr("qurl.run.trackers.time.monotonic", lambda: 10 * next(ticks))
    progress = Progress(4, output=file)
    progress.log(-1, {"eval/full/accuracy": 0.5})
    progress.log(0, {"reward/mean": 0.25})
    progress.log(1, {"reward/mean": 0.75})
    progress.print("WARNING: " + "long " * 40 + "[end]")
    untrained, first, second, warning = file.getvalue().splitlines()
    assert untrained == "step 0/4  held-out full 50.0%"
    assert first == "step 1/4  reward 0.250  held-out full 50.0%  ETA 0:00:30"
    # 10 s per step, 2 steps left; the accuracy is the last one known
    assert second == "step 2/4  reward 0.750  held-out full 50.0%  ETA 0:00:20"
    assert warning == "WARNING: " + "long " * 40 + "[end]"


def test_a_closed_pipe_does_not_end_the_run():
    attempts = []

    class Closed(io.StringIO):
        def write(self, text):
            attempts.append(text)
            raise BrokenPipeError

    progress = Progress(4, output=Closed())
    progress.print("x")
    progress.print("y")
    assert attempts


def test_lines_come_at_most_once_per_interval(monkeypatch):
    file = io.StringIO()
    now = iter([0.0, 0.5, 1.0, 2.1, 2.2, 2.3])
    monkeypatch.setattr("qurl.run.trackers.time.monotonic", lambda: next(now))
    progress = Progress(6, output=file)
    for row in range(6):
        progress.log(row, {"eval/full/accuracy": 0.5} if row == 2 else {})
    # 1: first; 3: an evaluation; 6: the last step. At 4 only 1.1 s have passed since a line.
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["1/6", "3/6", "6/6"]


def test_no_trackers_unless_asked(tmp_path):
    with Run.open(Config(run_dir=str(tmp_path))) as run:
        assert run._trackers == []


@pytest.mark.parametrize(
    ("module", "track", "extra"),
    [
        ("torch.utils.tensorboard", TrackConfig(tensorboard=True), "tensorboard"),
        ("wandb", TrackConfig(wandb="project"), "wandb"),
    ],
)
def test_a_missing_extra_is_named_at_once(tmp_path, monkeypatch, module, track, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'qurl-rl\[{extra}\]'"):
        Run.open(Config(run_dir=str(tmp_path), track=track))


class FakeWriter:
    made: list["FakeWriter"]

    def __init__(self, directory, purge_step):
        self.directory, self.purge_step, self.scalars, self.is_closed = directory, purge_step, [], 0
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.is_closed = True


def test_tensorboard_purges_what_a_resumed_run_writes_again(tmp_path, monkeypatch):
    writer = type("Writer", (FakeWriter,), {"made": []})
    module = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker = TensorBoardTracker(tmp_path / "tensorboard")
    tracker.log(7, {"reward/mean": 0.5})
    tracker.log(8, {"reward/mean": 0.6})
    tracker.close()
    (made,) = writer.made
    assert made.purge_step == 7
    assert made.scalars == [("reward/mean", 0.5, 7), ("reward/mean", 0.6, 8)]
    assert made.is_closed


class FakeWandb(types.SimpleNamespace):
    """wandb as far as the tracker uses it; `online` says whether the service answers."""

    def __init__(self, online):
        super().__init__(online=online, errors=types.SimpleNamespace(Error=OSError))
        self.opened, self.logged, self.metrics = [], [], []

    def init(self, **options):
        if not self.online and options.get("mode") != "offline":
            raise OSError("api_key not configured")
        self.opened.append(options)
        return self

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.is_finished = True


def open_wandb(tmp_path, monkeypatch, online, warn):
    wandb = FakeWandb(online)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = replace(Config(), track=TrackConfig(wandb="project"))
    return wandb, WandbTracker(config, tmp_path, warn=warn)


def test_wandb_keeps_its_id_and_counts_steps_itself(tmp_path, monkeypatch):
    wandb, tracker = open_wandb(tmp_path, monkeypatch, True, pytest.fail)
    tracker.log(3, {"reward/mean": 0.5})
    tracker.close()
    assert wandb.logged == [{"step": 3, "reward/mean": 0.5}]
    assert wandb.metrics == [("*", "step")]
    assert wandb.is_finished
    again, _ = open_wandb(tmp_path, monkeypatch, True, pytest.fail)
    assert wandb.opened[0]["project"] == "project"
    assert wandb.opened[0]["id"] == again.opened[0]["id"]


def test_wandb_goes_offline_and_says_so(tmp_path, monkeypatch):
    warnings = []
    wandb, _ = open_wandb(tmp_path, monkeypatch, False, warnings.append)
    assert wandb.opened[0]["mode"] == "offline"
    assert "api_key not configured" in warnings[0]
    assert "wandb sync" in warnings[0]
