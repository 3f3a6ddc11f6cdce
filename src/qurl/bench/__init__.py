"""`qurl bench` and `qurl tune`: what the engine reaches here, and the fastest kernels for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from qurl.errors import ConfigError, MissingExtra

HELP = """\
usage: qurl bench rollout|sync [--flags]

  rollout   tokens per second of whole generate calls, and their share of the hardware's limit
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

        run_rollout(_parse(RolloutBench, "bench rollout", flags))
    elif kind == "sync":
        from qurl.bench.sync import SyncBench, run_sync

        run_sync(_parse(SyncBench, "bench sync", flags))
    else:
        raise ConfigError(f"qurl bench {kind}: there are rollout and sync")
    return 0


def run_tuner(flags: Sequence[str]) -> int:
    """Parse the flags of `qurl tune` and run it."""
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("triton", "dev", "qurl tune")
    from qurl.bench.tune import Tune, run_tune

    run_tune(_parse(Tune, "tune", flags))
    return 0


def _parse(options: Any, command: str, flags: Sequence[str]) -> Any:
    import tyro

    return tyro.cli(options, prog=f"qurl {command}", args=list(flags))
