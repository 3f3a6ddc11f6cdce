"""The work behind `qurl eval` and `qurl validate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qurl.assembly import (
    build_actor,
    build_pool,
    first_problems,
    held_out_problems,
    held_out_task,
    prepare_torch,
    training_task,
)
from qurl.checkpoint import find_policy
from qurl.config import Config, load_config
from qurl.errors import ConfigError, ModelError, QurlError
from qurl.evaluate import EvalResult, evaluate_recipe, print_results
from qurl.policy import load_policy
from qurl.rewards.reward import is_users_own
from qurl.rules import find_warnings
from qurl.tasks.tokenizer import build_tokenizer


def evaluate_model(source: str | None, flags: Sequence[str]) -> list[EvalResult]:
    """Held-out accuracy of `model.path`, or of a run's newest checkpoint, in each precision."""
    config = load_config(source, flags)
    device = prepare_torch(config)
    path: str | Path = config.model.path
    if source and Path(source).is_dir():
        path = find_policy(Path(source))
    elif path == "scratch":  # there is nothing to evaluate but what was trained
        path = find_policy(Path(config.run_dir))
    policy = load_policy(path, config.model, device)
    task = held_out_task(config, policy.tokenizer, policy.model.config)
    problems = first_problems(config, task)
    results: list[EvalResult] = []
    try:
        with build_pool(config, task.reward) as pool:
            for precision in config.eval_precisions:
                engine = build_actor(config, policy, "none" if precision == "full" else precision)
                results.append(evaluate_recipe(config, engine, problems, pool, precision))
    finally:  # what one precision took long to answer is not lost when the next one fails
        if results:
            print_results(results)
    return results


def validate(source: str | None, flags: Sequence[str]) -> bool:
    """Check a recipe as far as possible without training; prints a line per check."""
    config = load_config(source, flags)
    print("ok    keys and values")
    for warning in find_warnings(config):
        print(f"note  {warning}")
    load_tokenizer = functools.cache(lambda: _load_tokenizer(config))
    load_model_config = functools.cache(lambda: _load_model_config(config))
    checks: list[tuple[str, Callable[[], str]]] = [
        ("tokenizer", lambda: _check_tokenizer(load_tokenizer())),
        (
            "training problems",
            lambda: _check_training_task(config, load_tokenizer(), load_model_config()),
        ),
        (
            "held-out problems",
            lambda: _check_held_out(config, load_tokenizer(), load_model_config()),
        ),
        ("grader", lambda: _check_grader(config)),
    ]
    is_sound = True
    for name, check in checks:
        try:
            print(f"ok    {name}: {check()}")
        except (QurlError, OSError, ValueError) as error:
            is_sound = False
            print(f"FAIL  {name}: {error}")
    return is_sound


def _load_tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    if config.model.path == "scratch":
        return build_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path = {config.model.path!r} has no tokenizer that can be read: {error}"
        ) from error


def _load_model_config(config: Config) -> Any:
    from transformers import AutoConfig

    if config.model.path == "scratch":
        return None  # generated problems are short
    try:
        return AutoConfig.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path = {config.model.path!r} has no config that can be read: {error}"
        ) from error


def _check_tokenizer(tokenizer: Any) -> str:
    return f"{len(tokenizer)} tokens, end of sequence {tokenizer.eos_token!r}"


def _check_training_task(config: Config, tokenizer: Any, model_config: Any) -> str:
    task = training_task(config, tokenizer, model_config)
    problem = task[0]
    first = f"the first has {len(problem.prompt_ids)} tokens"
    return "; ".join([f"{len(task)} of {task.name}", first, *task.notes])


def _check_held_out(config: Config, tokenizer: Any, model_config: Any) -> str:
    if not config.eval.every:
        return "not used (eval.every = 0)"
    return f"{len(held_out_problems(config, tokenizer, model_config))}"


def _check_grader(config: Config) -> str:
    """Grade right answers and a wrong one for real.

    The format that a reward of the user's own wants is not known here: it only has to run.
    """
    task = training_task(config)
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
    if best <= bad.score and not is_users_own(task.reward):
        raise ConfigError(f"{scores}: a right answer must earn more than a wrong one")
    return scores
