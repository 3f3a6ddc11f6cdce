"""The command line. It imports nothing heavy before a command is chosen."""

from __future__ import annotations

import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from qurl.bench import run_audit, run_bench, run_tuner
from qurl.errors import ConfigError, DataError, QurlError, RankLost, TrainingError

Default = TypeVar("Default", str, None)

HELP = """\
usage: qurl COMMAND ...

Reinforcement learning for reasoning LLMs with quantized rollouts.

  qurl recipes [NAME]
        list the recipes that come with QuRL, or print one so that you can change it
  qurl data [NAME] [FOLDER]
        list the data sets of these recipes, or write one from the hub into FOLDER (data)
  qurl train RECIPE [--section.key value ...] [--dry-run [--gpu NAME]]
        train, or resume the run in run_dir. --dry-run only prints the resolved recipe,
        the memory and the token budget; with --gpu H100, those of another GPU
  qurl eval RECIPE|RUN [--section.key value ...]
        measure the held-out accuracy of model.path, or of a run's newest checkpoint
  qurl validate RECIPE [--section.key value ...]
        check everything that train would refuse: keys, files, model, memory, grader
  qurl fork RUN --at STEP [--run-dir DIR] [--section.key value ...]
        make a new run from a checkpoint of RUN, with changed keys; qurl train DIR continues it
  qurl doctor [--gpus N [--device cpu]] [--json]
        check this machine: versions, GPU, memory, disk, and every kernel. --gpus 2 checks what
        two GPUs do together: exchanges, training, syncs, a killed rank, a killed engine; --device
        cpu tries that without GPUs
  qurl advise RECIPE|RUN [--section.key value ...] [--flags]
        say whether quantizing helps, measured on a GPU, otherwise computed.
        --tokens N gives the mean length of completions, --gpu H100 and --gpus N plan for
        other hardware, --shape 7B plans for another model, --json prints JSON
  qurl report RUN [RUN ...] [--out FILE.html]
        write one page about a run (RUN/report.html), or about several side by side
        (comparison.html): verdict, curves, time, tokens
  qurl watch RUN [RUN ...] [--host ADDRESS] [--port PORT]
        show the same page live in your browser
  qurl export RUN|CHECKPOINT OUT [--dtype float32|bfloat16] [--quant int8|fp8]
        write a Hugging Face folder with a model card, with UAQ folded back; --quant writes
        quantized weights for vLLM
  qurl export --from-gguf FILE.gguf OUT [--dtype float32|bfloat16]
        convert a llama.cpp checkpoint, so that you can train it
  qurl rescale MODEL OUT [--scale 1.5]
        write MODEL, a folder or a hub name, under UAQ, to train it in another framework;
        qurl export OUT PLAIN folds UAQ back afterwards
  qurl bench KIND [--flags]
        measure speed on this machine; KIND is rollout, sync, train or step
  qurl tune [--flags]
        measure the engine's matrix products on this GPU and keep the fastest plans
  qurl audit RUN --at STEP [--flags]
        bias and variance of each objective's gradient at a checkpoint, without training

  RECIPE is a TOML file or a name that `qurl recipes` lists.
  qurl train --help     prints every key of a recipe
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
            raise ConfigError("an argument holds a NUL character; remove it")
        if args[0] not in COMMANDS:
            raise ConfigError(f"{args[0]!r} is not a command; use one of {', '.join(COMMANDS)}")
        if {"-h", "--help"} & set(args[1:]) and args[0] not in HELP_OF_THEIR_OWN:
            print(help_of(args[0]), end="")
            return 0
        return COMMANDS[args[0]](args[1:])
    except QurlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, DataError)) else 1
    except KeyboardInterrupt:
        message = "interrupted; repeat the command to resume a training run that keeps checkpoints"
        print(message, file=sys.stderr)
        return 130


def help_of(command: str) -> str:
    """The part of the overview that is about one command."""
    entries = re.split(r"^(?=  qurl )", HELP, flags=re.MULTILINE)[1:]
    own = [entry.partition("\n\n")[0] for entry in entries if entry.split()[1] == command]
    return (
        "\n".join(entry.rstrip("\n") for entry in own)
        + "\n\n  qurl --help     lists all commands\n"
    )


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
    with _file_errors():
        for line in write_data(name, Path(folder)):
            print(line)
    return 0


def train_command(args: list[str]) -> int:
    from qurl.config import load_config, to_json

    is_dry_run, args = _switch("--dry-run", args)
    gpu, args = _option("--gpu", args)
    if gpu is not None and not is_dry_run:
        raise ConfigError(f"--gpu {gpu} plans for a GPU that is not here; it needs --dry-run")
    config = load_config(*_recipe_and_flags(args))
    if is_dry_run:
        from qurl.run.budget import describe_budget
        from qurl.run.cards import find_card

        card = None if gpu is None else find_card(gpu)
        print(to_json(config), describe_budget(config, card), sep="\n")
        return 0
    from qurl.run.inputs import check_inputs

    check_inputs(config)  # without torch, so that its errors come at once
    _train(config)
    return 0


def _train(config: Any) -> None:
    """Train, and start again when a trainer rank was killed, as long as the run gets on."""
    from qurl.run.checkpoint import newest_sound
    from qurl.run.directory import log_event
    from qurl.train import train

    folder, last = Path(config.run_dir).expanduser(), None
    while True:
        try:
            train(config)
            return
        except RankLost as error:
            newest, _ = newest_sound(folder / "checkpoints")
            if newest is None or newest == last:
                raise
            last = newest
            again = f"{error}. All ranks start again from {newest.name}"
            log_event(folder, "warning", again)
            print(f"WARNING: {again}", file=sys.stderr)


def eval_command(args: list[str]) -> int:
    from qurl.config import load_config

    source, flags = _recipe_and_flags(args)
    config = load_config(source, flags)  # without torch, so that its errors come at once
    from qurl.run.evaluation import evaluate_model

    evaluate_model(source, config)
    return 0


def validate_command(args: list[str]) -> int:
    from qurl.config import load_config

    config = load_config(*_recipe_and_flags(args))  # without torch, so that its errors come at once
    from qurl.run.validate import validate

    return 0 if validate(config) else 2


def doctor_command(args: list[str]) -> int:
    from qurl.run.doctor import run_doctor

    as_json, args = _switch("--json", args)
    word, args = _option("--gpus", args)
    device, args = _option("--device", args)
    _exactly(args)
    gpus = _count("--gpus", word)
    if gpus == 1:
        raise ConfigError("--gpus 1 has nothing to exchange; use 2 or more, or leave it out")
    if device is not None and (gpus is None or device not in ("cuda", "cpu")):
        raise ConfigError(f"--device {device} goes with --gpus N, and is one of cuda, cpu")
    return 0 if run_doctor(as_json=as_json, gpus=gpus, device=device) else 1


def advise_command(args: list[str]) -> int:
    from qurl.bench.advise import advise, print_advice
    from qurl.config import load_config

    as_json, args = _switch("--json", args)
    gpu, args = _option("--gpu", args)
    gpus, args = _option("--gpus", args)
    shape, args = _option("--shape", args)
    tokens, args = _option("--tokens", args)
    counts = {"gpus": _count("--gpus", gpus), "tokens": _count("--tokens", tokens)}
    config = load_config(*_recipe_and_flags(args))
    print_advice(advise(config, gpu=gpu, shape=shape, **counts), as_json=as_json)
    return 0


def fork_command(args: list[str]) -> int:
    step, rest = _option("--at", args)
    if step is None or not rest or rest[0].startswith("-"):
        raise ConfigError(f"expected RUN --at STEP, got {' '.join(args) or 'nothing'}")
    if not step.isdecimal():
        raise ConfigError(f"--at {step!r} is not the number of a step")
    from qurl.run.fork import fork

    target = fork(Path(rest[0]), int(step), rest[1:])
    print(f"{target}\ncontinue with: qurl train {shlex.quote(str(target))}")
    return 0


def report_command(args: list[str]) -> int:
    from qurl.run.report import write_report

    out, args = _option("--out", args)
    if out == "":
        raise ConfigError("--out needs the name of a file")
    try:
        with _file_errors():
            print(write_report(*_at_least_one(args, "RUN"), out=out))
    except TrainingError as error:
        raise DataError(f"{error}; choose another file with --out FILE.html") from error
    return 0


def watch_command(args: list[str]) -> int:
    from qurl.run.watch import watch

    host, args = _option("--host", args, "127.0.0.1")
    port, args = _option("--port", args, "0")
    if not host:
        raise ConfigError("--host needs an address, such as 127.0.0.1 or 0.0.0.0")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--port {port} is not a port: give a number from 0 to 65535, 0 = any")
    watch(_at_least_one(args, "RUN"), host=host, port=int(port))
    return 0


def export_command(args: list[str]) -> int:
    from qurl.run.export import export, export_gguf

    dtype, args = _option("--dtype", args, "bfloat16")
    quant, args = _option("--quant", args, "none")
    gguf, args = _option("--from-gguf", args)
    if gguf is None:
        write, names = functools.partial(export, quant=quant), ("RUN|CHECKPOINT", "OUT")
    elif quant != "none":
        raise ConfigError("--from-gguf makes a plain model; leave --quant out")
    else:
        write, names = export_gguf, ("--from-gguf FILE.gguf", "OUT")
        args = [word for word in (gguf, *args) if word]
    source, target = _exactly(args, *names)
    with _file_errors():
        print(write(Path(source), Path(target), dtype))
    return 0


def rescale_command(args: list[str]) -> int:
    from qurl.run.export import rescale

    word, args = _option("--scale", args, "1.5")
    source, target = _exactly(args, "MODEL", "OUT")
    try:
        scale = float(word)
    except ValueError:
        raise ConfigError(f"--scale {word} is not a number; the paper uses 1.5") from None
    with _file_errors():
        print(rescale(source, Path(target), scale))
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


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "recipes": recipes_command,
    "data": data_command,
    "train": train_command,
    "eval": eval_command,
    "validate": validate_command,
    "fork": fork_command,
    "doctor": doctor_command,
    "advise": advise_command,
    "report": report_command,
    "watch": watch_command,
    "export": export_command,
    "rescale": rescale_command,
    "bench": run_bench,
    "tune": run_tuner,
    "audit": run_audit,
}

HELP_OF_THEIR_OWN = {"train", "eval", "validate", "bench", "tune", "audit"}
"""Commands that list their flags; `--help` of the others prints their part of the overview."""


def _recipe_and_flags(args: list[str]) -> tuple[str | None, list[str]]:
    """Split off the recipe, which comes first; without one, the flags change the defaults."""
    if args and not args[0].startswith("-"):
        if not args[0]:
            raise ConfigError("the name of the recipe is empty; leave it out for the defaults")
        return args[0], args[1:]
    if late := [a for a in args if a.endswith(".toml")]:
        raise ConfigError(f"the recipe comes before the flags: put {late[0]} first")
    return None, args


def _option(name: str, args: list[str], default: Default = None) -> tuple[str | Default, list[str]]:
    """The word after `name`, empty if none follows, and the other arguments."""
    if name not in args:
        return default, args
    i = args.index(name)
    words = [word for word in args[i + 1 : i + 2] if not word.startswith("--")]
    return (words or [""])[0], args[:i] + args[i + 1 + len(words) :]


def _count(name: str, word: str | None) -> int | None:
    if word is not None and not (word.isdecimal() and int(word)):
        raise ConfigError(f"{name} {word} must be a whole number of at least 1")
    return None if word is None else int(word)


def _switch(name: str, args: list[str]) -> tuple[bool, list[str]]:
    """Whether `name` is given, and the other arguments."""
    return name in args, [word for word in args if word != name]


def _at_least_one(args: list[str], name: str) -> list[str]:
    if not args or any(a.startswith("-") for a in args):
        return _exactly(args, name)  # says what is wrong
    return args


def _exactly(args: list[str], *names: str) -> list[str]:
    if len(args) != len(names) or any(a.startswith("-") for a in args):
        expected = " ".join(names) or "no arguments"
        flags = [a for a in args if a.startswith("-")]
        wrong = f"; {flags[0]} is no flag of this command, or comes twice" if flags else ""
        raise ConfigError(f"expected {expected}, got {' '.join(args) or 'nothing'}{wrong}")
    return args
