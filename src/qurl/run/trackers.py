"""Where metrics go besides metrics.jsonl: the terminal, TensorBoard, Weights & Biases."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as LiveDisplay
from rich.table import Column
from rich.text import Text

from qurl.config import Config, to_dict
from qurl.errors import MissingExtra


class Tracker(Protocol):
    """Receives every line of metrics.jsonl. After a resume, steps may come a second time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def build_trackers(config: Config, run_dir: Path, *, warn: Callable[[str], None]) -> list[Tracker]:
    """The trackers that the recipe asks for; `warn` hears of anything that works only in part."""
    trackers: list[Tracker] = []
    if config.track.tensorboard:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    if config.track.wandb:
        trackers.append(WandbTracker(config, run_dir, warn=warn))
    return trackers


class TensorBoardTracker:
    """TensorBoard event files."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "track.tensorboard = true") from error
        self._open = SummaryWriter
        self._directory = directory
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # Opened at the first step, which after a resume tells from where the old curve is void.
            self._writer = self._open(str(self._directory), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """A Weights & Biases run, kept offline where the service cannot be used."""

    def __init__(self, config: Config, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtra("wandb", "wandb", f"track.wandb = {config.track.wandb!r}") from error
        options = {
            "project": config.track.wandb,
            "name": run_dir.resolve().name,
            "id": _wandb_id(run_dir),
            "dir": str(run_dir),
            "config": to_dict(config),
            "resume": "allow",
        }
        try:
            self._run = wandb.init(**options)
        except wandb.errors.Error as error:
            warn(
                f"wandb cannot be reached ({error}); this run is recorded offline under "
                f"{run_dir / 'wandb'}: upload it later with `wandb sync`"
            )
            self._run = wandb.init(**options, mode="offline")
        # wandb's own step can only grow, and a resumed run goes back to its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """The same id each time this run directory is opened."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


class Progress:
    """One live line in a terminal; elsewhere short plain lines, at most one per `interval` seconds.

    An evaluation and the last step always get their line.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        console: Console | None = None,
        interval: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._console = console or Console()
        self._interval = interval
        self._clock = clock
        self._is_live = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._display: LiveDisplay | None = None
        self._latest: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        self._last_line = -math.inf

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        self._first = self._first or (step, now)
        self._latest |= metrics
        line = progress_line(step, self._num_steps, self._latest, self._eta(step, now))
        if self._is_live:
            self._without_reader(lambda: self._show(step, line))
        elif step >= self._num_steps or find_accuracies(metrics) or self._is_due(now):
            self._last_line = now
            self.print(line)

    def print(self, message: str, style: str = "") -> None:
        """Print a message above the live line, or as a plain line."""
        if self._is_live:
            self._without_reader(lambda: self._console.print(Text(message, style=style)))
        else:  # the console would wrap at 80 columns and colour where FORCE_COLOR is set
            self._without_reader(lambda: print(message, file=self._console.file, flush=True))

    def close(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _without_reader(self, show: Callable[[], None]) -> None:
        """A terminal or pipe that is gone must not end the run; the files have everything."""
        try:
            show()
        except (OSError, SystemExit):  # rich exits where a pipe is broken
            self._console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
            self._is_live, self._display = False, None

    def _is_due(self, now: float) -> bool:
        return now - self._last_line >= self._interval

    def _eta(self, step: int, now: float) -> float | None:
        """Seconds left, from the mean of the steps seen so far."""
        assert self._first is not None
        first_step, start = self._first
        if step <= first_step:
            return None
        return (now - start) / (step - first_step) * max(self._num_steps - step, 0)

    def _show(self, step: int, line: str) -> None:
        if self._display is None:
            self._display = LiveDisplay(
                SpinnerColumn(),
                BarColumn(bar_width=16),
                TextColumn(
                    "{task.description}",
                    markup=False,
                    table_column=Column(no_wrap=True, overflow="ellipsis"),
                ),
                TimeElapsedColumn(),
                console=self._console,
                refresh_per_second=2,
            )
            self._display.add_task(line, total=self._num_steps)
            self._display.start()
        self._display.update(self._display.task_ids[0], description=line, completed=step)


def progress_line(
    step: int, num_steps: int, metrics: Mapping[str, float], eta: float | None
) -> str:
    """`step 12/100  reward 0.512  held-out full 43.8%  KL 1.2e-03  5.2k tok/s  ETA 0:03:21`."""
    parts = [f"step {step}/{num_steps}"]
    if (reward := metrics.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if accuracies := find_accuracies(metrics):
        shown = " ".join(f"{precision} {x:.1%}" for precision, x in accuracies.items())
        parts.append(f"held-out {shown}")
    if (kl := metrics.get("rollout_corr/k3_kl")) is not None:
        parts.append(f"KL {kl:.1e}")
    if (speed := metrics.get("perf/rollout_tokens_per_s")) is not None:
        parts.append(f"{_thousands(speed)} tok/s")
    if eta is not None and step < num_steps:
        parts.append(f"ETA {timedelta(seconds=round(eta))}")
    return "  ".join(parts)


def find_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """{precision: accuracy} of the names eval/<precision>/accuracy."""
    names = {name: name.split("/") for name in metrics}
    return {
        parts[1]: metrics[name]
        for name, parts in names.items()
        if len(parts) == 3 and parts[0] == "eval" and parts[2] == "accuracy"
    }


def _thousands(x: float) -> str:
    return f"{x / 1000:.1f}k" if x >= 1000 else f"{x:.0f}"
