"""The run directory: everything a run leaves behind.

    config.json      the resolved recipe
    metrics.jsonl    {"step": n, name: value, ...}, one line a step; -1: the untrained model
    samples.jsonl    {"step": n, "prompt": ..., "completion": ..., "reward": ..., ...}
    evals.jsonl      {"step": updates, "precision": ..., "outcomes": "0110..."}, a digit a problem
    events.jsonl     {"time": ..., "kind": ..., "message": ..., ...}: alarms, fallbacks, skips
    initial/         the untrained model, if it was made from scratch
    checkpoints/     written by qurl.run.checkpoint
    crash/           written by qurl.run.crash
    report.html      written by qurl.run.report; qurl.run.watch serves the same page live

Every line is strict JSON: a number that is not finite is written as "nan", "inf" or "-inf". A kill
can tear only the last line of a file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TextIO

from qurl.config import Config, read_recipe, to_json
from qurl.errors import ConfigError, DataError, TrainingError
from qurl.run.trackers import Progress, TensorBoardTracker, Tracker, WandbTracker

CONFIG, METRICS, SAMPLES, EVENTS = "config.json", "metrics.jsonl", "samples.jsonl", "events.jsonl"
EVALS, INITIAL = "evals.jsonl", "initial"
OWN = (METRICS, SAMPLES, EVALS, EVENTS, INITIAL, "checkpoints", "crash")
"""What a run makes after its config.json."""

CHANGEABLE = (
    *("steps", "run_dir", "device", "threads", "save", "track", "eval.every"),
    *("alarms", "parallel"),
    *("algo.max_gen_rounds", "batch.microbatch_tokens"),
    *("model.logits_chunk", "model.keep_logits"),
    *("rollout.max_batch", "rollout.kv_tokens", "rollout.kv_memory_frac", "rollout.release_kv"),
    *("rollout.drafts", "systems.histospec"),
    *("task.grade_workers", "task.grade_timeout", "task.grade_memory"),
)
"""Keys and sections that may differ when a run is resumed: results change by rounding at most."""


@dataclass
class Run(AbstractContextManager["Run"]):
    """One open run directory, with its trackers and its progress line."""

    path: Path
    progress: Progress
    _lock: IO[str]
    _trackers: list[Tracker]
    timer: Stopwatch = field(default_factory=lambda: Stopwatch())
    last_step: int | None = None
    """The last step whose row this process has logged."""
    reopened: int | None = None
    """The step before those of this process, if its row is to be logged again."""

    @classmethod
    def open(
        cls, config: Config, *, trackers: Sequence[Tracker] = (), output: TextIO | None = None
    ) -> Run:
        """Create `config.run_dir`, or open the run in it; `trackers` join those of the recipe."""
        path = Path(config.run_dir).expanduser()
        lock = lock_run(path)
        if (changes := find_changes(path, config)) is None:
            shutil.rmtree(path / INITIAL, ignore_errors=True)  # of a run that never began
        _drop(path / EVENTS)  # only a torn line; `rewind` mends the other files
        with replacing(path / CONFIG) as file:
            file.write(to_json(config).encode())
        run = cls(path, Progress(config.steps, output), lock, list(trackers))
        if config.track.tensorboard:
            run._trackers.append(TensorBoardTracker(path / "tensorboard"))
        if config.track.wandb:
            run._trackers.append(WandbTracker(config, path, warn=run.warn))
        if changes is not None:
            listed = ", ".join(f"{key} {a!r} -> {b!r}" for key, (a, b) in changes.items())
            message = f"run resumed; changed: {listed}" if listed else "run resumed"
            run.event("resume", message, changes=changes)
            if "steps" in changes and config.optim.schedule != "constant":
                planned = f"optim.schedule = {config.optim.schedule!r} was laid out for"
                run.warn(f"{planned} {changes['steps'][0]} steps: the learning rate jumps")
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl and hand it to the progress line and all trackers."""
        values = {name: float(value) for name, value in metrics.items()}
        if step == self.reopened:
            _drop(self.path / METRICS, step, {"step": step} | values)
        else:
            _append(self.path / METRICS, {"step": step} | values)
        self.last_step = step
        self.progress.log(step, values)
        for tracker in list(self._trackers):
            try:
                tracker.log(step, values)
            except Exception as error:  # metrics.jsonl has it all, so the run goes on
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                self.warn(f"{name} failed at step {step} and is off from here on: {error!r}")

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one rollout to samples.jsonl."""
        _append(self.path / SAMPLES, {"step": step} | dict(record))

    def evaluation(self, step: int, precision: str, outcomes: Sequence[bool]) -> None:
        """Append which held-out problems were answered right to evals.jsonl, as zeros and ones."""
        digits = "".join("1" if is_right else "0" for is_right in outcomes)
        _append(self.path / EVALS, {"step": step, "precision": precision, "outcomes": digits})

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Append to events.jsonl; a "warning" or an "alarm" is also printed."""
        log_event(self.path, kind, message, **fields)
        if kind in ("warning", "alarm"):
            self.progress.print(f"{kind.upper()}: {message}")

    def warn(self, message: str) -> None:
        self.event("warning", message)

    def rewind(self, step: int) -> None:
        """Forget what was logged from `step` on, so that a run resumed there writes it again."""
        num_kept, num_lost = forget_steps(self.path, step)
        if num_lost:
            self.warn(
                f"{num_lost} logged steps have no checkpoint after them and are repeated, from "
                f"step {step} on; save.every says how often one is saved"
            )
        if num_kept < step:  # a power failure, say, loses what was logged last
            self.warn(
                f"{METRICS} lacks {step - num_kept} of the {step} steps before the checkpoint: the "
                "run goes on with the same weights, and its curves have a gap"
            )

    def rows(self) -> list[dict[str, float]]:
        """What has been logged so far of the steps that are complete."""
        path = self.path / METRICS
        found = iter_jsonl(path) if path.exists() else ()
        return [_as_numbers(row) for row in found if row["step"] != self.reopened]

    def find_row(self, step: int) -> dict[str, float]:
        """What was logged of a step; empty if nothing was."""
        row = next((row for row in self.rows() if row["step"] == step), {})
        return {name: value for name, value in row.items() if name != "step"}

    def reopen(self, step: int) -> None:
        """Let `log` replace the row of the last step, and forget what its evaluation has left.

        Until then the row stays in its file: a kill does not lose it.
        """
        self.progress.print("the last step has not been evaluated, which comes first")
        self.reopened = step
        _drop(self.path / EVALS, step + 1)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # it must not hide how the run ended
                name = type(tracker).__name__
                self.progress.print(f"WARNING: {name} could not be closed: {error!r}")
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Stopwatch:
    """Seconds spent under each name since the last `lap`, which returns and clears them.

    "step" is all the time between two laps.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """Spent under `name` since the last lap."""
        return self._seconds[name]

    def lap(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, defaultdict(float)
        start, self._start = self._start, time.perf_counter()
        return {f"timing_s/{name}": x for name, x in seconds.items()} | {
            "timing_s/step": self._start - start
        }


def log_event(path: Path, kind: str, message: str, **fields: Any) -> None:
    """Append to the events.jsonl of the run at `path`."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    _append(path / EVENTS, {"time": now, "kind": kind, "message": message} | fields)


def forget_steps(path: Path, step: int) -> tuple[int, int]:
    """Drop what the run at `path` logged from `step` on; how many trained steps stay and go."""
    first = step or -1  # step 0 starts anew, with the evaluation of the untrained model
    # evals.jsonl counts updates: the weights of this step have been evaluated already.
    _drop(path / SAMPLES, first)
    _drop(path / EVALS, first + 1)
    return _drop(path / METRICS, first)


def forget_evaluations(path: Path) -> None:
    """Drop all held-out results of the run at `path`, which is to answer other problems."""
    (path / EVALS).unlink(missing_ok=True)
    rows = read_jsonl(path / METRICS) if (path / METRICS).exists() else []
    with replacing(path / METRICS) as file:
        for row in rows:
            file.write(_line({k: v for k, v in row.items() if not k.startswith("eval/")}))


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All records of a file without a torn last line."""
    return list(iter_jsonl(path))


def iter_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of `read_jsonl` one at a time: samples.jsonl can be larger than memory."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # only the last line of a file has no end
                    return
                raise DataError(
                    f"{path}, line {number} is not valid JSON: {error}; mend or remove that line"
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
                raise DataError(
                    f"{path}, line {number} is no record of a run: {record!r:.100}; "
                    "mend or remove that line"
                )
            yield record


def check_logs(path: Path) -> None:
    """Raise DataError if a log of the run at `path`, which a resume reads, is damaged."""
    for name in (METRICS, SAMPLES, EVALS, EVENTS):
        if (path / name).is_file():
            for _ in iter_jsonl(path / name):
                pass


def _as_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row of metrics.jsonl, which has "nan" for one."""
    try:
        return {name: float(value) for name, value in row.items()}
    except (TypeError, ValueError) as error:
        where = f"step {row['step']} in {METRICS} of the run"
        raise DataError(f"{where}: {error}; mend or remove that line") from error


def _line(record: Mapping[str, Any]) -> bytes:
    """JSON has no NaN and no infinity: they become strings."""
    strict = json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))
    line = json.dumps(strict, ensure_ascii=False, allow_nan=False)
    return line.encode(errors="backslashreplace") + b"\n"  # a lone surrogate as \ud800


def _append(path: Path, record: Mapping[str, Any]) -> None:
    try:
        with path.open("ab") as file:
            file.write(_line(record))
    except OSError as error:
        raise TrainingError(
            f"cannot append to {path}: {error.strerror or error}; make room and resume the run"
        ) from error


def _drop(path: Path, first_gone: float = math.inf, *instead: Mapping[str, Any]) -> tuple[int, int]:
    """Drop a torn last line, and records from step `first_gone` on; append those `instead`.

    Returns how many trained steps stay and how many go.
    """
    num_kept = num_gone = 0
    if path.exists():
        with replacing(path) as file:
            for record in iter_jsonl(path):
                is_trained = record.get("step", -1) >= 0
                if record.get("step", -1) < first_gone:
                    num_kept += is_trained
                    file.write(_line(record))
                else:
                    num_gone += is_trained
            for record in instead:
                file.write(_line(record))
    return num_kept, num_gone


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file beside `path`, then put it in its place."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):  # what a killed run left may be as unwritable
            temporary.unlink()
        raise TrainingError(f"cannot write {path}: {error.strerror or error}") from error


def lock_run(path: Path) -> IO[str]:
    """Keep other processes out of a run directory; the system lets go when this one ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"run_dir = {str(path)!r} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"run_dir = {str(path)!r} is in use by another process") from error
    return file


def find_changes(path: Path, config: Config) -> dict[str, list[Any]] | None:
    """{"optim.lr": [old, new], ...} since the run at `path` last ran; None for a new run.

    Raises if `config` cannot continue that run. Writes nothing.
    """
    if not (path / CONFIG).exists():
        if found := [name for name in OWN if (path / name).exists()]:
            raise ConfigError(
                f"run_dir = {str(path)!r} holds {found[0]} but no {CONFIG}, so it cannot be "
                "resumed, and a new run would lose it; choose another run_dir or move it away"
            )
        return None
    old = flatten(read_recipe(path))
    keeps_none = 0 in (config.save.keep, old.get("save.keep", 1))
    _check_progress(path, config.steps, keeps_none=keeps_none)
    # A run from before a key existed had its default.
    changes = _differences(_flat(Config()) | old, _flat(config))
    refused = {key: pair for key, pair in changes.items() if not may_change(key)}
    if not refused:
        return changes
    if not (path / METRICS).exists() and not (path / "checkpoints").exists():
        return None  # it failed before its first step, and the recipe has been mended
    lines = "\n".join(f"  - {key}: {a!r} there, {b!r} here" for key, (a, b) in refused.items())
    raise ConfigError(
        f"run_dir = {str(path)!r} holds a run with another recipe:\n{lines}\n"
        f"Choose another run_dir, or keep these keys; only {', '.join(CHANGEABLE)} may change. "
        "To change more, make a new run from a checkpoint: "
        f"qurl fork {shlex.quote(str(path))} --at STEP"
    )


def compare_recipes(before: Config, after: Config) -> dict[str, list[Any]]:
    """{"optim.lr": [before, after], ...} of the keys that differ."""
    return _differences(_flat(before), _flat(after))


def _flat(config: Config) -> dict[str, Any]:
    return flatten(json.loads(to_json(config)))  # in JSON, tuples are lists


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    before, after = dict.fromkeys(after, "absent") | before, dict.fromkeys(before, "absent") | after
    return {key: [before[key], after[key]] for key in before if before[key] != after[key]}


def _check_progress(path: Path, steps: int, *, keeps_none: bool) -> None:
    """Refuse fewer steps than are trained, and to repeat steps for good if nothing is saved."""
    from qurl.run.checkpoint import checkpoint_step, latest_checkpoint

    checkpoint = latest_checkpoint(path / "checkpoints")
    trained = checkpoint_step(checkpoint) if checkpoint else 0
    if trained > steps:
        raise ConfigError(
            f"steps = {steps}, but run_dir = {str(path)!r} has been trained for {trained} already; "
            "ask for more steps, or choose another run_dir"
        )
    rows = read_jsonl(path / METRICS) if keeps_none and (path / METRICS).exists() else []
    if any(row["step"] >= trained for row in rows):
        raise ConfigError(
            f"save.keep = 0, and run_dir = {str(path)!r} has logged steps that no checkpoint "
            "covers: it cannot go on, and starting again would lose them; choose another run_dir"
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def may_change(key: str) -> bool:
    """May a resumed run have another value of this key?"""
    return is_among(key, CHANGEABLE)


def is_among(key: str, names: Iterable[str]) -> bool:
    """Is a key one of these, or in a section that is?"""
    return any(key == name or key.startswith(f"{name}.") for name in names)
