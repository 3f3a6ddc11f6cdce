"""Where metrics go besides metrics.jsonl: the terminal, TensorBoard, Weights & Biases."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO

from qurl.config import Config, to_dict
from qurl.plugins import import_extra


class Tracker(Protocol):
    """Receives every row of metrics.jsonl. After a resume, some rows come a second time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes TensorBoard event files."""

    def __init__(self, directory: Path) -> None:
        names = ("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._open = import_extra(*names, "track.tensorboard = true").SummaryWriter
        self._directory = directory
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # Opened at the first row: after a resume, TensorBoard drops the old curve from there.
            self._writer = self._open(str(self._directory), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases, or offline with a warning if the service cannot be reached."""

    def __init__(self, config: Config, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        wandb = import_extra("wandb", "wandb", "wandb", f"track.wandb = {config.track.wandb!r}")
        id_file = run_dir / "wandb_id"  # the same id each time this run is opened
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        options = {
            "project": config.track.wandb,
            "name": run_dir.resolve().name,
            "id": id_file.read_text(),
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
        # A resumed run goes back to its checkpoint, but wandb's own step can only grow.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Progress:
    """Prints lines of metrics, one in two seconds, and for each evaluation and the last step."""

    def __init__(self, num_steps: int, output: TextIO | None) -> None:
        self._num_steps = num_steps
        self._output = output or sys.stdout
        self._latest: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        self._last_line = -math.inf

    def log(self, row: int, metrics: Mapping[str, float]) -> None:
        """Show a row of metrics.jsonl: row -1 comes before training, row k after k + 1 steps."""
        done, now = row + 1, time.monotonic()
        first, start = self._first = self._first or (done, now)
        seconds_per_step = (now - start) / (done - first) if done > first else None
        eta = seconds_per_step and seconds_per_step * (self._num_steps - done)
        self._latest |= metrics
        if now - self._last_line >= 2 or done >= self._num_steps or find_accuracies(metrics):
            self._last_line = now
            self.print(progress_line(done, self._num_steps, self._latest, eta))

    def print(self, message: str) -> None:
        """A closed terminal or pipe does not end the run; the files have everything."""
        try:
            print(message, file=self._output, flush=True)
        except OSError:
            self._output = open(os.devnull, "w")  # noqa: SIM115


def progress_line(
    done: int, num_steps: int, metrics: Mapping[str, float], eta: float | None
) -> str:
    """`step 12/100  reward 0.512  held-out full 43.8%  KL 1.2e-03  5.2k tok/s  ETA 0:03:21`."""
    parts = [f"step {done}/{num_steps}"]
    if (reward := metrics.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    if accuracies := find_accuracies(metrics):
        shown = " ".join(f"{precision} {x:.1%}" for precision, x in accuracies.items())
        parts.append(f"held-out {shown}")
    if (kl := metrics.get("rollout_corr/k3_kl")) is not None:
        parts.append(f"KL {kl:.1e}")
    if (speed := metrics.get("perf/rollout_tokens_per_s")) is not None:
        parts.append(f"{speed / 1000:.1f}k tok/s" if speed >= 1000 else f"{speed:.0f} tok/s")
    if eta is not None and done < num_steps:
        parts.append(f"ETA {timedelta(seconds=round(eta))}")
    return "  ".join(parts)


def find_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """{precision: accuracy} of the names eval/<precision>/accuracy."""
    parts = {name: name.split("/") for name in metrics if name.startswith("eval/")}
    return {p[1]: metrics[name] for name, p in parts.items() if p[2:] == ["accuracy"]}
