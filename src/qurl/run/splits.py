"""The training and the held-out problems of a recipe."""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise
from typing import Any

from qurl.config import Config
from qurl.config.rules import NEEDS_EVAL_PATH, needs_file
from qurl.errors import ConfigError
from qurl.rollout.engine import context_length
from qurl.tasks import Draw, JoinedTask, Task, load_task
from qurl.types import Problem

SAME_OPTIONS = (
    *("difficulty", "instruction", "skip_long_prompts", "reward", "rewards"),
    *("system", "chat_template_kwargs"),
)
"""Keys of [task] that `load_task` takes under the same names."""


def load_split(
    config: Config,
    split: str,
    tokenizer: Any = None,
    model_config: Any = None,
    task: Task | Draw | str = "",
) -> Task:
    """A split of the recipe's task, or of a given one, whose prompts leave room for completions."""
    options, is_eval = config.task, split == "eval"
    if not isinstance(task, str) and not callable(task):
        if not is_eval:
            return task
        task = "file"  # a `Task` object is its own training split only
    task = task or options.name
    several, one = ("eval_sets", "eval_path") if is_eval else ("mix", "path")
    key = several if getattr(options, several) else one
    if is_eval and isinstance(task, str) and needs_file(task) and not getattr(options, key):
        raise ConfigError(f"there are no held-out problems: {NEEDS_EVAL_PATH}")
    section = "eval" if is_eval and config.eval.max_tokens else "sampling"
    load = functools.partial(
        load_task,
        task,
        path_key=f"task.{key}",
        split=split,
        tokenizer=tokenizer,
        seed=config.seed,
        **{name: getattr(options, name) for name in SAME_OPTIONS},
        **_prompt_limit(config, section, model_config),
    )
    if key == one:
        return load(path=getattr(options, one))
    if is_eval:
        sets = options.held_out_files.items()
        return JoinedTask({name: load(path=path) for name, path in sets}, [1.0] * len(sets))
    shares = options.training_files
    return JoinedTask({path: load(path=path) for path in shares}, [*shares.values()])


def held_out_problems(config: Config, task: Task) -> list[Problem]:
    """The first problems of the held-out split, as many as are evaluated; so many of each set."""
    starts = [0, *accumulate(task.sizes)] if isinstance(task, JoinedTask) else [0, len(task)]
    num = config.eval.problems
    return [task[i] for a, b in pairwise(starts) for i in range(a, min(a + num, b))]


def spread_problems(task: Task, num: int) -> list[Problem]:
    """So many problems, or all, at equal distances."""
    places = range(0, len(task), max(1, len(task) // num))
    return [task[i] for i in places[:num]]


def _prompt_limit(config: Config, section: str, model_config: Any) -> dict[str, Any]:
    """Room for completions in the model's context: too long a prompt is found before training."""
    max_tokens = getattr(config, section).max_tokens
    context = context_length(model_config) if model_config is not None else None
    stated = config.task.max_prompt_tokens
    if context is None or context - max_tokens >= stated:
        return {"max_prompt_tokens": stated}
    if max_tokens >= context:
        raise ConfigError(
            f"{section}.max_tokens = {max_tokens} leaves no room for a prompt: the model's "
            f"max_position_embeddings is {context}; lower {section}.max_tokens"
        )
    limited_by = f"max_position_embeddings - {section}.max_tokens = {context} - {max_tokens}"
    return {"max_prompt_tokens": context - max_tokens, "limited_by": limited_by}
