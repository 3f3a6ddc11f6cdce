"""What is kept when a run goes wrong: enough to look at the failure without running again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from qurl.config import Config
from qurl.errors import (
    CheckpointError,
    DataError,
    EngineError,
    QurlError,
    RewardError,
    SyncError,
    TrainingError,
)
from qurl.run.assembly import Parts
from qurl.run.checkpoint import write_state
from qurl.run.directory import Run
from qurl.trainer.learner import Learner


@contextmanager
def keep_evidence(config: Config, parts: Parts, run: Run, step: int) -> Iterator[None]:
    """Save the evidence of a failed step under crash/, then let the error go on.

    Where the weights had not been touched, the run is saved too, as it was before the step.
    """
    state = parts.state()
    try:
        yield
    except (TrainingError, RewardError, EngineError, DataError) as error:
        folder = run.path / "crash" / f"step-{step:06d}"
        message = f"step {step} stopped the run; evidence in {folder}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_evidence(folder, step, parts.learner, error)
        except (OSError, RuntimeError, SafetensorError, ValueError) as failure:
            message = f"step {step} stopped the run; its evidence cannot be written: {failure}"
        if config.save.keep and step > parts.first_step and _are_weights_sound(error):
            try:
                parts.save(config, run, step, state)
                message += f". When the cause is mended, the same command goes on with step {step}"
            except CheckpointError as failure:
                message += f". {failure}"
        with contextlib.suppress(TrainingError):  # a full disk must not hide what went wrong
            run.event("alarm", message, error=str(error))
        raise


def _are_weights_sound(error: QurlError) -> bool:
    """Whether it came between a sync and the first update, whose errors carry their batch."""
    if isinstance(error, TrainingError):
        return error.batch is None
    return not isinstance(error, SyncError)


def _write_evidence(folder: Path, step: int, learner: Learner, error: QurlError) -> None:
    (folder / "error.txt").write_text(f"{type(error).__name__}: {error}\n")
    if isinstance(error, RewardError):
        evidence = {k: v for k, v in vars(error).items() if not k.startswith("_")}
        (folder / "grading.json").write_text(json.dumps(evidence, indent=2, default=str))
    if isinstance(error, TrainingError):
        write_state(folder, learner, {"step": step})
        if error.batch is not None:
            torch.save(vars(error.batch.to("cpu")), folder / "batch.pt")
