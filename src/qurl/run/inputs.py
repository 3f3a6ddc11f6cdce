"""Looks at the files that a recipe names before torch is imported: most mistakes show at once."""

from __future__ import annotations

from pathlib import Path

from qurl.config import Config
from qurl.config.rules import needs_file
from qurl.errors import ConfigError
from qurl.tasks import reward_of_file
from qurl.tasks.files import FORMATS, read_rows
from qurl.trainer.folder import check_folder, refuse_adapters

_FIRST_ROWS = 1000


def check_inputs(config: Config) -> None:
    """Raise if the model folder or a data file cannot be used; reads the first rows only."""
    check_model_path(config)
    task = config.task
    if not needs_file(task.name):
        return
    keys = dict.fromkeys(task.training_files, "task.mix" if task.mix else "task.path")
    if task.name.endswith(FORMATS):
        keys = {task.name: "task.name"}
    if config.eval.every:
        key = "task.eval_sets" if task.eval_sets else "task.eval_path"
        keys |= dict.fromkeys(task.held_out_files.values(), key)
    reward = reward_of_file(task.name, task.reward)
    for path, key in keys.items():
        first = None if path.endswith(".parquet") else _FIRST_ROWS
        if path:
            read_rows(Path(path), reward, dict(task.rewards), path_key=key, first=first)


def check_model_path(config: Config) -> None:
    """Raise unless model.path may hold a model, and one that can learn this task; and unless DOTS's
    encoder and predictor are there, which are read only after its first rollouts."""
    if config.model.path != "scratch":
        check_folder(config.model.path)
        if config.model.lora_rank:
            refuse_adapters(config.model.path)
    elif needs_file(config.task.name):
        raise lacks_answers(config.task.name)
    dots = config.systems.dots
    if config.sampling.select == "dots" and dots.encoder:
        check_folder(dots.encoder, "systems.dots.encoder")
        if dots.predictor and not Path(dots.predictor).is_file():
            raise ConfigError(f"systems.dots.predictor = {dots.predictor!r} is not a file")


def lacks_answers(task: str) -> ConfigError:
    """The error of a task that a model from scratch cannot learn from."""
    return ConfigError(
        f"model.path = 'scratch' needs a generated task to learn from, not {task!r}; set "
        "model.path to a pretrained model, or task.name to arithmetic or countdown"
    )
