"""Grading in processes that can be killed.

A grader may hang (sympy does), crash or print. None of this may stop the run in silence or count as
a wrong answer. At the deadline the process is killed and the answer counts as a timeout. Any other
failure is a RewardError that carries the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from qurl.errors import ConfigError, RewardError
from qurl.plugins import name_of
from qurl.rewards.reward import Scorer, is_inline, load_reward

Item = tuple[str, str, Mapping[str, Any]]
"""The text of an answer, the truth, and `Problem.extra`."""

_START_SECONDS = 120.0
"""A grader's imports may take long on a busy machine; they do not count against its deadline."""
_ASYNC_CALLS = 64
"""Calls of an async reward that one process runs at the same time."""
_ASYNC_GRACE = 1.0
"""A process cancels late async calls itself. If it cannot, it is killed after these seconds."""


@dataclass(frozen=True)
class Grade:
    """What one answer is worth."""

    score: float
    details: Mapping[str, float] = field(default_factory=dict)
    """The other values of a reward that returns a mapping."""
    timed_out: bool = False

    @property
    def accuracy(self) -> float:
        """For filters and evaluation: the score, unless a shaped reward gives it separately."""
        return self.details.get("accuracy", self.score)


@dataclass(frozen=True)
class _Job:
    """One call of the reward."""

    texts: Sequence[str]
    answer: str
    extra: Mapping[str, Any]
    grades: Future[list[Grade]] = field(default_factory=Future)


class GradingPool:
    """Grades with one reward, in `workers` processes; cheap built-in rewards need none.

        with GradingPool("math") as pool:
            grades = pool.grade([(text, answer, extra), ...])

    A `module:function` is looked up in the working directory first. `reward` may also be a function.
    One that processes can import by name runs there. Lambdas, inner functions and functions of the
    main script run in this process, one call after the other and without a deadline. After an error
    the pool can be used again.
    """

    def __init__(
        self,
        reward: str | Callable[..., Any],
        *,
        workers: int = 2,
        timeout: float = 10.0,
        timeout_score: float = 0.0,
    ) -> None:
        if workers < 1 or timeout <= 0:
            raise ConfigError(f"workers = {workers} and timeout = {timeout} must be positive")
        spec = reward if isinstance(reward, str) else name_of(reward)
        self.reward = spec or getattr(reward, "__qualname__", repr(reward))
        self.timeout = timeout
        self.timeout_score = timeout_score
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._inline: Scorer | None = None
        if spec is None or is_inline(spec):
            self._inline = Scorer(load_reward(spec) if spec else reward)  # type: ignore[arg-type]
            self._is_grouped = self._inline.is_grouped
        else:
            self._start(spec, workers)

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; what waits is cancelled."""
        while not self._jobs.empty():
            if job := self._jobs.get():
                job.grades.cancel()
        self._jobs.put(None)
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        self._workers, self._threads = [], []

    def grade(self, items: Sequence[Item]) -> list[Grade]:
        """The grade of each item, in order; each counts as a problem of its own."""
        return wait_for(
            [f for text, answer, extra in items for f in self.submit([text], answer, extra)]
        )

    def submit(
        self, texts: Sequence[str], answer: str, extra: Mapping[str, Any]
    ) -> list[Future[list[Grade]]]:
        """Start to grade the completions of one problem: one future per call of the reward."""
        if self._inline is None and not self._threads:
            raise RewardError(f"the grading pool of {self.reward!r} is closed")
        calls = [texts] if self._is_grouped else [[text] for text in texts]
        jobs = [_Job(call, answer, extra) for call in calls]
        for job in jobs:
            if self._inline is None:
                self._jobs.put(job)
            else:
                self._grade_inline(self._inline, job)
        return [job.grades for job in jobs]

    def _grade_inline(self, scorer: Scorer, job: _Job) -> None:
        try:
            value = scorer.call(job.texts, job.answer, job.extra)
            value = asyncio.run(value) if scorer.is_async else value
            self._settle(job, {"values": scorer.check(value, len(job.texts))})
        except Exception as error:
            self._settle(job, {"error": repr(error), "traceback": traceback.format_exc()})

    def _start(self, spec: str, num_workers: int) -> None:
        self._workers = [_Worker(spec, Path.cwd()) for _ in range(num_workers)]
        try:
            for worker in self._workers:
                kind = worker.wait_ready()
                if "error" in kind:
                    raise self._failure(kind, None)
                self._is_grouped = kind["is_grouped"]
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, worker: _Worker) -> None:
        """Feed one process until the pool is closed."""
        while jobs := self._take(worker.num_calls):
            self._grade(worker, jobs)
        worker.kill()

    def _take(self, limit: int) -> list[_Job]:
        """Wait for a job and take the others that wait too; none if the pool is closed."""
        jobs: list[_Job] = []
        while len(jobs) < limit:
            try:
                job = self._jobs.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # for the other threads, and for our next turn
                break
            if job.grades.set_running_or_notify_cancel():
                jobs.append(job)
        return jobs

    def _grade(self, worker: _Worker, jobs: Sequence[_Job]) -> None:
        left = dict(enumerate(jobs))
        for message in worker.ask(jobs, self.timeout):
            if "job" in message:
                self._settle(left.pop(message["job"]), message)
            elif len(jobs) == 1:
                self._settle(jobs[0], message)
            else:  # One of them hung or crashed; each gets a deadline of its own.
                for job in left.values():
                    self._grade(worker, [job])

    def _settle(self, job: _Job, message: Mapping[str, Any]) -> None:
        if "error" in message:
            job.grades.set_exception(self._failure(message, job))
        elif "timed_out" in message:
            job.grades.set_result([Grade(self.timeout_score, timed_out=True)] * len(job.texts))
        else:
            job.grades.set_result([_grade(values) for values in message["values"]])

    def _failure(self, message: Mapping[str, Any], job: _Job | None) -> RewardError:
        what = f"reward {self.reward!r} failed: {message['error']}"
        item = job and ("\n\n".join(job.texts), job.answer)
        return failure(what, item, evidence=message.get("traceback", ""))


class _Worker:
    """The pool's end of one grading process."""

    def __init__(self, reward: str, folder: Path) -> None:
        self._reward, self._folder = reward, folder
        self._launch()

    def _launch(self) -> None:
        self._socket, theirs = Pipe()
        self._kind: dict[str, Any] = {}
        self._launched = time.monotonic()
        fd = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "qurl.rewards.worker", self._reward, str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[fd],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": _python_path()},
            start_new_session=True,  # so that what a grader started is killed with it
        )
        theirs.close()

    @property
    def num_calls(self) -> int:
        """Calls that the process runs at the same time."""
        return _ASYNC_CALLS if self._kind.get("is_async") else 1

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the reward is loaded; what kind it is, or an error."""
        if not self._kind:
            message = self._receive(self._launched + _START_SECONDS)
            if "timed_out" in message:
                return {"error": f"no start in {_START_SECONDS} s"}
            if "error" in message:
                return message
            self._kind = message
        return self._kind

    def ask(self, jobs: Sequence[_Job], timeout: float) -> Iterator[dict[str, Any]]:
        """The replies to all jobs. A last one without `job` says why the process was ended."""
        kind = self.wait_ready()
        if "error" in kind:
            self._restart()
            yield from ({"job": index, **kind} for index in range(len(jobs)))
            return
        request = [{"texts": j.texts, "answer": j.answer, "extra": dict(j.extra)} for j in jobs]
        message = json.dumps({"jobs": request, "timeout": timeout}, default=str)
        deadline = time.monotonic() + timeout + (_ASYNC_GRACE if kind["is_async"] else 0)
        with contextlib.suppress(OSError):  # a dead process shows as the end of its replies
            self._socket.send_bytes(message.encode())
        for _ in jobs:
            reply = self._receive(deadline)
            if "job" not in reply:
                self._restart()
            yield reply
            if "job" not in reply:
                return

    def _receive(self, deadline: float) -> dict[str, Any]:
        try:
            if not self._socket.poll(max(0.0, deadline - time.monotonic())):
                return {"timed_out": True}
            return json.loads(self._socket.recv_bytes())
        except (EOFError, OSError):
            return {"error": f"the grading process died, exit status {self._process.wait()}"}

    def _restart(self) -> None:
        self.kill()
        self._socket.close()
        self._launch()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _python_path() -> str:
    """The worker imports what we import, wherever it runs."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [root, *sys.path]))


def _grade(values: Mapping[str, float]) -> Grade:
    return Grade(values["score"], {k: v for k, v in values.items() if k != "score"})


def wait_for(futures: Iterable[Future[list[Grade]]]) -> list[Grade]:
    """The grades of all futures, in order; the first error cancels the rest."""
    futures = list(futures)
    try:
        return [grade for future in futures for grade in future.result()]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def failure(
    what: str,
    item: tuple[str, str] | None,
    *,
    evidence: str = "",
    kind: type[RewardError] = RewardError,
) -> RewardError:
    """An error that carries `text`, `answer` and the grader's `traceback`."""
    text, answer = item or ("", "")
    where = f"; it was grading {text[-300:]!r} against {answer!r}" if item else ""
    error = kind(f"{what}{where}")
    error.text, error.answer, error.traceback = text, answer, evidence
    if evidence:
        error.add_note(evidence)
    return error
