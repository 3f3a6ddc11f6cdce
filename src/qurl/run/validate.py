"""`qurl validate`: checks a recipe before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl.config import Config, load_config
from qurl.config.rules import find_warnings
from qurl.errors import ConfigError, ModelError, QurlError
from qurl.ops.device import pick_device
from qurl.plugins import is_users_own
from qurl.rollout.local.architecture import check_family
from qurl.run.assembly import build_pool, held_out_problems, training_task
from qurl.run.directory import find_changes
from qurl.tasks.task import Task
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.policy import load_model_config, load_tokenizer


@dataclass
class Recipe:
    """A recipe and what the checks so far have read; None if that failed or was not needed."""

    config: Config
    tokenizer: Any = None
    model_config: Any = None
    task: Task | None = None


def validate(source: str | None, flags: Sequence[str]) -> bool:
    """Check a recipe as far as possible without training; print a line per check.

    Weights are not read, so a model may still turn out to be damaged or too large.
    """
    recipe = Recipe(load_config(source, flags))
    print("ok    keys and values")
    for warning in find_warnings(recipe.config):
        print(f"note  {warning}")
    checks: dict[str, Callable[[Recipe], str]] = {
        "device": _check_device,
        "run directory": _check_run_dir,
        "model": _check_model,
        "training problems": _check_training_task,
        "held-out problems": _check_held_out,
        "grader": _check_grader,
    }
    is_sound = True
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check(recipe)}")
        except (QurlError, OSError, ValueError) as error:
            is_sound = False
            print(f"FAIL  {name}: {error}")
    return is_sound


def _check_device(recipe: Recipe) -> str:
    return str(pick_device(recipe.config.device))


def _check_run_dir(recipe: Recipe) -> str:
    config = recipe.config
    changes = find_changes(Path(config.run_dir).expanduser(), config)
    return f"{config.run_dir}, {'a new run' if changes is None else 'a run to resume'}"


def _check_model(recipe: Recipe) -> str:
    path = recipe.config.model.path
    recipe.tokenizer = build_tokenizer() if path == "scratch" else load_tokenizer(path)
    num_tokens = len(recipe.tokenizer)
    tokens = f"{num_tokens} tokens, end of sequence {recipe.tokenizer.eos_token!r}"
    if path == "scratch":
        return f"made from scratch, {tokens}"
    recipe.model_config = load_model_config(path)
    kind = recipe.model_config.model_type
    if recipe.config.rollout.engine == "local":
        check_family(kind)
    vocabulary = recipe.model_config.get_text_config().vocab_size
    if num_tokens > vocabulary:
        raise ModelError(
            f"model.path = {path!r}: its tokenizer has {num_tokens} tokens, and the model only "
            f"{vocabulary}"
        )
    return f"{kind}, {tokens}"


def _check_training_task(recipe: Recipe) -> str:
    recipe.task = task = training_task(recipe.config, recipe.tokenizer, recipe.model_config)
    first = f"the first has {len(task[0].prompt_ids)} tokens" if recipe.tokenizer else ""
    return "; ".join(filter(None, [f"{len(task)} of {task.name}", first, *task.notes]))


def _check_held_out(recipe: Recipe) -> str:
    if not recipe.config.eval.every:
        return "not used (eval.every = 0)"
    return f"{len(held_out_problems(recipe.config, recipe.tokenizer, recipe.model_config))}"


def _check_grader(recipe: Recipe) -> str:
    """Grade right answers and a wrong one for real.

    A reward of the user's own may want another format, so it only has to run.
    """
    config, task = recipe.config, recipe.task or training_task(recipe.config)
    problem = task[0]
    worked = getattr(task, "worked_answer", None)
    boxed = f"The answer is \\boxed{{{problem.answer}}}."
    texts = [worked(problem)] if worked else [problem.answer, boxed]
    with build_pool(config, task.reward) as pool:
        items = [(text, problem.answer, problem.extra) for text in (*texts, "no idea")]
        *good, bad = pool.grade(items)
    if any(grade.timed_out for grade in (*good, bad)):
        raise ConfigError(
            f"{task.reward!r} was killed at task.grade_timeout = {config.task.grade_timeout:g} s"
        )
    best = max(grade.score for grade in good)
    scores = f"{task.reward!r} gives the truth {best:g} and a non-answer {bad.score:g}"
    if best > bad.score:
        return scores
    if is_users_own(task.reward):
        return f"{scores}, alike or worse: is that meant?"
    raise ConfigError(f"{scores}: a right answer must earn more than a wrong one")
