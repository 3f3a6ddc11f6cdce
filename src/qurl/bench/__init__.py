"""`qurl bench`, `qurl tune`, `qurl audit`: speeds, the fastest kernels, bias of gradients."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from qurl.errors import ConfigError, MissingExtra

HELP = """\
usage: qurl bench rollout|sync|train|step [--flags]

  rollout   tokens per second of whole generate calls, and their share of the hardware's limit
  sync      seconds from trained weights to an engine that samples from them
  train     tokens per second of updates, and their share of the hardware's limit
  step      seconds of whole GRPO steps and their parts; --against trl measures TRL with vLLM too

  qurl bench rollout --help     every flag
"""

KINDS = {
    "rollout": ("RolloutBench", "run_rollout"),
    "sync": ("SyncBench", "run_sync"),
    "train": ("TrainBench", "run_train"),
    "step": ("StepBench", "run_step"),
}
"""Module of a benchmark: its flags and the function that runs it."""


def run_bench(args: Sequence[str]) -> int:
    """Parse the flags of one benchmark and run it."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    kind, *flags = args
    if kind not in KINDS:
        raise ConfigError(f"qurl bench {kind}: there are {', '.join(KINDS)}")
    module = importlib.import_module(f"qurl.bench.{kind}")
    options, run = (getattr(module, name) for name in KINDS[kind])
    run(_parse(options, f"bench {kind}", flags))
    return 0


def run_tuner(flags: Sequence[str]) -> int:
    """Parse the flags of `qurl tune` and run it."""
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("triton", "dev", "qurl tune")
    from qurl.bench.tune import Tune, run_tune

    run_tune(_parse(Tune, "tune", flags))
    return 0


def run_audit(flags: Sequence[str]) -> int:
    """Parse the flags of `qurl audit` and run it."""
    from qurl.bench.audit import Audit, run_audit

    run_audit(_parse(Audit, "audit", flags))
    return 0


def _parse(options: Any, command: str, flags: Sequence[str]) -> Any:
    import tyro

    return tyro.cli(options, prog=f"qurl {command}", args=list(flags))
