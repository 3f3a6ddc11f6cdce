"""All errors that QuRL raises on purpose.

    QurlError
    ├── ConfigError     (ValueError)    a recipe or a flag is wrong; all mistakes at once
    ├── DataError       (ValueError)    a data file, a row or a prompt is wrong
    ├── ModelError      (ValueError)    a model cannot be trained or sampled from
    ├── EngineError     (RuntimeError)  the rollout engine cannot do what was asked
    │   └── SyncError                   its weights differ from the trainer's
    ├── RewardError     (RuntimeError)  a grader raised or did not return a reward
    │   └── RewardTimeout (TimeoutError)
    ├── TrainingError   (RuntimeError)  the run went wrong (non-finite loss, no usable group, ...)
    │   └── RankLost                    a trainer rank was killed; started again, the run goes on
    ├── CheckpointError (OSError)       a checkpoint cannot be written or read
    └── MissingExtra    (ImportError)   an optional dependency is not installed

Each is also an error of the standard library, so callers need not know this module.
A message names the key or file, its value, what is allowed and what to do.
"""

from typing import Any


class QurlError(Exception):
    """Base of all errors raised on purpose."""

    is_agreed: bool = False
    """Whether all trainer ranks raise it together, so that they can go on together."""


class ConfigError(QurlError, ValueError):
    """A recipe or a flag is wrong."""


class DataError(QurlError, ValueError):
    """A data file, a row or a prompt is wrong."""


class ModelError(QurlError, ValueError):
    """A model cannot be trained or sampled from."""


class EngineError(QurlError, RuntimeError):
    """The rollout engine cannot do what was asked."""


class SyncError(EngineError):
    """The engine's weights differ from the trainer's, or the trainer's are not finite."""


class RewardError(QurlError, RuntimeError):
    """A grader raised or did not return a reward."""

    text: str = ""
    """The completion that was graded."""
    answer: str = ""
    traceback: str = ""
    """Traceback of the grader."""


class RewardTimeout(RewardError, TimeoutError):
    """A grader was killed at its deadline."""


class TrainingError(QurlError, RuntimeError):
    """The run went wrong and was stopped. What it computed is saved."""

    batch: Any = None
    """The batch of the failed update; None if the error came earlier."""


class RankLost(TrainingError):
    """A trainer rank was killed. Started again, the run goes on from its newest checkpoint."""


class CheckpointError(QurlError, OSError):
    """A checkpoint cannot be written or read."""


class MissingExtra(QurlError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'qurl-rl[{extra}]'"
        )


def first_line(error: BaseException) -> str:
    """What an error says in one line; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
