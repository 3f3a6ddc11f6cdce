"""The command line. It imports nothing heavy before a command is chosen."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from qurl.errors import ConfigError, DataError, QurlError

HELP = """\
usage: qurl COMMAND ...

Reinforcement learning for reasoning LLMs with quantized rollouts.

  qurl train RECIPE.toml [--section.key value ...] [--dry-run]
        train, or resume the run in run_dir; --dry-run prints the resolved recipe,
        the memory and the token budget instead
  qurl eval RECIPE.toml|RUN [--section.key value ...]
        held-out accuracy of model.path, or of a run's newest checkpoint
  qurl validate RECIPE.toml [--section.key value ...]
        check keys, files, tokenizer and grader before a long run
  qurl report RUN
        write RUN/report.html again
  qurl export RUN|CHECKPOINT OUT [--dtype float32|bfloat16]
        a plain Hugging Face folder, UAQ folded back
  qurl export --from-gguf FILE.gguf OUT [--dtype float32|bfloat16]
        the same from a checkpoint of llama.cpp, to start from
  qurl bench KIND [--flags]
        KIND is rollout, sync, train or step: speeds of the engine, of the trainer, and
        of whole steps on this machine
  qurl tune [--flags]
        measure the engine's matrix products on this GPU and keep the fastest plans

  qurl train --help     every key of a recipe
  qurl --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `qurl ... | head`; Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended it


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if args[0] == "--version":
        from qurl import __version__

        print(__version__)
        return 0
    try:
        if any("\0" in word for word in args):
            raise ConfigError("an argument holds a NUL character, which no name or value can")
        if args[0] not in COMMANDS:
            raise ConfigError(f"{args[0]!r} is not a command; there are {', '.join(COMMANDS)}")
        return COMMANDS[args[0]](args[1:])
    except QurlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, DataError)) else 1
    except KeyboardInterrupt:
        message = "interrupted; a training run that keeps checkpoints resumes with the same command"
        print(message, file=sys.stderr)
        return 130


def train_command(args: list[str]) -> int:
    from qurl.config import load_config, to_json

    is_dry_run = "--dry-run" in args
    recipe, flags = _recipe_and_flags([a for a in args if a != "--dry-run"])
    config = load_config(recipe, flags)
    if is_dry_run:
        from qurl.run.budget import describe_budget

        print(to_json(config), describe_budget(config), sep="\n")
        return 0
    from qurl.run.inputs import check_inputs

    check_inputs(config)  # without torch, so that its errors come at once
    from qurl.train import train

    train(config)
    return 0


def eval_command(args: list[str]) -> int:
    from qurl.run.evaluation import evaluate_model

    evaluate_model(*_recipe_and_flags(args))
    return 0


def validate_command(args: list[str]) -> int:
    from qurl.run.validate import validate

    return 0 if validate(*_recipe_and_flags(args)) else 2


def report_command(args: list[str]) -> int:
    from qurl.run.report import write_report

    (run,) = _exactly(args, "RUN")
    with _file_errors():
        print(write_report(Path(run)))
    return 0


def export_command(args: list[str]) -> int:
    from qurl.run.export import export, export_gguf

    dtype, args = _option("--dtype", args, default="bfloat16")
    gguf, args = _option("--from-gguf", args)
    if gguf is None:
        write, names = export, ("RUN|CHECKPOINT", "OUT")
    else:
        write, names = export_gguf, ("--from-gguf FILE.gguf", "OUT")
        args = [word for word in (gguf, *args) if word]
    source, target = _exactly(args, *names)
    with _file_errors():
        print(write(Path(source), Path(target), dtype or ""))
    return 0


@contextmanager
def _file_errors() -> Iterator[None]:
    """Errors about a named file as ours: it is not there, or may not be read or written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QurlError) or error.filename is None:
            raise
        raise DataError(f"{error.filename}: {error.strerror}") from error


def _bench(function: str) -> Callable[[list[str]], int]:
    return lambda args: getattr(importlib.import_module("qurl.bench"), function)(args)


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "eval": eval_command,
    "validate": validate_command,
    "report": report_command,
    "export": export_command,
    "bench": _bench("run_bench"),
    "tune": _bench("run_tuner"),
}


def _recipe_and_flags(args: list[str]) -> tuple[str | None, list[str]]:
    """Split off the recipe, which comes first; without one, the flags change the defaults."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if late := [a for a in args if a.endswith(".toml")]:
        raise ConfigError(f"the recipe comes before the flags: put {late[0]} first")
    return None, args


def _option(name: str, args: list[str], default: str | None = None) -> tuple[str | None, list[str]]:
    """The word after `name`, empty if none follows, and the other arguments."""
    if name not in args:
        return default, args
    i = args.index(name)
    return (args[i + 1 : i + 2] or [""])[0], args[:i] + args[i + 2 :]


def _exactly(args: list[str], *names: str) -> list[str]:
    if "-h" in args or "--help" in args:
        print(HELP, end="")
        raise SystemExit(0)
    if len(args) != len(names) or any(a.startswith("-") for a in args):
        raise ConfigError(f"expected {' '.join(names)}, got {' '.join(args) or 'nothing'}")
    return args
