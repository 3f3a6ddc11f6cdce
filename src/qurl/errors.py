"""Every error that QuRL raises on purpose.

    QurlError
    ├── ConfigError     (ValueError)    a recipe or a flag is wrong; all mistakes at once
    ├── DataError       (ValueError)    a data file, a row or a prompt is wrong
    ├── ModelError      (ValueError)    a model cannot be trained or sampled from
    ├── EngineError     (RuntimeError)  the rollout engine cannot do what was asked
    │   └── SyncError                   its copy is not what the trainer has
    ├── RewardError     (RuntimeError)  a grader raised, or returned something that is no reward
    │   └── RewardTimeout (TimeoutError)
    ├── TrainingError   (RuntimeError)  the run went wrong (non-finite loss, no usable group, ...)
    ├── CheckpointError (OSError)       a checkpoint cannot be written or read
    └── MissingExtra    (ImportError)   an optional dependency is not installed

Each is also an error of the standard library, so callers need not know this module.
A message names the thing, its value, what is allowed and what to do.
"""

from typing import Any


class QurlError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(QurlError, ValueError):
    """A recipe or a flag is wrong."""


class DataError(QurlError, ValueError):
    """A data file, a row or a prompt is wrong."""


class ModelError(QurlError, ValueError):
    """A model cannot be trained or sampled from."""


class EngineError(QurlError, RuntimeError):
    """The rollout engine cannot do what was asked."""


class SyncError(EngineError):
    """The engine's copy is not what the trainer has, or the trainer's weights are no numbers."""


class RewardError(QurlError, RuntimeError):
    """A grader raised, or returned something that is no reward."""

    text: str = ""
    """What was being graded, where there was anything."""
    answer: str = ""
    traceback: str = ""
    """The grader's own."""


class RewardTimeout(RewardError, TimeoutError):
    """A grader was killed at its deadline."""


class TrainingError(QurlError, RuntimeError):
    """The run went wrong and was stopped; what was computed is saved."""

    batch: Any = None
    """The batch that was being trained on, where there was one."""


class CheckpointError(QurlError, OSError):
    """A checkpoint cannot be written or read."""


class MissingExtra(QurlError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'qurl-rl[{extra}]'"
        )
