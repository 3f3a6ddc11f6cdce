"""What is asked: generated problems, data files, and reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from qurl.errors import ConfigError, DataError
from qurl.tasks import arithmetic, countdown, files, gym
from qurl.tasks.files import FileTask
from qurl.tasks.generated import SIZES, Draft, GeneratedTask
from qurl.tasks.task import Task, has_chat_template

__all__ = ["FileTask", "GeneratedTask", "Task", "load_task"]

_EXPECTED_COLUMNS = {
    "gsm8k": "'question' and 'answer' (the working, then '#### 72')",
    "math": "'problem' and 'answer' (or 'solution' with a \\boxed answer)",
    "file": "'question', 'problem' or 'prompt', and 'answer' or 'ground_truth'",
}


def load_task(
    name_or_path: str | Path,
    *,
    tokenizer: Any = None,
    path: str | Path = "",
    path_key: str = "task.path",
    split: str = "train",
    seed: int = 0,
    difficulty: int = 4,
    instruction: str = "auto",
    max_prompt_tokens: int = 1024,
    limited_by: str = "task.max_prompt_tokens",
    skip_long_prompts: bool = False,
    reward: str = "auto",
) -> Task:
    """A task by name (arithmetic, countdown, gsm8k, math, file, gym:<name>) or by a file's path,
    for which `path` is another one.

    Generated tasks take `split`, `seed` and `difficulty`; a file is one split, all of it.
    `path_key` and `limited_by` are what errors call `path` and the limit of prompts.
    """
    if split not in SIZES:
        raise ConfigError(f"split = {split!r} is not one of {', '.join(SIZES)}")
    name = str(name_or_path)
    prompts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_prompt_tokens": max_prompt_tokens,
        "limited_by": limited_by,
        "skip_long_prompts": skip_long_prompts,
    }
    if name in _EXPECTED_COLUMNS or name.endswith(files.FORMATS):
        is_path = name not in _EXPECTED_COLUMNS
        source = path or (name_or_path if is_path else "")
        if not str(source):
            raise DataError(_no_path(name))
        label = _stem(source) if name == "file" or is_path else name
        grader = "math" if reward == "auto" else reward
        return FileTask(source, label, grader, path_key, instruction=instruction, **prompts)
    draw, default_instruction, grader = _generator(name, split, seed, difficulty)
    if instruction == "auto":
        # A model without a chat template completes `37+85=`; instructions only lengthen it.
        instruction = default_instruction if has_chat_template(tokenizer) else ""
    grader = grader if reward == "auto" else reward
    return GeneratedTask(name, grader, draw, split, instruction=instruction, **prompts)


def _generator(
    name: str, split: str, seed: int, difficulty: int
) -> tuple[Callable[[int, int], Draft], str, str]:
    """What draws the problems, the instruction for chat models, and the grader."""
    if name == "arithmetic":
        arithmetic.check_difficulty(difficulty)
        return _seeded(arithmetic.draw, seed, difficulty), arithmetic.INSTRUCTION, "exact"
    if name == "countdown":
        countdown.check_difficulty(difficulty)
        return _seeded(countdown.draw, seed, difficulty), countdown.INSTRUCTION, "countdown"
    if name.startswith("gym:"):
        dataset = name.removeprefix("gym:")
        return gym.make_draw(dataset, seed, split), gym.INSTRUCTION, name
    raise ConfigError(
        f"task.name = {name!r} is not one of arithmetic, countdown, gsm8k, math, file, gym:<name>, "
        f"nor a file that ends in {', '.join(files.FORMATS)}"
    )


def _seeded(
    draw: Callable[[Random, int], Draft], seed: int, difficulty: int
) -> Callable[[int, int], Draft]:
    return lambda index, attempt: draw(Random(f"{seed}/{index}/{attempt}"), difficulty)


def _stem(path: str | Path) -> str:
    return Path(path).name.split(".")[0]


def _no_path(name: str) -> str:
    return (
        f"task.name = {name!r} needs task.path: a {', '.join(files.FORMATS)} file with the columns "
        f"{_EXPECTED_COLUMNS[name]}; nothing is downloaded"
    )
