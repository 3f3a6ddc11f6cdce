"""The command line. It imports nothing heavy before a command is chosen."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qurl.errors import ConfigError, DataError, QurlError

HELP = """\
usage: qurl COMMAND ...

Reinforcement learning for reasoning LLMs with quantized rollouts.

  qurl recipes [NAME]
        the recipes that come with QuRL, or the text of one, to change it
  qurl data [NAME] [FOLDER]
        the data sets of those recipes, or fetch one from the hub into FOLDER (data)
  qurl train RECIPE [--section.key value ...] [--dry-run]
        train, or resume the run in run_dir; --dry-run prints the resolved recipe,
        the memory and the token budget instead
  qurl eval RECIPE|RUN [--section.key value ...]
        held-out accuracy of model.path, or of a run's newest checkpoint
  qurl validate RECIPE [--section.key value ...]
        check keys, files, tokenizer and grader before a long run
  qurl report RUN
        write RUN/report.html again
  qurl export RUN|CHECKPOINT OUT [--dtype float32|bfloat16] [--quant int8|fp8]
        a Hugging Face folder with a model card: plain, UAQ folded back, or quantized, for vLLM
  qurl export --from-gguf FILE.gguf OUT [--dtype float32|bfloat16]
        the same from a checkpoint of llama.cpp, to start from
  qurl bench KIND [--flags]
        KIND is rollout, sync, train or step: speeds of the engine, of the trainer, and
        of whole steps on this machine
  qurl tune [--flags]
        measure the engine's matrix products on this GPU and keep the fastest plans

  RECIPE is a TOML file or a name that `qurl recipes` lists.
  qurl train --help     every key of a recipe
  qurl --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if args[0] == "--version":
        from qurl import __version__

        print(__version__)
        return 0
    try:
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


def recipes_command(args: list[str]) -> int:
    from qurl.config.shipped import get_recipe, read_head, shipped_recipes

    if args:
        (name,) = _exactly(args, "NAME")
        print(get_recipe(name).read_text(encoding="utf-8"), end="")
        return 0
    for name, path in shipped_recipes().items():
        head = read_head(path)
        print(name, f"  {head['title']}", sep="\n")
        for field in ("hardware", "data"):
            print(f"  {field}: {head[field]}")
    return 0


def data_command(args: list[str]) -> int:
    from qurl.tasks.hub import write_data
    from qurl.tasks.sources import SOURCES

    if not args:
        for name, files in SOURCES.items():
            repos = dict.fromkeys(file.repo for file in files.values())
            print(f"{name:12}{', '.join(files)}  from {', '.join(repos)}")
        return 0
    name, folder = _exactly(args if args[1:] else [*args, "data"], "NAME", "FOLDER")
    for line in write_data(name, Path(folder)):
        print(line)
    return 0


def train_command(args: list[str]) -> int:
    from qurl.config import load_config, to_json

    is_dry_run = "--dry-run" in args
    recipe, flags = _recipe_and_flags([a for a in args if a != "--dry-run"])
    config = load_config(recipe, flags)
    if is_dry_run:
        from qurl.run.budget import describe_budget

        print(to_json(config), describe_budget(config), sep="\n")
        return 0
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
    print(write_report(Path(run)))
    return 0


def export_command(args: list[str]) -> int:
    from qurl.run.export import export, export_gguf

    dtype, args = _option("--dtype", args, default="bfloat16")
    quant, args = _option("--quant", args, default="none")
    gguf, args = _option("--from-gguf", args)
    if gguf is None:
        write, names = functools.partial(export, quant=quant or ""), ("RUN|CHECKPOINT", "OUT")
    elif quant != "none":
        raise ConfigError("--from-gguf makes a plain model; leave --quant out")
    else:
        write, names = export_gguf, ("--from-gguf FILE.gguf", "OUT")
        args = [word for word in (gguf, *args) if word]
    source, target = _exactly(args, *names)
    print(write(Path(source), Path(target), dtype or ""))
    return 0


def _bench(function: str) -> Callable[[list[str]], int]:
    return lambda args: getattr(importlib.import_module("qurl.bench"), function)(args)


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "recipes": recipes_command,
    "data": data_command,
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
