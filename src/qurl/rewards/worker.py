"""The process that grades: `python -m qurl.rewards.worker SPEC FD MEMORY`.

It talks to `GradingPool` over the socket FD. First it says what kind of reward it has, or why there
is none. Then it gets arguments of `Scorer` and answers with the outcomes. MEMORY is the most that
it may allocate, in bytes, or -1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import sys
from multiprocessing.connection import Connection

from qurl.rewards.reward import Scorer, failure, load_reward


def main(spec: str, fd: int, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(fd, False)  # what a grader starts must not keep the socket open
    pool = Connection(fd)
    try:
        scorer = Scorer(load_reward(spec), spec)
    except BaseException as error:
        pool.send(failure(spec, error))
        return
    # Not the address space, of which CUDA reserves far more than it uses.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    pool.send((scorer.is_async, scorer.is_grouped))
    with asyncio.Runner() as runner:  # one loop for all, so that a reward can keep connections
        while True:
            try:
                calls, answer, extra, timeout = pool.recv()
            except (EOFError, OSError):  # the pool is gone
                return
            # The pool kills at the deadline. If the pool itself is gone, this ends a hung grader.
            faulthandler.dump_traceback_later(2 * timeout + 10, exit=True)
            pool.send(scorer(calls, answer, extra, timeout, runner.run))
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
