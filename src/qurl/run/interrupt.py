"""Stopping a run between two steps instead of in the middle of one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Ctrl-C, SIGTERM or a terminal that closes asks for a stop at the end of the step; a second
    one stops at once. Under nohup a terminal may close.

    Used as a context manager. Signals reach only the main thread: elsewhere nothing is caught.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        # Not print(): the signal may have come in the middle of one. And whoever read what is
        # written here may be gone: Ctrl-C ends a `| tee` as well.
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")
