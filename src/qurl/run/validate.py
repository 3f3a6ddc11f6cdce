"""`qurl validate`: what can be known of a recipe before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl.config import Config, load_config
from qurl.config.rules import find_warnings
from qurl.errors import ConfigError, ModelError, QurlError
from qurl.ops.device import pick_device
from qurl.plugins import check_plugin, is_users_own
from qurl.rollout.local.architecture import check_family
from qurl.run.assembly import build_pool, held_out_problems, training_task
from qurl.run.directory import find_changes
from qurl.tasks.task import Task
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.policy import load_model_config, load_tokenizer


@dataclass
class Found:
    """What a check has read, for those that follow; None where it failed."""

    tokenizer: Any = None
    model_config: Any = None
    """None also for a model that is made from scratch."""
    task: Task | None = None


def validate(source: str | None, flags: Sequence[str]) -> bool:
    """Check a recipe as far as possible without training; prints a line per check.

    Weights are not read, so that a model may still turn out to be damaged or too large.
    """
    config, found = load_config(source, flags), Found()
    print("ok    keys and values")
    for warning in find_warnings(config):
        print(f"note  {warning}")
    checks: dict[str, Callable[[Config, Found], str]] = {
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
            print(f"ok    {name}: {check(config, found)}")
        except (QurlError, OSError, ValueError) as error:
            is_sound = False
            print(f"FAIL  {name}: {error}")
    return is_sound


def _check_device(config: Config, found: Found) -> str:
    return str(pick_device(config.device))


def _check_run_dir(config: Config, found: Found) -> str:
    changes = find_changes(Path(config.run_dir).expanduser(), config)
    return f"{config.run_dir}, {'a new run' if changes is None else 'a run to resume'}"


def _check_model(config: Config, found: Found) -> str:
    is_scratch = config.model.path == "scratch"
    found.tokenizer = build_tokenizer() if is_scratch else load_tokenizer(config.model.path)
    tokens = f"{len(found.tokenizer)} tokens, end of sequence {found.tokenizer.eos_token!r}"
    if is_scratch:
        return f"made from scratch, {tokens}"
    found.model_config = load_model_config(config.model.path)
    kind = found.model_config.model_type
    if config.rollout.engine == "local":
        check_family(kind)
    vocabulary = found.model_config.get_text_config().vocab_size
    if len(found.tokenizer) > vocabulary:
        raise ModelError(
            f"model.path = {config.model.path!r}: its tokenizer has {len(found.tokenizer)} tokens, "
            f"and the model only {vocabulary}"
        )
    return f"{kind}, {tokens}"


def _check_training_task(config: Config, found: Found) -> str:
    found.task = task = training_task(config, found.tokenizer, found.model_config)
    first = f"the first has {len(task[0].prompt_ids)} tokens" if found.tokenizer else ""
    return "; ".join(filter(None, [f"{len(task)} of {task.name}", first, *task.notes]))


def _check_held_out(config: Config, found: Found) -> str:
    if not config.eval.every:
        return "not used (eval.every = 0)"
    return f"{len(held_out_problems(config, found.tokenizer, found.model_config))}"


def _check_grader(config: Config, found: Found) -> str:
    """Grade right answers and a wrong one for real.

    The format that a reward of the user's own wants is not known here: it only has to run.
    """
    check_plugin(config.task.reward, "task.reward")
    task = found.task or training_task(config)
    problem = task[0]
    worked = getattr(task, "worked_answer", None)
    boxed = f"The answer is \\boxed{{{problem.answer}}}."
    right = [worked(problem)] if worked else [problem.answer, boxed]
    with build_pool(config, task.reward) as pool:
        *good, bad = pool.grade(
            [(text, problem.answer, problem.extra) for text in (*right, "no idea")]
        )
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
