"""What is kept when a run goes wrong: enough to look at the failure without running again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception

import torch

from qurl.config import Config
from qurl.errors import CheckpointError, QurlError, RewardError, SyncError, TrainingError
from qurl.run.assembly import Parts
from qurl.run.checkpoint import AnyLearner, write_state
from qurl.run.directory import Run
from qurl.trainer.weight_files import UNWRITABLE


@contextmanager
def keep_evidence(config: Config, parts: Parts, run: Run, step: int) -> Iterator[None]:
    """Save the evidence of a failed step under crash/, then let the error go on.

    If the step had not begun to change the weights, the run is also saved as it was before it.
    Errors that nobody foresaw are treated alike, or they would cost all steps since the last
    checkpoint.
    """
    state, version = parts.state(), parts.learner.version
    try:
        yield
    except Exception as error:
        folder = run.path / "crash" / f"step-{step:06d}"
        message = f"step {step} stopped the run; evidence in {folder}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_evidence(folder, step, parts.learner, error)
        except UNWRITABLE as failure:
            message = f"step {step} stopped the run; its evidence cannot be written: {failure}"
        # A failed sync says that the weights are unsound. A row that a full disk lost is written
        # when the step is repeated.
        is_sound = parts.learner.version == version and not isinstance(error, SyncError)
        is_whole = step > parts.first_step and run.last_step == step - 1
        if config.save.keep and is_sound and is_whole:
            try:
                parts.save(config, run, step, state)
                message += f". Fix the cause; the same command then continues with step {step}"
            except (CheckpointError, TrainingError) as failure:
                message += f". {failure}"
        with contextlib.suppress(TrainingError):  # a full disk must not hide what went wrong
            run.event("alarm", message, name="crash", step=step, action="stop", error=str(error))
        raise


def _write_evidence(folder: Path, step: int, learner: AnyLearner, error: Exception) -> None:
    # An error of ours with a cause may come from your own code, whose traceback you want.
    is_foreseen = isinstance(error, QurlError) and error.__cause__ is None
    trace = [f"{type(error).__name__}: {error}\n"] if is_foreseen else format_exception(error)
    (folder / "error.txt").write_text("".join(trace))
    if isinstance(error, RewardError):
        evidence = {k: v for k, v in vars(error).items() if not k.startswith("_")}
        (folder / "grading.json").write_text(json.dumps(evidence, indent=2, default=str))
    if isinstance(error, TrainingError):
        write_state(folder, learner, {"step": step})
        if error.batch is not None:
            torch.save(vars(error.batch.to("cpu")), folder / "batch.pt")
