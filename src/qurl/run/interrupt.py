"""Stops a run between two steps rather than within one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """Context manager: Ctrl-C, SIGTERM or a closing terminal requests a stop after this step.

    A second signal stops at once. nohup keeps its meaning. Signals reach the main thread only, so
    nothing is caught in other threads.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
        # Not print(), which the signal may have interrupted. The reader may be gone: Ctrl-C also
        # ends a `| tee`.
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")
