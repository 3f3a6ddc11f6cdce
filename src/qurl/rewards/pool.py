"""Grading in processes that can be killed.

A grader may hang (sympy does), crash or print. None of this may stop the run in silence or count as
a wrong answer. At the deadline the process is killed and the answer counts as a timeout. Any other
failure is a RewardError that carries the answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from qurl.errors import RewardError
from qurl.plugins import name_of
from qurl.rewards.reward import INLINE, Scorer, load_reward

_START_SECONDS = 120.0
"""A grader's imports may take long on a busy machine; they do not count against its deadline."""
_ASYNC_GRACE = 1.0
"""Seconds until a process that did not cancel its late async calls is killed."""
_Calls = Sequence[Sequence[str]]
"""The texts of each call of the reward."""
_Reply = Mapping[str, Any]
"""See `Scorer`."""


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


class GradingPool:
    """Grades with one reward, in `workers` processes; cheap built-in rewards need none.

        with GradingPool("math") as pool:
            grades = pool.grade([(text, answer, extra), ...])

    A `module:function` is looked up in the working directory first. `reward` may be a function too.
    If other processes can import it, it runs there. Lambdas, inner functions and functions of the
    main script run in this process, without a deadline. After an error the pool can be used again.
    """

    def __init__(
        self,
        reward: str | Callable[..., Any],
        *,
        workers: int = 2,
        timeout: float = 10.0,
        timeout_score: float = 0.0,
    ) -> None:
        spec = reward if isinstance(reward, str) else name_of(reward)
        self.reward = spec or getattr(reward, "__qualname__", repr(reward))
        self.timeout = timeout
        self.timeout_score = timeout_score
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._inline: Scorer | None = None
        if spec is None or spec in INLINE:
            self._inline = Scorer(load_reward(spec) if spec else reward)  # type: ignore[arg-type]
            self._is_async, self._is_grouped = False, self._inline.is_grouped
            return
        self._threads = ThreadPoolExecutor(workers)  # each waits for one process
        self._workers = [_Worker(spec) for _ in range(workers)]
        try:
            for worker in self._workers:
                kind = worker.wait_ready()
                if "error" in kind:
                    raise self.failure(kind)
                self._is_async, self._is_grouped = kind["is_async"], kind["is_grouped"]
                self._deadline = timeout + (_ASYNC_GRACE if self._is_async else 0)
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; grades that were not started are cancelled."""
        if self._inline is None:
            for wait in (False, True):  # again, because a retry may have started a process
                self._threads.shutdown(wait=wait, cancel_futures=True)
                for worker in self._workers:
                    worker.kill()

    def grade(self, items: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Grade]:
        """The grade of each (text, truth, extra), in order, each as a problem of its own."""
        return wait_for(
            f for text, truth, extra in items for f in self.submit([text], truth, extra)
        )

    def submit(
        self, texts: Sequence[str], answer: str, extra: Mapping[str, Any]
    ) -> list[Future[list[Grade]]]:
        """Start to grade the completions of one problem; together the futures hold their grades."""
        calls = [texts] if self._is_grouped else [[text] for text in texts]
        requests = [calls] if self._is_async else [[call] for call in calls]
        return [self._submit(request, answer, extra) for request in requests]

    def _submit(self, calls: _Calls, answer: str, extra: Mapping[str, Any]) -> Future[list[Grade]]:
        if self._inline is None:
            return self._threads.submit(self._grade, calls, answer, extra)
        future = Future()
        try:
            replies = self._inline(calls, answer, extra)
            future.set_result(self._read(replies, calls, answer))
        except RewardError as error:
            future.set_exception(error)
        return future

    def _grade(self, calls: _Calls, answer: str, extra: Mapping[str, Any]) -> list[Grade]:
        worker = self._idle.get()
        try:
            replies = worker.ask((calls, answer, dict(extra), self.timeout), self._deadline)
        finally:
            self._idle.put(worker)
        if len(replies) < len(calls):  # One hung or crashed; each gets a deadline of its own.
            return [g for call in calls for g in self._grade([call], answer, extra)]
        return self._read(replies, calls, answer)

    def _read(self, replies: Sequence[_Reply], calls: _Calls, answer: str) -> list[Grade]:
        grades = []
        for reply, texts in zip(replies, calls, strict=True):
            if "error" in reply:
                raise self.failure(reply, texts, answer)
            if "timed_out" in reply:
                grades += [Grade(self.timeout_score, timed_out=True)] * len(texts)
            else:
                grades += [Grade(values.pop("score"), values) for values in reply["values"]]
        return grades

    def failure(
        self,
        reply: _Reply,
        texts: Sequence[str] = (),
        answer: str = "",
        kind: type[RewardError] = RewardError,
    ) -> RewardError:
        """An error that carries `text`, `answer` and the grader's `traceback`."""
        text, evidence = "\n\n".join(texts), reply.get("traceback", "")
        where = f"; it was grading {text[-300:]!r} against {answer!r}" if texts else ""
        error = kind(f"reward {self.reward!r} failed: {reply['error']}{where}")
        error.text, error.answer, error.traceback = text, answer, evidence
        if evidence:
            error.add_note(evidence)
        return error


class _Worker:
    """The pool's end of one grading process."""

    def __init__(self, reward: str) -> None:
        self._reward, self._folder = reward, Path.cwd()
        self._launch()

    def _launch(self) -> None:
        self._kind: _Reply = {}
        self._socket, theirs = Pipe()
        fd = theirs.fileno()
        # The worker imports what we import, wherever it runs.
        path = filter(None, [str(Path(__file__).resolve().parents[2]), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "qurl.rewards.worker", self._reward, str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[fd],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # so that what a grader started is killed with it
        )
        theirs.close()

    def wait_ready(self) -> _Reply:
        """Wait until the reward is loaded; what kind it is, or an error."""
        if not self._kind:
            [self._kind] = self._receive(_START_SECONDS)
        if "timed_out" in self._kind:
            return {"error": f"no start in {_START_SECONDS} s"}
        return self._kind

    def ask(self, request: Any, seconds: float) -> list[_Reply]:
        """One reply per call; a single one if the process hung or died."""
        if self._process.poll() is not None:
            self._launch()
        kind = self.wait_ready()
        if "error" in kind:
            self.kill()
            return [kind]
        with contextlib.suppress(OSError):  # a dead process shows as the end of its replies
            self._socket.send(request)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> list[_Reply]:
        try:
            if self._socket.poll(seconds):
                return self._socket.recv()
            self.kill()
            return [{"timed_out": True}]
        except (EOFError, OSError):
            return [{"error": f"the grading process died, exit status {self._process.wait()}"}]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for(futures: Iterable[Future[list[Grade]]]) -> list[Grade]:
    """The grades of all futures, in order; the first error cancels the rest."""
    futures = list(futures)
    try:
        return [grade for future in futures for grade in future.result()]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
