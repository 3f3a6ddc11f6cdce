"""Many processes compile the kernels before any of them is timed."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Iterable, Iterator

import torch

from qurl.bench.products import Problem, Setup
from qurl.quant.kernels.gemm import Plan

Pair = tuple[Problem, Plan]


class Compilers:
    """Processes that fill Triton's disk cache: compiling a kernel takes about a second."""

    def __init__(self, processes: int, device: torch.device) -> None:
        self._compile = functools.partial(_compile, device=device)
        self._pool = multiprocessing.get_context("spawn").Pool(processes)
        self._compiled: set[tuple] = set()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def run(self, pairs: Iterable[Pair], deadline: float) -> None:
        """Compile the kernels of the pairs, until `time.monotonic()` reaches the deadline."""
        if time.monotonic() >= deadline:
            return
        jobs = [shrunk(pair) for pair in covering(pairs, self._compiled)]
        for _ in self._pool.imap_unordered(self._compile, jobs):
            if time.monotonic() >= deadline:
                return


def covering(pairs: Iterable[Pair], compiled: set[tuple]) -> Iterator[Pair]:
    """The pairs that need a kernel not yet in `compiled`, which grows."""
    for pair in pairs:
        kernels = kernels_of(*pair)
        if not kernels <= compiled:
            compiled |= kernels
            yield pair


def kernels_of(problem: Problem, plan: Plan) -> set[tuple]:
    """The specializations that a plan launches.

    The product depends on whether K is cut, its consumer on the number of parts.
    """
    same_cut = dataclasses.replace(plan, splits=min(plan.splits, 1))
    return {
        ("product", problem.kind, problem.is_gated, problem.role == "qkv", same_cut),
        ("consumer", problem.kind, problem.role, problem.N, plan.splits),
    }


def shrunk(pair: Pair) -> Pair:
    """A smaller problem with the same kernels, which depend on neither M nor K."""
    problem, plan = pair
    return dataclasses.replace(problem, M=plan.tokens, K=1024), plan


def _compile(pair: Pair, device: torch.device) -> None:
    problem, plan = pair
    Setup(problem, device).launch(plan)
