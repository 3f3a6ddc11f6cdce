"""Looks at the files that a recipe names before torch is imported: most mistakes show at once."""

from __future__ import annotations

from pathlib import Path

from qurl.config import Config
from qurl.config.rules import needs_file
from qurl.errors import ConfigError
from qurl.plugins import is_users_own
from qurl.tasks.files import FORMATS, read_rows
from qurl.trainer.folder import check_folder

_FIRST_ROWS = 1000


def check_inputs(config: Config) -> None:
    """Raise if the model folder or a data file cannot be used; reads the first rows only."""
    check_model_path(config)
    task = config.task
    if not needs_file(task.name):
        return
    paths = {"task.path": task.path or (task.name if task.name.endswith(FORMATS) else "")}
    if config.eval.every:
        paths["task.eval_path"] = task.eval_path
    needs_answer, reward = not is_users_own(task.reward), task.reward
    for key, path in paths.items():
        first = None if path.endswith(".parquet") else _FIRST_ROWS
        if path:
            options = {"path_key": key, "reward": reward, "first": first}
            read_rows(Path(path), needs_answer=needs_answer, **options)


def check_model_path(config: Config) -> None:
    """Raise unless model.path may hold a model, and one that can learn this task."""
    task = config.task
    if config.model.path != "scratch":
        return check_folder(config.model.path)
    if needs_file(task.name):
        raise ConfigError(
            f"model.path = 'scratch' needs a generated task to learn from, not {task.name!r}; set "
            "model.path to a pretrained model, or task.name to arithmetic or countdown"
        )
