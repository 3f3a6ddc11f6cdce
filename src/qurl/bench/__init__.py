"""`qurl bench`, `qurl tune`, `qurl audit`: speeds, the fastest kernels, bias of gradients."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from qurl.errors import ConfigError, MissingExtra

HELP = """\
usage: qurl bench rollout|sync|train|step [--flags]

  rollout   tokens per second of whole generate calls, and their share of the hardware's limit
  sync      seconds from trained weights to an engine that samples from them
  train     tokens per second of updates, and their share of the hardware's limit
  step      seconds of whole GRPO steps and their parts; --against trl measures TRL with vLLM too

  qurl bench rollout --help     every flag
"""

KINDS = {"rollout": "RolloutBench", "sync": "SyncBench", "train": "TrainBench", "step": "StepBench"}
"""Module of a benchmark, and the class of its flags."""


def run_bench(args: Sequence[str]) -> int:
    """Parse the flags of one benchmark and run it."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    kind, *flags = args
    if kind not in KINDS:
        raise ConfigError(f"qurl bench {kind}: there are {', '.join(KINDS)}")
    return _run(f"bench {kind}", KINDS[kind], flags)


def run_tuner(flags: Sequence[str]) -> int:
    """Parse the flags of `qurl tune` and run it."""
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("triton", "dev", "qurl tune")
    return _run("tune", "Tune", flags)


def run_audit(flags: Sequence[str]) -> int:
    """Parse the flags of `qurl audit` and run it."""
    return _run("audit", "Audit", flags)


def _run(command: str, options: str, flags: Sequence[str]) -> int:
    """The last word of a command names its module, which has `run_<module>(options)`."""
    import tyro

    name = command.split()[-1]
    module = importlib.import_module(f"qurl.bench.{name}")
    given = tyro.cli(getattr(module, options), prog=f"qurl {command}", args=list(flags))
    getattr(module, f"run_{name}")(given)
    return 0
