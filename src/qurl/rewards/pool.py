"""Grading in processes that can be killed.

A grader may hang (sympy does), crash or print; none of it may stop the run in silence or be
mistaken for a wrong answer. At the deadline the process is killed and the answer counts as a
timeout. Anything else that goes wrong is a RewardError with the answer in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurl.errors import ConfigError, RewardError
from qurl.rewards.reward import check_value, is_inline, load_reward

Item = tuple[str, str, Mapping[str, Any]]
"""The text of an answer, the truth, and `Problem.extra`."""

_START_SECONDS = 120.0
"""Importing a grader may take long on a busy machine; it does not count against its deadline."""


@dataclass(frozen=True)
class Grade:
    """What one answer is worth."""

    score: float
    details: Mapping[str, float] = field(default_factory=dict)
    """The other values of a reward that returns a mapping."""
    timed_out: bool = False

    @property
    def accuracy(self) -> float:
        """For filters and evaluation: the score, unless a shaped reward says it apart."""
        return self.details.get("accuracy", self.score)


class GradingPool:
    """Grades with one reward, in `workers` processes; cheap built-in rewards need none.

        with GradingPool("math") as pool:
            grades = pool.grade([(text, answer, extra), ...])

    A `module:function` is looked for in the working directory first. After an error the pool can be
    used again.
    """

    def __init__(
        self, reward: str, *, workers: int = 2, timeout: float = 10.0, timeout_score: float = 0.0
    ) -> None:
        if workers < 1 or timeout <= 0:
            raise ConfigError(f"workers = {workers} and timeout = {timeout} must be positive")
        self.reward = reward
        self.timeout = timeout
        self.timeout_score = timeout_score
        self._lock = threading.Lock()
        self._inline = load_reward(reward) if is_inline(reward) else None
        self._folder = Path.cwd()
        self._workers = [] if self._inline else [self._start() for _ in range(workers)]
        try:
            while any(w.is_starting for w in self._workers):
                self._collect(())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def grade(self, items: Sequence[Item]) -> list[Grade]:
        """The grade of each item, in order."""
        if self._inline is not None:
            return [self._grade_inline(item) for item in items]
        if not self._workers:
            raise RewardError(f"the grading pool of {self.reward!r} is closed")
        with self._lock:
            try:
                return self._grade_in_processes(items)
            except BaseException:
                self._replace([w for w in self._workers if not w.is_idle])
                raise

    def _grade_inline(self, item: Item) -> Grade:
        assert self._inline is not None
        try:
            return _grade(check_value(self._inline(*item)))
        except Exception as error:
            raise self._failure(repr(error), item, traceback.format_exc()) from error

    def _grade_in_processes(self, items: Sequence[Item]) -> list[Grade]:
        waiting = deque(range(len(items)))
        grades: dict[int, Grade] = {}
        while len(grades) < len(items):
            for worker in self._workers:
                if waiting and worker.is_idle:
                    job = waiting.popleft()
                    worker.send(job, items[job], self.timeout)
            grades.update(self._collect(items))
        return [grades[i] for i in range(len(items))]

    def _collect(self, items: Sequence[Item]) -> dict[int, Grade]:
        """Wait until some worker has replied or is late; the grades that this brought."""
        unfinished = [w for w in self._workers if not w.is_idle]
        grades: dict[int, Grade] = {}
        for worker in _wait_readable(unfinished):
            job, message = worker.job, worker.receive()
            if message is None:
                continue
            if "error" in message:
                item = None if job is None else items[job]
                raise self._failure(message["error"], item, message.get("traceback", ""))
            worker.job, worker.is_starting = None, False
            if job is not None:
                grades[job] = _grade(message["values"])
        for worker in unfinished:
            if worker.is_idle or time.monotonic() < worker.deadline:
                continue
            if worker.job is None:
                raise self._failure(f"no start in {_START_SECONDS} s", None)
            grades[worker.job] = Grade(self.timeout_score, timed_out=True)
            self._replace([worker])
        return grades

    def _failure(self, what: str, item: Item | None, evidence: str = "") -> RewardError:
        return failure(f"reward {self.reward!r} failed: {what}", item, evidence=evidence)

    def _replace(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> _Worker:
        return _Worker(self.reward, self._folder)


class _Worker:
    """The pool's end of one grading process."""

    def __init__(self, reward: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qurl.rewards.worker", reward],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": _python_path()},
            start_new_session=True,  # so that what a grader started is killed with it
        )
        self._buffer = b""
        self.job: int | None = None
        """Index of the item that it grades."""
        self.is_starting = True
        self.deadline = time.monotonic() + _START_SECONDS

    @property
    def is_idle(self) -> bool:
        return self.job is None and not self.is_starting

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, job: int, item: Item, timeout: float) -> None:
        text, answer, extra = item
        request = {"text": text, "answer": answer, "extra": dict(extra), "timeout": timeout}
        line = json.dumps(request, default=str) + "\n"
        self.job, self.deadline = job, time.monotonic() + timeout
        assert self._process.stdin is not None
        # A worker that is dead already shows as the end of its replies.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """The reply, an error if the process died, or None while the line is not complete."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            return {"error": f"the grading process died, exit status {self._process.wait()}"}
        self._buffer += data
        if not self._buffer.endswith(b"\n"):
            return None
        line, self._buffer = self._buffer, b""
        return json.loads(line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _wait_readable(workers: Sequence[_Worker]) -> list[_Worker]:
    """Block until a worker has something to read or the first deadline passes."""
    first = min(w.deadline for w in workers)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker, selectors.EVENT_READ)
        events = selector.select(max(0.0, first - time.monotonic()))
    ready = {key.fd for key, _ in events}
    return [w for w in workers if w.fileno() in ready]


def _python_path() -> str:
    """The worker imports the same qurl as we do, wherever it runs."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))


def _grade(values: Mapping[str, float]) -> Grade:
    return Grade(values["score"], {k: v for k, v in values.items() if k != "score"})


def failure(
    what: str, item: Item | None, *, evidence: str = "", kind: type[RewardError] = RewardError
) -> RewardError:
    """An error that carries `text`, `answer` and the grader's `traceback`."""
    text, answer = ("", "") if item is None else item[:2]
    where = f"; it was grading {text[-300:]!r} against {answer!r}" if item else ""
    error = kind(f"{what}{where}")
    error.text, error.answer, error.traceback = text, answer, evidence
    if evidence:
        error.add_note(evidence)
    return error
