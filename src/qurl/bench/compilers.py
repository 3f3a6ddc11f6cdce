"""Kernels compiled by many processes, before any of them is timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator

import torch

from qurl.bench.products import Problem, Setup
from qurl.quant.kernels.gemm import Plan

Pair = tuple[Problem, Plan]


class Deadline:
    """Seconds that are left, from now on."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end


class Compilers:
    """Processes that fill Triton's cache on disk: a kernel takes a core about a second."""

    def __init__(self, processes: int, device: torch.device) -> None:
        self._compile = functools.partial(_compile, device=device)
        self._pool = multiprocessing.get_context("spawn").Pool(processes)
        self._compiled: set[tuple] = set()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def run(self, pairs: Iterable[Pair], deadline: Deadline) -> None:
        """Compile what the pairs launch, until the deadline."""
        if deadline.has_passed:
            return
        jobs = [shrunk(pair) for pair in covering(pairs, self._compiled)]
        for _ in self._pool.imap_unordered(self._compile, jobs):
            if deadline.has_passed:
                return


def covering(pairs: Iterable[Pair], compiled: set[tuple]) -> Iterator[Pair]:
    """Those that launch a kernel that none before them does, nor is in `compiled`; adds to it."""
    for pair in pairs:
        kernels = kernels_of(*pair)
        if not kernels <= compiled:
            compiled |= kernels
            yield pair


def kernels_of(problem: Problem, plan: Plan) -> set[tuple]:
    """Names of the kernels that a plan launches: all that they are specialized for.

    The product knows whether K is cut, its consumer into how many parts.
    """
    same_cut = dataclasses.replace(plan, splits=min(plan.splits, 1))
    return {
        ("product", problem.kind, problem.is_gated, problem.role == "qkv", same_cut),
        ("consumer", problem.kind, problem.role, problem.N, plan.splits),
    }


def shrunk(pair: Pair) -> Pair:
    """A smaller problem with the same kernels, which know neither M nor K."""
    problem, plan = pair
    return dataclasses.replace(problem, M=plan.tokens, K=1024), plan


def _compile(pair: Pair, device: torch.device) -> None:
    problem, plan = pair
    Setup(problem, device).launch(plan)
