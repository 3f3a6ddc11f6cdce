"""Work beside that of this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Run it in a thread, which ends with this process: after a failure nobody waits for it."""
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:  # raised where the result is asked for
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found
