"""`qurl bench`: what the engine reaches, against other engines and against the hardware."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TypeVar

from qurl.errors import ConfigError, MissingExtra

T = TypeVar("T")

HELP = """\
usage: qurl bench rollout|gemm|sync [--flags]

  rollout   tokens per second of whole generate calls, and their share of the hardware's limit
  gemm      the quantized matrix products of a model, shape by shape
  sync      seconds from trained weights to an engine that samples from them

  qurl bench rollout --help     every flag
"""


def run_bench(args: Sequence[str]) -> int:
    """Parse the flags of one benchmark and run it."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    kind, *flags = args
    if kind == "rollout":
        from qurl.bench.rollout import RolloutBench, run_rollout

        run_rollout(_parse(RolloutBench, kind, flags))
    elif kind == "sync":
        from qurl.bench.sync import SyncBench, run_sync

        run_sync(_parse(SyncBench, kind, flags))
    elif kind == "gemm":
        if importlib.util.find_spec("triton") is None:
            raise MissingExtra("triton", "dev", "qurl bench gemm")
        from qurl.bench.gemm import GemmBench, run_gemm

        run_gemm(_parse(GemmBench, kind, flags))
    else:
        raise ConfigError(f"qurl bench {kind}: there are rollout, gemm and sync")
    return 0


def _parse(bench: type[T], kind: str, flags: Sequence[str]) -> T:
    import tyro

    return tyro.cli(bench, prog=f"qurl bench {kind}", args=list(flags))
