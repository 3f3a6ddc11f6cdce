"""Trains the arms of an experiment, several at a time, within a limit of wall time.

    python -m benchmarks.paper.run table1 --model DIR --train FILE --test FILE \\
        --runs runs/paper --jobs 3 --limit-s 540 --steps 100 --arms bf16,int8-acr --seeds 0

Every arm is a process of its own, `qurl train`, with its output in a log beside its run. At the
limit arms are interrupted, and what they have logged is their result; the same command goes on
where they were last saved, or from the start where `save.keep` is 0. Results are also collected
while arms run, so that no way of ending this command loses more than the last seconds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.paper.arms import EXPERIMENTS, ROOT, Arm
from benchmarks.paper.results import (
    RESULTS,
    check_same_recipe,
    keep_longer,
    measure,
    without_folders,
)
from qurl.bench.record import replace_text
from qurl.config import Config, load_config
from qurl.errors import ConfigError, QurlError
from qurl.run.checkpoint import latest_checkpoint
from qurl.run.directory import lock_run

POLL_S = 0.2
COLLECT_S = 20.0
ROOM_OF_OTHERS = 2 * 2**30
INTERRUPTED = (130, -signal.SIGINT)
"""Exit statuses of a run that was asked to stop; the second while it was still importing."""
ATTEMPTS = ".attempts.json"


@dataclass(frozen=True)
class Job:
    """One arm with one seed, and where its run and its result are."""

    experiment: str
    arm: Arm
    seed: int
    settings: dict[str, Any]
    """Of the command line; over those of the arm."""
    runs: Path
    out: Path
    is_dropped: bool = False
    """Whether its checkpoints go when it has finished; those of 0.5B with a critic are 12 GB."""

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"

    @property
    def run_dir(self) -> Path:
        return self.runs / self.experiment / self.name

    def beside(self, suffix: str) -> Path:
        return self.run_dir.with_name(self.name + suffix)

    @property
    def result(self) -> Path:
        return self.out / self.experiment / f"{self.name}.json"

    @property
    def overrides(self) -> dict[str, Any]:
        return {**self.arm.overrides, **self.settings}

    @property
    def flags(self) -> list[str]:
        keys = {**self.overrides, "seed": self.seed, "run_dir": self.run_dir}
        return [word for key, value in keys.items() for word in (f"--{key}", str(value))]

    @functools.cached_property
    def config(self) -> Config:
        return load_config(ROOT / self.arm.recipe, self.flags)


class Attempt:
    """One process that trains a job, from its start until it ended or was stopped."""

    def __init__(self, job: Job, num_jobs: int) -> None:
        self.job = job
        self.facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _machine()["commit"],
            "jobs": num_jobs,
        }
        self.is_killed = False
        discard_lost(job)
        attempts = job.beside(ATTEMPTS)
        self.earlier = json.loads(attempts.read_text()) if attempts.exists() else []
        self.started = self.collected = time.monotonic()
        self.process = start(job)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def interrupt(self) -> None:
        if not self.has_ended:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()
        self.process.wait()

    def collect(self) -> tuple[str, bool]:
        """Write what the run has logged so far: where it stands, and whether it is the longest."""
        job = self.job
        self.collected = time.monotonic()
        attempt = {**self.facts, "seconds": round(self.collected - self.started, 1)}
        attempts = [*self.earlier, attempt]
        replace_text(job.beside(ATTEMPTS), json.dumps(attempts, indent=1) + "\n")
        measured = measure(job.run_dir, job.config)
        status = self._status()
        record = {
            "experiment": job.experiment,
            "arm": job.arm.name,
            "seed": job.seed,
            "status": status,
            "recipe": job.arm.recipe,
            "overrides": {k: v for k, v in job.overrides.items() if not k.endswith("path")},
            "machine": _machine(),
            "attempts": attempts,
            **measured,
        }
        return f"{status} at step {measured['steps']}", keep_longer(job.result, record)

    def _status(self) -> str:
        code = self.process.poll()
        if code == 0:
            return "finished"
        if self.is_killed or code in (None, *INTERRUPTED):
            return "stopped"
        if code < 0:  # it had no last word: killed for memory, say
            return f"failed: killed by signal {-code}"
        words = self.job.beside(".log").read_text(errors="replace").strip().splitlines()
        return f"failed: {without_folders(''.join(words[-1:]), self.job.config)}"


def discard_lost(job: Job) -> None:
    """Remove a run that kept no checkpoint: it cannot go on, and its result has been collected."""
    if job.config.save.keep > 0 or not job.run_dir.exists():
        return
    if latest_checkpoint(job.run_dir / "checkpoints"):
        return  # of an earlier command; `qurl train` decides
    with lock_run(job.run_dir):
        shutil.rmtree(job.run_dir)
        job.beside(ATTEMPTS).unlink(missing_ok=True)


def start(job: Job) -> subprocess.Popen:
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "qurl", "train", str(ROOT / job.arm.recipe), *job.flags]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with job.beside(".log").open("a") as log:
        # In a process group of its own: a Ctrl-C in the terminal reaches it only through us.
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@functools.cache
def _machine() -> dict[str, Any]:
    import torch

    from qurl.bench.record import describe_machine

    return describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def run_jobs(jobs: Sequence[Job], *, num_jobs: int, limit_s: float, grace_s: float) -> bool:
    """Train the jobs in order, `num_jobs` at a time; at the limit stop them and start no more.

    Tells whether none failed.
    """
    deadline = time.monotonic() + limit_s
    waiting, running, is_sound = deque(jobs), list[Attempt](), True
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < num_jobs:
                running.append(Attempt(waiting.popleft(), num_jobs))
                _say(running[-1].job, "started")
            time.sleep(POLL_S)
            for attempt in [a for a in running if a.has_ended]:
                running.remove(attempt)
                is_sound &= finish(attempt)
            for attempt in running:
                if time.monotonic() - attempt.collected > COLLECT_S:
                    attempt.collect()
    finally:
        stop(running, grace_s)
        for attempt in running:
            is_sound &= finish(attempt)
    for job in waiting:
        _say(job, "not started")
    return is_sound


def stop(running: Sequence[Attempt], grace_s: float) -> None:
    """Interrupt all at once, and kill what has not ended in time."""
    for attempt in running:
        attempt.interrupt()
    deadline = time.monotonic() + grace_s
    for attempt in running:
        try:
            attempt.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            attempt.kill()


def finish(attempt: Attempt) -> bool:
    """Collect an arm that has ended, and say how; tells whether it did not fail."""
    status, is_longest = attempt.collect()
    has_more = not is_longest and attempt.job.result.exists()
    note = "; its file keeps an earlier, longer curve" if has_more else ""
    _say(attempt.job, status + note)
    if attempt.job.is_dropped and status.startswith("finished"):
        shutil.rmtree(attempt.job.run_dir / "checkpoints", ignore_errors=True)
    return not status.startswith("failed")


def _say(job: Job, message: str) -> None:
    print(f"{job.experiment} {job.name}: {message}", flush=True)


def plan(args: argparse.Namespace) -> list[Job]:
    """The jobs that are left to do, most wanted first; a mistake in any of them stops here."""
    experiment = EXPERIMENTS[args.experiment]
    if experiment.is_timed and args.jobs > 1:
        raise ConfigError(f"{experiment.name} measures time: its arms cannot share a machine")
    if experiment.is_timed:
        _check_alone(experiment.name)
    arms = [experiment.arm(n) for n in args.arms.split(",")] if args.arms else experiment.arms
    seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else experiment.seeds
    pairs = sorted([(a, s) for s in seeds for a in arms], key=lambda pair: pair[0].tier)
    settings = _settings(args)
    places = (settings, args.runs, args.out, args.drop_finished)
    jobs = [Job(experiment.name, arm, seed, *places) for arm, seed in pairs]
    for job in jobs:
        check_same_recipe(job.result, job.config)
    return [job for job in jobs if not _is_done(job)]


def _check_alone(experiment: str) -> None:
    """As far as memory tells. A context of our own takes less than a gigabyte."""
    import torch

    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    if total - free > ROOM_OF_OTHERS:
        raise ConfigError(
            f"{experiment} measures time, but others hold {(total - free) / 2**30:.1f} GiB of the "
            "GPU's memory; wait until they have ended"
        )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    named = {
        "steps": args.steps,
        "model.path": args.model,
        "task.path": args.train,
        "task.eval_path": args.test,
    }
    given = {key: value for key, value in named.items() if value is not None}
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair} is not key=value")
        given[key] = value
    return given


def _is_done(job: Job) -> bool:
    if not job.result.exists():
        return False
    record = json.loads(job.result.read_text())
    is_done = record["status"] == "finished" and record["steps"] >= job.config.steps
    if is_done:
        _say(job, "finished before")
    return is_done


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the arms of an experiment.")
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--model", help="folder of the model")
    parser.add_argument("--train", help="file of training problems")
    parser.add_argument("--test", help="file of held-out problems")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "paper")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--jobs", type=int, default=1, help="arms at a time")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--grace-s", type=float, default=45.0, help="for arms to end, then killed")
    parser.add_argument("--arms", help="a,b: only these, in this order")
    parser.add_argument("--seeds", help="0,1")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--drop-finished", action="store_true", help="remove the checkpoints of finished arms"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # However this command is ended, arms must not be left behind. And a shell starts what runs in
    # the background with SIGINT ignored, which arms would inherit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        jobs = plan(args)
        is_sound = run_jobs(jobs, num_jobs=args.jobs, limit_s=args.limit_s, grace_s=args.grace_s)
    except QurlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED[0]
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
