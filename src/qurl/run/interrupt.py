"""Stops a run between two steps rather than within one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ANNOUNCING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""What schedulers send ahead of the end, often to several processes and several times
(`sbatch --signal=USR1@600`; SIGXCPU comes with a limit of CPU time)."""


class Interrupt:
    """Context manager: a signal requests a stop after this step, when everything is saved.

    A second Ctrl-C, SIGTERM or closing terminal stops at once; `ANNOUNCING` signals never do.
    nohup keeps its meaning. Signals reach the main thread only, so nothing is caught in other
    threads.
    """

    def __init__(self) -> None:
        self.is_requested = self._is_ending = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*ENDING, *ANNOUNCING):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._is_ending and number in ENDING:
            raise KeyboardInterrupt
        self._is_ending |= number in ENDING
        if self.is_requested:
            return
        self.is_requested = True
        # Not print(), which the signal may have interrupted. The reader may be gone: Ctrl-C also
        # ends a `| tee`.
        with contextlib.suppress(OSError, ValueError):
            os.write(
                sys.stderr.fileno(),
                b"\nstopping after this step, which is saved; twice stops at once\n",
            )
