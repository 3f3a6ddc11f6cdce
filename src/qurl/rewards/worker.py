"""The process that grades: `python -m qurl.rewards.worker SPEC`.

It talks JSON lines with `GradingPool`: {"ready": true} once, then one reply per request.

    request  {"text": ..., "answer": ..., "extra": {...}, "timeout": seconds}
    reply    {"values": {"score": ..., ...}} | {"error": ..., "traceback": ...}

Imports stay light: no torch here.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from typing import IO, Any

from qurl.rewards.reward import Reward, check_value, load_reward


def main(spec: str) -> None:
    requests, replies = _take_pipes()
    try:
        reward = load_reward(spec)
    except BaseException as error:
        _reply(replies, _describe(error))
        return
    _reply(replies, {"ready": True})
    for line in requests:
        _reply(replies, _answer(reward, json.loads(line)))


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Keep the pipes to the pool for us alone: what a reward prints goes to stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def _answer(reward: Reward, request: dict[str, Any]) -> dict[str, Any]:
    # The pool kills at the deadline. If the pool itself was killed, this ends a grader that hangs.
    faulthandler.dump_traceback_later(2 * request["timeout"] + 10, exit=True)
    try:
        value = reward(request["text"], request["answer"], request["extra"])
        return {"values": check_value(value)}
    except BaseException as error:
        return _describe(error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _describe(error: BaseException) -> dict[str, str]:
    return {
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
