"""The process that grades: `python -m qurl.rewards.worker SPEC FD`.

It exchanges JSON with `GradingPool` over the socket FD. The first message says what kind of reward
it has, or why there is none. Then each request gets a list with one reply per call.

    request  {"calls": [texts, ...], "answer": ..., "extra": {...}, "timeout": seconds}
    reply    see `Scorer`, or {"timed_out": true} for an async call that was cancelled

Imports stay light: no torch here.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from qurl.rewards.reward import Scorer, describe, load_reward


def main(spec: str, fd: int) -> None:
    os.set_inheritable(fd, False)  # what a grader starts must not keep the socket open
    pool = Connection(fd)
    try:
        scorer = Scorer(load_reward(spec))
    except BaseException as error:
        _send(pool, [describe(error)])
        return
    _send(pool, [{"is_grouped": scorer.is_grouped, "is_async": scorer.is_async}])
    with asyncio.Runner() as runner:  # one loop for all, so that a reward can keep connections
        while True:
            try:
                request = json.loads(pool.recv_bytes())
            except (EOFError, OSError):  # the pool is gone
                return
            # The pool kills at the deadline. If the pool itself is gone, this ends a hung grader.
            faulthandler.dump_traceback_later(2 * request["timeout"] + 10, exit=True)
            if scorer.is_async:
                _send(pool, runner.run(_reply_together(scorer, **request)))
            else:
                _send(pool, [_reply(scorer, texts, request) for texts in request["calls"]])
            faulthandler.cancel_dump_traceback_later()


def _reply(scorer: Scorer, texts: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
    return scorer.reply(texts, lambda: scorer.call(texts, request["answer"], request["extra"]))


async def _reply_together(
    scorer: Scorer, calls: Sequence[Sequence[str]], answer: str, extra: Any, timeout: float
) -> list[dict[str, Any]]:
    """Start all calls at once, and cancel those that miss the deadline."""
    tasks = [asyncio.create_task(scorer.call(texts, answer, extra)) for texts in calls]
    _, late = await asyncio.wait(tasks, timeout=timeout)
    for task in late:
        task.cancel()
    return [
        {"timed_out": True} if task in late else scorer.reply(texts, task.result)
        for texts, task in zip(calls, tasks, strict=True)
    ]


def _send(pool: Connection, message: Any) -> None:
    pool.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
