"""The work behind `qurl eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qurl.config import load_config
from qurl.errors import ConfigError
from qurl.run.assembly import (
    build_actor,
    build_pool,
    first_problems,
    held_out_task,
    prepare_torch,
)
from qurl.run.checkpoint import find_policy
from qurl.run.evaluation import EvalResult, evaluate_recipe, print_results
from qurl.trainer.policy import load_policy


def evaluate_model(source: str | None, flags: Sequence[str]) -> list[EvalResult]:
    """Held-out accuracy of `model.path`, or of a run's newest checkpoint, in each precision."""
    config = load_config(source, flags)
    device = prepare_torch(config)
    path: str | Path = config.model.path
    if source and Path(source).is_dir():
        if path != load_config(source, []).model.path:
            raise ConfigError(
                f"model.path = {path!r}, but the newest checkpoint of {source} is what is "
                "evaluated; leave model.path out, or give a recipe in place of the run"
            )
        path = find_policy(Path(source))
    elif path == "scratch":  # there is nothing to evaluate but what was trained
        path = find_policy(Path(config.run_dir).expanduser())
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
