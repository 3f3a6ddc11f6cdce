"""What a reward is, and the names that recipes use for them."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Protocol

from qurl.answers import last_tagged
from qurl.errors import ConfigError, RewardError
from qurl.plugins import import_extra, is_users_own, load_plugin
from qurl.rewards.countdown import score_countdown

LARGEST = 1e9
"""Largest reward: sums and squares of a batch must stay numbers in FP32."""
RESERVED = frozenset(
    (
        *("mean", "std", "timeouts", "timed_out", "overlong"),
        *("frac_equal", "frac_all_correct", "frac_all_wrong"),
    )
)
"""Names that a reward may not give its other values: `reward/<name>` is one of our metrics."""


@dataclass(frozen=True)
class Grade:
    """What one answer is worth."""

    score: float
    details: Mapping[str, float] = field(default_factory=dict)  # a mapping's other values
    timed_out: bool = False

    @property
    def accuracy(self) -> float:
        """For filters and evaluation: the score, unless a shaped reward gives it separately."""
        return self.details.get("accuracy", self.score)


Calls = Sequence[Sequence[str]]  # the texts of each call of a reward
Outcome = list[Grade] | RewardError | None
"""What a call gives: a grade for each text, an error, or None if it ran out of time or memory."""


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


INLINE = {"exact": score_exact, "countdown": score_countdown}
"""Rewards that are so cheap and safe that they need no process of their own."""


def load_reward(spec: str) -> Callable[..., Any]:
    """The function behind math, exact, countdown, code, gym:<name> or module:function."""
    if spec in INLINE:
        return INLINE[spec]
    if spec == "math":
        from qurl.rewards.math import score_math, warm_up

        warm_up()
        return score_math
    if spec == "code":
        from qurl.rewards import code

        return code.load()
    if spec.startswith("gym:"):
        return _load_gym(spec)
    if not is_users_own(spec):
        raise ConfigError(
            f"task.reward = {spec!r} is not one of math, exact, countdown, code, gym:<name>, "
            "module:function"
        )
    return load_plugin(spec, "task.reward")


def _load_gym(spec: str) -> Callable[[str, str, Mapping[str, Any]], float]:
    """reasoning-gym's scorer of the last <answer>...</answer> of a text, else of all of it."""
    gym = import_extra("reasoning_gym", "reasoning-gym", "gym", f"task {spec}")
    scorer = gym.create_dataset(spec.removeprefix("gym:"), seed=0, size=1)

    def score_gym(text: str, answer: str, extra: Mapping[str, Any]) -> float:
        del answer  # The entry holds it, with everything else that the scorer needs.
        tagged = last_tagged(text)
        found = text.strip() if tagged is None else tagged
        return scorer.score_answer(answer=found, entry=extra["entry"])

    return score_gym


class Scorer:
    """A reward of any form, called for several texts."""

    def __init__(self, reward: Callable[..., Any], name: str) -> None:
        """`name` is for errors."""
        self._reward, self._name = reward, name
        self.is_async = inspect.iscoroutinefunction(reward)
        self.is_grouped = next(iter(inspect.signature(reward).parameters), "") == "texts"

    def __call__(
        self,
        calls: Calls,
        answer: str,
        extra: Mapping[str, Any],
        timeout: float | None = None,
        run: Callable[..., Any] = asyncio.run,
    ) -> list[Outcome]:
        """The outcome of each call. `run` runs async calls together and cancels late ones."""
        subjects = calls if self.is_grouped else [text for [text] in calls]
        get_values = [partial(self._reward, subject, answer, extra) for subject in subjects]
        if self.is_async:
            get_values = run(_together(get_values, timeout))
        pairs = zip(calls, get_values, strict=True)
        return [self._grade(texts, answer, get) if get else None for texts, get in pairs]

    def _grade(self, texts: Sequence[str], answer: str, get_value: Callable[[], Any]) -> Outcome:
        try:
            value = get_value()
            values = value if self.is_grouped else [value]
            if not isinstance(values, Sequence) or len(values) != len(texts):
                raise RewardError(
                    f"the reward returned {value!r} for {len(texts)} texts; it must return a list "
                    "with one score for each"
                )
            return [read_grade(v) for v in values]
        except MemoryError:  # a completion made it too large, as it could make it too slow
            return None
        except (Exception, SystemExit) as error:
            return failure(self._name, error, texts, answer)


async def _together(
    calls: Sequence[Callable[[], Any]], timeout: float | None
) -> list[Callable[[], Any] | None]:
    """What gets the result of each call; None for those that missed the deadline."""
    tasks = [asyncio.create_task(call()) for call in calls]
    _, late = await asyncio.wait(tasks, timeout=timeout)
    for task in late:
        task.cancel()
    return [None if task in late else task.result for task in tasks]


def failure(
    reward: str, cause: BaseException | str, texts: Sequence[str] = (), answer: str = ""
) -> RewardError:
    """An error that carries the text, the answer and the grader's traceback."""
    text, evidence = "\n\n".join(texts), ""
    if isinstance(cause, BaseException):
        evidence = "".join(traceback.format_exception(cause))
        cause = f"{type(cause).__name__}: {cause}"
    where = f"; it was grading {text[-300:]!r} against {answer!r}" if texts else ""
    error = RewardError(f"reward {reward!r} failed: {cause}{where}")
    error.text, error.answer, error.traceback = text, answer, evidence
    if evidence:
        error.add_note(evidence)
    return error


def read_grade(value: Any) -> Grade:
    """What a reward returned for one text; RewardError if that is no reward."""
    named = value if isinstance(value, Mapping) else {"score": value}
    if "score" not in named:
        raise RewardError(f"the reward returned {value!r}; a mapping must hold 'score'")
    number: Any
    for name, number in named.items():
        if name in RESERVED:
            raise RewardError(
                f"the reward returned {value!r}; {name} would be logged under a name that the "
                "framework's own metrics have, choose another"
            )
        is_number = isinstance(number, Real)
        size: Any = abs(number) if is_number else math.nan
        if not size <= LARGEST:
            is_finite = is_number and size < math.inf
            allowed = f"between -{LARGEST:g} and {LARGEST:g}" if is_finite else "a finite number"
            raise RewardError(f"the reward returned {name} = {number!r}; it must be {allowed}")
    details = {str(name): float(number) for name, number in named.items()}
    return Grade(details.pop("score"), details)
