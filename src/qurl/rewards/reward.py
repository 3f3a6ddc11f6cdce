"""What a reward is, and the names by which one is asked for."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from qurl.errors import ConfigError, RewardError

RESERVED = {"mean", "std", "timeouts", "timed_out", "frac_all_correct", "frac_all_wrong"}
"""What a reward may not call its other values: `reward/<name>` is ours."""


class Reward(Protocol):
    """A plain function from an answer and the truth to what the answer is worth.

    It returns a number, or a mapping with `score` and other numbers to log. A mapping may name the
    `accuracy` that filters look at; otherwise that is the score.
    """

    def __call__(
        self, text: str, answer: str, extra: Mapping[str, Any], /
    ) -> float | Mapping[str, float]: ...


def score_exact(text: str, answer: str, extra: Mapping[str, Any]) -> float:
    """1.0 where the text is the answer, or another accepted one, up to white space at the ends."""
    accepted = (answer, *extra.get("accepted_answers", ()))
    return float(text.strip() in [a.strip() for a in accepted])


def is_inline(spec: str) -> bool:
    """Is the reward so cheap and safe that it needs no process of its own?"""
    return spec in ("exact", "countdown")


def is_users_own(spec: str) -> bool:
    """Is it a function of the user, of which nothing more is known?"""
    return ":" in spec and not spec.startswith("gym:")


def load_reward(spec: str) -> Reward:
    """The function behind math, exact, countdown, gym:<name> or module:function."""
    if spec == "exact":
        return score_exact
    if spec == "countdown":
        from qurl.rewards.countdown import score_countdown

        return score_countdown
    if spec == "math":
        from qurl.rewards.math import score_math, warm_up

        warm_up()
        return score_math
    module, colon, function = spec.partition(":")
    if module == "gym":
        from qurl.rewards.gym import load_gym_reward

        return load_gym_reward(function)
    if not (module and colon and function):
        raise ConfigError(
            f"task.reward = {spec!r} is not one of math, exact, countdown, gym:<name>, "
            "module:function"
        )
    return _load_function(module, function)


def check_reward(spec: str) -> None:
    """Raise where a user's module is not there; it is not run, which a grader may do for long."""
    if not is_users_own(spec):
        return
    module, _, _ = spec.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ConfigError(
            f"task.reward = {spec!r}: {module!r} is not the name of a module; for a file "
            "my_reward.py in the working directory write my_reward:function"
        )
    if not _is_importable(module):
        raise ConfigError(
            f"task.reward = {spec!r}: there is no module {module!r} in {Path.cwd()} nor on "
            "Python's path (PYTHONPATH)"
        )


def _is_importable(module: str) -> bool:
    """From where the graders run, whose path begins with the working directory."""
    places = [str(Path.cwd()), *sys.path]
    for part in module.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None:
            return False
        places = list(found.submodule_search_locations or [])
    return True


def _load_function(module: str, function: str) -> Reward:
    found = importlib.import_module(module)
    reward = getattr(found, function, None)
    if not callable(reward):
        names = [name for name, value in vars(found).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"task.reward = '{module}:{function}': {module} has no function {function!r}; it has "
            f"{', '.join(names) or 'none'}"
        )
    return reward  # type: ignore[return-value]


def check_value(value: Any) -> dict[str, float]:
    """What a reward returned as a mapping of finite floats with `score`, or RewardError."""
    named = value if isinstance(value, Mapping) else {"score": value}
    if "score" not in named:
        raise RewardError(f"the reward returned {value!r}; a mapping must hold 'score'")
    if taken := sorted(RESERVED & named.keys()):
        raise RewardError(
            f"the reward returned {value!r}; {', '.join(taken)} would be logged under a name that "
            "the framework's own metrics have, choose another"
        )
    for name, number in named.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            raise RewardError(
                f"the reward returned {name} = {number!r}; it must be a finite number"
            )
    return {str(name): float(number) for name, number in named.items()}
