"""What a reward is, and the names that recipes use for them."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from qurl.errors import ConfigError, RewardError
from qurl.plugins import load_plugin

RESERVED = {"mean", "std", "timeouts", "timed_out", "frac_all_correct", "frac_all_wrong"}
"""Names that a reward may not give its other values: `reward/<name>` is one of our metrics."""


class Reward(Protocol):
    """A plain function that says what an answer is worth.

    It returns a number, or a mapping with `score` and other numbers to log. A mapping may hold the
    `accuracy` that filters and evaluation use; by default, that is the score.

    Two other forms need no configuration either:

        async def judge(text, answer, extra): ...   # the calls for one problem run concurrently
        def rank(texts, answer, extra): ...         # one call for all completions of a problem

    A function whose first parameter is called `texts` returns a list with one score for each text.
    """

    def __call__(
        self, text: str, answer: str, extra: Mapping[str, Any], /
    ) -> float | Mapping[str, float]: ...


def score_exact(text: str, answer: str, extra: Mapping[str, Any]) -> float:
    """1.0 if the text is the answer or an accepted one, ignoring white space at the ends."""
    accepted = (answer, *extra.get("accepted_answers", ()))
    return float(text.strip() in [a.strip() for a in accepted])


def is_inline(spec: str) -> bool:
    """Is the reward so cheap and safe that it needs no process of its own?"""
    return spec in ("exact", "countdown")


def load_reward(spec: str) -> Callable[..., Any]:
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
    return load_plugin(spec, "task.reward")


class Scorer:
    """A reward of any form. Its replies are what grading processes send:

    {"values": [{"score": ..., ...}, ...]} or {"error": ..., "traceback": ...}
    """

    def __init__(self, reward: Callable[..., Any]) -> None:
        self._reward = reward
        self.is_async = inspect.iscoroutinefunction(reward)
        self.is_grouped = next(iter(inspect.signature(reward).parameters), "") == "texts"

    def call(self, texts: Sequence[str], answer: str, extra: Mapping[str, Any]) -> Any:
        """What the reward returns for the texts of one call; a coroutine if it is async."""
        return self._reward(texts if self.is_grouped else texts[0], answer, extra)

    def reply(self, texts: Sequence[str], get_value: Callable[[], Any]) -> dict[str, Any]:
        """The checked value of a call, or the error that getting it raises."""
        try:
            value = get_value()
            values = value if self.is_grouped else [value]
            if not isinstance(values, Sequence) or len(values) != len(texts):
                raise RewardError(
                    f"the reward returned {value!r} for {len(texts)} texts; it must return a list "
                    "with one score for each"
                )
            return {"values": [check_value(v) for v in values]}
        except (Exception, SystemExit) as error:
            return describe(error)


def describe(error: BaseException) -> dict[str, str]:
    """An error as a reply."""
    evidence = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}", "traceback": evidence}


def check_value(value: Any) -> dict[str, float]:
    """One score as a mapping of finite floats that holds `score`, or RewardError."""
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
