"""What the scripts share: errors in one line, runs in processes of their own, dated results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tyro

from qurl.errors import QurlError

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "recipes" / "arithmetic-cpu.toml"
RESULTS = ROOT / "benchmarks" / "results"


def run_command(name: str, options: type, run: Callable[[Any], Any]) -> int:
    """Parse the flags of `python -m benchmarks.NAME` and run it; returns the exit status."""
    try:
        run(tyro.cli(options, prog=f"python -m benchmarks.{name}"))
    except QurlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def to_words(flags: Mapping[str, object]) -> list[str]:
    """{"optim.lr": 1e-5} as ["--optim.lr", "1e-05"]."""
    return [str(word) for key, value in flags.items() for word in (f"--{key}", value)]


def train_demo(run: Path, flags: Mapping[str, object]) -> str:
    """Train the demo recipe on one thread of a CPU; returns why it failed, or ""."""
    flags = {"run-dir": run, "threads": 1, "device": "cpu", "save.keep": 1, **flags}
    command = [sys.executable, "-m", "qurl", "train", str(DEMO), *to_words(flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    print(f"{run.name}: exit {done.returncode}", file=sys.stderr, flush=True)
    if done.returncode == 0:
        return ""
    return "".join(done.stderr.strip().splitlines()[-1:]) or f"exit {done.returncode}"


def write_problems(path: Path, task: Any, count: int) -> None:
    """The first problems of a task as a data file."""
    problems = [task[i] for i in range(count)]
    rows = [{"prompt": p.extra["prompt"], "answer": p.answer} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_result(path: Path, **content: Any) -> None:
    """Replace a result by a newer one with today's date."""
    content = {"date": datetime.now(UTC).date().isoformat(), **content}
    unfinished = path.with_suffix(".json.partial")
    unfinished.write_text(to_json(content))
    unfinished.replace(path)


def to_json(content: Any) -> str:
    """Indented JSON with lists of numbers, such as curves, on one line."""
    return re.sub(r"\n *(?=[-\d[\]])", "", json.dumps(content, indent=1)) + "\n"
