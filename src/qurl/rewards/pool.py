"""Grading in processes that can be killed.

A grader may hang (sympy does), crash or print. None of this may stop the run in silence or count as
a wrong answer. At the deadline the process is killed and the answer counts as a timeout, as it does
when the memory limit is reached. Any other failure is a RewardError that carries the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from qurl.errors import RewardError
from qurl.plugins import name_of
from qurl.rewards.reward import INLINE, Calls, Grade, Outcome, Scorer, failure, load_reward

_START_SECONDS = 120.0  # imports may take long; they do not count against a grader's deadline
_QUIET_SECONDS = 15.0  # until a word is said about that
_NO_START = f"it could not be imported in {_START_SECONDS:g} s"
_LARGEST_MESSAGE = 2**30
_ASYNC_GRACE = 1.0  # seconds until a process that did not cancel its late async calls is killed


class GradingPool(contextlib.AbstractContextManager["GradingPool"]):
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
        memory: float | None = 8.0,
    ) -> None:
        """`memory` is what a process may allocate, in GB."""
        spec = reward if isinstance(reward, str) else name_of(reward)
        self.reward = spec or getattr(reward, "__qualname__", repr(reward))
        self.timeout, self.timeout_score = timeout, timeout_score
        self._inline: Scorer | None = None
        if spec is None or spec in INLINE:
            function: Any = load_reward(spec) if spec else reward
            self._inline = Scorer(function, self.reward)
            self._is_async, self._is_grouped = False, self._inline.is_grouped
            return
        self._threads = ThreadPoolExecutor(workers)  # each waits for one process
        self._workers = [_Worker(spec, memory) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for worker in self._workers:
                self._is_async, self._is_grouped = worker.wait_ready()
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; grades that were not started are cancelled."""
        if self._inline is None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.close()
            self._threads.shutdown()

    def grade(self, items: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Grade]:
        """The grade of each (text, answer, extra), in order, each as a problem of its own."""
        return wait_for(f for text, a, extra in items for f in self.submit([text], a, extra))

    def submit(
        self, texts: Sequence[str], answer: str, extra: Mapping[str, Any]
    ) -> list[Future[list[Grade]]]:
        """Start to grade the completions of one problem; together the futures hold their grades."""
        calls = [texts] if self._is_grouped else [[text] for text in texts]
        requests = [calls] if self._is_async else [[call] for call in calls]
        return [self._submit(request, answer, extra) for request in requests]

    def _submit(self, calls: Calls, answer: str, extra: Mapping[str, Any]) -> Future[list[Grade]]:
        if self._inline is None:
            return self._threads.submit(self._grade, calls, answer, extra)
        future = Future()
        try:
            future.set_result(self._read(self._inline(calls, answer, extra), calls))
        except RewardError as error:
            future.set_exception(error)
        return future

    def _grade(self, calls: Calls, answer: str, extra: Mapping[str, Any]) -> list[Grade]:
        seconds = self.timeout + (_ASYNC_GRACE if self._is_async else 0)
        worker = self._idle.get()
        try:
            outcomes = worker.ask((calls, answer, dict(extra), self.timeout), seconds)
        finally:
            self._idle.put(worker)
        if len(outcomes) < len(calls):  # One hung or crashed; each gets a deadline of its own.
            return [g for call in calls for g in self._grade([call], answer, extra)]
        return self._read(outcomes, calls)

    def _read(self, outcomes: Sequence[Outcome], calls: Calls) -> list[Grade]:
        grades = []
        for outcome, texts in zip(outcomes, calls, strict=True):
            if isinstance(outcome, RewardError):
                raise outcome
            late = [Grade(self.timeout_score, timed_out=True)] * len(texts)
            grades += late if outcome is None else outcome
        return grades


class GradingPools(contextlib.AbstractContextManager["GradingPools"]):
    """A pool for each reward; a problem's `extra["qurl_reward"]` names its own, else the first."""

    def __init__(
        self, reward: str | Callable[..., Any], others: Iterable[str], **options: Any
    ) -> None:
        """`options` are those of `GradingPool`."""
        with contextlib.ExitStack() as stack:
            self._first = stack.enter_context(GradingPool(reward, **options))
            self._others = {o: stack.enter_context(GradingPool(o, **options)) for o in others}
            self._stack = stack.pop_all()
        self.reward, self.timeout = self._first.reward, self._first.timeout

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def submit(
        self, texts: Sequence[str], answer: str, extra: Mapping[str, Any]
    ) -> list[Future[list[Grade]]]:
        """As `GradingPool.submit`."""
        pool = self._others.get(extra.get("qurl_reward", ""), self._first)
        return pool.submit(texts, answer, extra)


Pool = GradingPool | GradingPools


class _Worker:
    """The pool's end of one grading process."""

    def __init__(self, reward: str, memory: float | None) -> None:
        self._reward, self._folder = reward, Path.cwd()
        self._memory = -1 if memory is None else int(memory * 1e9)
        self._lock, self._is_closed = threading.Lock(), False
        self._launch()

    def _launch(self) -> None:
        self._kind: Any = None
        self._key = secrets.token_hex(16)
        self._socket, theirs = Pipe()
        fd = theirs.fileno()
        # The worker imports what we import, wherever it runs.
        path = filter(None, [str(Path(__file__).resolve().parents[2]), *sys.path])
        command = (sys.executable, "-u", "-m", "qurl.rewards.worker")
        arguments = (self._reward, str(fd), self._key, str(self._memory))
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[fd],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # so that what a grader started is killed with it
        )
        theirs.close()

    def wait_ready(self) -> tuple[bool, bool]:
        """Wait until the reward is loaded, or raise: is it async, is it grouped?"""
        if self._kind is None:
            if not self._socket.poll(_QUIET_SECONDS):
                loading = f"reward {self._reward!r} is still being imported; it is given up after"
                print(f"{loading} {_START_SECONDS:g} s", file=sys.stderr)
            kind = self._receive(_START_SECONDS) or failure(self._reward, _NO_START)
            if isinstance(kind, RewardError):
                self.kill()
                raise kind
            self._kind = kind
        return self._kind

    def ask(self, request: tuple[Calls, str, Any, float], seconds: float) -> list[Outcome]:
        """The outcome of each call; a single one if the process hung or died."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the grading pool is closed")
            if self._process.poll() is not None:
                self._launch()
        self.wait_ready()
        with contextlib.suppress(OSError):  # a dead process shows as the end of its messages
            self._socket.send(request)
        [texts, *_], answer, *_ = request
        outcomes = self._receive(seconds, texts, answer)
        return outcomes if isinstance(outcomes, list) else [outcomes]

    def _receive(self, seconds: float, texts: Sequence[str] = (), answer: str = "") -> Any:
        """The next message; an error if the process died, None if it hung and was killed."""
        try:
            message = self._read_message(time.monotonic() + seconds)
        except (EOFError, OSError):
            cause = f"the grading process died, exit status {self._process.wait()}"
            return failure(self._reward, cause, texts, answer)
        if message is None:
            self.kill()
            return None
        key, digest, payload = message[:16], message[16:48], message[48:]
        if key.hex() == self._key and hashlib.sha256(payload).digest() == digest:
            return pickle.loads(payload)
        self.kill()
        cause = "it wrote into a file descriptor that it did not open"
        return failure(self._reward, cause, texts, answer)

    def _read_message(self, deadline: float) -> bytes | None:
        """The next message, or what else was written where its length should be; None if late."""
        # As `multiprocessing.Connection` frames them, but its recv would wait for ever for the
        # rest of a message that is none.
        header = self._read_exactly(4, deadline)
        if header is None:
            return None
        size = int.from_bytes(header, "big", signed=True)
        if size == -1:
            size = int.from_bytes(self._read_exactly(8, deadline) or b"", "big")
        if not 48 <= size <= _LARGEST_MESSAGE:
            return header
        start = self._read_exactly(16, deadline)
        if start is None or start.hex() != self._key:
            return start
        rest = self._read_exactly(size - 16, deadline)
        return None if rest is None else start + rest

    def _read_exactly(self, size: int, deadline: float) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            if not self._socket.poll(max(0.0, deadline - time.monotonic())):
                return None
            part = os.read(self._socket.fileno(), min(size - len(parts), 2**20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """End the process for good."""
        with self._lock:
            self._is_closed = True
        self.kill()

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
