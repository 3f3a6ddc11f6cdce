"""The process that grades: `python -m qurl.rewards.worker SPEC FD`.

It exchanges JSON with `GradingPool` over the socket FD. The first message says what kind of reward
it has. Then each request gets one reply per job, in any order.

    first    {"is_grouped": ..., "is_async": ...}
    request  {"jobs": [{"texts": [...], "answer": ..., "extra": {...}}, ...], "timeout": seconds}
    reply    {"job": index, "values": [{"score": ..., ...}, ...]}
             {"job": index, "timed_out": true}
             {"job": index, "error": ..., "traceback": ...}

Imports stay light: no torch here.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from qurl.rewards.reward import Scorer, load_reward

Message = dict[str, Any]


def main(spec: str, fd: int) -> None:
    os.set_inheritable(fd, False)  # what a grader starts must not keep the socket open
    pool = Connection(fd)
    try:
        scorer = Scorer(load_reward(spec))
    except BaseException as error:
        _send(pool, _describe(error))
        return
    _send(pool, {"is_grouped": scorer.is_grouped, "is_async": scorer.is_async})
    with asyncio.Runner() as runner:  # one loop for all, so that a reward can keep connections
        while request := _receive(pool):
            # The pool kills at the deadline. If the pool itself is gone, this ends a hung grader.
            faulthandler.dump_traceback_later(2 * request["timeout"] + 10, exit=True)
            if scorer.is_async:
                runner.run(_grade_together(pool, scorer, request))
            else:
                for index, job in enumerate(request["jobs"]):
                    _send(pool, {"job": index, **_grade(scorer, job)})
            faulthandler.cancel_dump_traceback_later()


def _grade(scorer: Scorer, job: Message) -> Message:
    try:
        return {"values": scorer.check(scorer.call(**job), len(job["texts"]))}
    except BaseException as error:
        return _describe(error)


async def _grade_together(pool: Connection, scorer: Scorer, request: Message) -> None:
    """Start all jobs at once, and cancel those that miss the deadline."""

    async def grade(index: int, job: Message) -> None:
        try:
            reply = {"values": scorer.check(await scorer.call(**job), len(job["texts"]))}
        except asyncio.CancelledError:
            reply = {"timed_out": True}
        except BaseException as error:
            reply = _describe(error)
        _send(pool, {"job": index, **reply})

    tasks = [asyncio.create_task(grade(i, job)) for i, job in enumerate(request["jobs"])]
    _, late = await asyncio.wait(tasks, timeout=request["timeout"])
    for task in late:
        task.cancel()
    await asyncio.gather(*late)


def _describe(error: BaseException) -> Message:
    return {
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _send(pool: Connection, message: Message) -> None:
    pool.send_bytes(json.dumps(message).encode())


def _receive(pool: Connection) -> Message | None:
    """The next request; None when the pool is gone."""
    try:
        return json.loads(pool.recv_bytes())
    except (EOFError, OSError):
        return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
