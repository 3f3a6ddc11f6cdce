"""The process that grades: `python -m qurl.rewards.worker SPEC FD KEY MEMORY`.

It talks to `GradingPool` over the socket FD, and begins its messages with KEY: a grader that writes
into descriptors that it did not open cannot forge one. First it says what kind of reward it has, or
why there is none. Then it gets arguments of `Scorer` and answers with the outcomes. MEMORY is the
most that it may allocate, in bytes, or -1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import hashlib
import os
import pickle
import resource
import sys
from multiprocessing.connection import Connection

from qurl.rewards.reward import Scorer, failure, load_reward

_OUT_OF_THE_WAY = 500  # first descriptor to move the socket to: few programs count that far


def main(spec: str, fd: int, key: str, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pool = Connection(_move(fd))

    def send(message: object) -> None:
        payload = pickle.dumps(message)
        pool.send_bytes(bytes.fromhex(key) + hashlib.sha256(payload).digest() + payload)

    try:
        scorer = Scorer(load_reward(spec), spec)
    except BaseException as error:
        send(failure(spec, error))
        return
    # Not the address space, of which CUDA reserves far more than it uses.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    memory = min((limit for limit in (memory, most) if limit >= 0), default=-1)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    send((scorer.is_async, scorer.is_grouped))
    with asyncio.Runner() as runner:  # one loop for all, so that a reward can keep connections
        while True:
            try:
                calls, answer, extra, timeout = pool.recv()
            except (EOFError, OSError):  # the pool is gone
                return
            # The pool kills at the deadline. If the pool itself is gone, this ends a hung grader.
            faulthandler.dump_traceback_later(2 * timeout + 10, exit=True)
            send(scorer(calls, answer, extra, timeout, runner.run))
            faulthandler.cancel_dump_traceback_later()


def _move(fd: int) -> int:
    """The same socket under a high number, which what a grader starts does not inherit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(_OUT_OF_THE_WAY, limit - 1))
    os.close(fd)
    return moved


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
