"""Tasks: generated problems, data files, and reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from qurl.errors import ConfigError, DataError
from qurl.plugins import is_users_own, load_plugin, naming_failures
from qurl.tasks import files, gym
from qurl.tasks.files import FileTask
from qurl.tasks.generated import SIZES, Draft, Draw, GeneratedTask
from qurl.tasks.joined import JoinedTask
from qurl.tasks.puzzles import COUNTDOWN_INSTRUCTION, draw_countdown, draw_sum
from qurl.tasks.task import Prompts, Task

__all__ = ["Draft", "Draw", "FileTask", "GeneratedTask", "JoinedTask", "Task", "load_task"]

_GENERATED = {  # how to draw, instruction for chat models, reward, difficulties
    "arithmetic": (draw_sum, "Answer with the number only.", "exact", range(2, 13)),
    "countdown": (draw_countdown, COUNTDOWN_INSTRUCTION, "countdown", range(2, 9)),
}
_EXPECTED_COLUMNS = {
    "gsm8k": "'question' and 'answer' (the working, then '#### 72')",
    "math": "'problem' and 'answer' (or 'solution' with a \\boxed answer)",
    "code": "'question', 'problem' or 'prompt', and 'tests' or 'inputs' and 'outputs'",
    "file": "'question', 'problem' or 'prompt', and 'answer' or 'ground_truth'",
}


def load_task(
    name_or_path: str | Path | Draw,
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
    rewards: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    system: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Task:
    """A task by its name, by a file's path, or by your own generator or its `module:name`.

    Names are arithmetic, countdown, gsm8k, math, code, file, gym:<name>. A generator is a function
    `draw(rng, difficulty) -> Draft`. Generated tasks use `split`, `seed`, `difficulty`; a file is
    one split. `path` is the file of a named task. Errors call it `path_key`, and the limit of
    prompts `limited_by`. `rewards` grade rows whose `reward` or `data_source` column names them.
    """
    if split not in SIZES:
        raise ConfigError(f"split = {split!r} is not one of {', '.join(SIZES)}")
    limit = f"{limited_by} = {max_prompt_tokens}"
    chat = (system, chat_template_kwargs or {})
    prompts = Prompts(tokenizer, instruction, max_prompt_tokens, limit, skip_long_prompts, *chat)
    name = name_or_path.__name__ if callable(name_or_path) else str(name_or_path)
    is_known = name in _EXPECTED_COLUMNS
    if not callable(name_or_path) and (is_known or name.endswith(files.FORMATS)):
        source = path or ("" if is_known else name_or_path)
        if not str(source):
            raise DataError(
                f"task.name = {name!r} needs task.path: a {', '.join(files.FORMATS)} file with the "
                f"columns {_EXPECTED_COLUMNS[name]}; nothing is downloaded"
            )
        label = name if name in ("gsm8k", "math") else Path(source).name.split(".")[0]
        reward = reward_of_file(name, reward)
        return FileTask(source, label, reward, path_key, prompts, dict(rewards))
    draw, own_instruction, own_reward = _generator(name_or_path, split, seed, difficulty)
    # A model without a chat template completes `37+85=`; an instruction would only lengthen that.
    own_instruction = own_instruction if prompts.is_chat else ""
    reward = own_reward if reward == "auto" else reward
    return GeneratedTask(name, reward, draw, split, prompts, own_instruction)


def reward_of_file(task: str, reward: str) -> str:
    """What grades the rows of a task's file that name no reward; `auto` is the task's own."""
    if reward != "auto":
        return reward
    return "code" if task == "code" else "math"


def _generator(
    name: str | Path | Draw, split: str, seed: int, difficulty: int
) -> tuple[Callable[[int, int], Draft], str, str]:
    """The function that draws problems, the instruction for chat models, and the reward."""
    instruction, reward = "", "exact"
    if callable(name):
        draw = name
    elif task := _GENERATED.get(str(name)):
        draw, instruction, reward, difficulties = task
        if difficulty not in difficulties:
            first, *_, last = difficulties
            raise ConfigError(f"task.difficulty = {difficulty}: {name} takes {first} to {last}")
    elif (name := str(name)).startswith("gym:"):
        return gym.make_draw(name.removeprefix("gym:"), seed, split), gym.INSTRUCTION, name
    elif is_users_own(name):
        draw = load_plugin(name, "task.name")
    else:
        raise ConfigError(
            f"task.name = {name!r} is not one of arithmetic, countdown, gsm8k, math, code, file, "
            f"gym:<name>, module:name, nor a file that ends in {', '.join(files.FORMATS)}"
        )

    def seeded(index: int, attempt: int) -> Draft:
        with naming_failures("task.name"):
            return draw(Random(f"{seed}/{index}/{attempt}"), difficulty)

    return seeded, instruction, reward
