"""One row of a data file with any of the usual column names.

question   prompt (text or chat messages: verl, TRL) | question (GSM8K) | problem (MATH)
truth      reward_model.ground_truth (verl) | answer | ground_truth | target | solution
id         id | unique_id | extra_info.index (verl), else the row number
reward     reward, a name; or data_source (verl), if task.rewards has it
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from qurl.answers import last_boxed
from qurl.config.rules import ROW_REWARDS
from qurl.errors import DataError
from qurl.plugins import is_users_own
from qurl.programs import read_tests
from qurl.tasks.task import Messages

INSTRUCTION = "Think step by step, and put your final answer in \\boxed{}."
INSTRUCTIONS = {
    "exact": "Answer with the final answer only.",
    "countdown": "Answer with one expression of the given numbers only, each used at most once.",
    "code": "Write it in Python. Put the whole program between ```python and ```.",
}
"""What is asked instead where the reward reads something else."""

RESERVED = ("qurl_reward", "qurl_set")
"""What QuRL itself adds to the columns of a row."""
TEST_COLUMNS = ("tests", "test_list", "test", "inputs")
QUESTION_COLUMNS = ("prompt", "question", "problem")
_DEEPEST = 50
_SURROGATE = re.compile("[\ud800-\udfff]")  # UTF-8 has none
_THOUSANDS = re.compile(r"\D*\d{1,3}(,\d{3})+(\.\d+)?")
ANSWER_COLUMNS = ("answer", "ground_truth", "target", "solution")


@dataclass(frozen=True)
class Row:
    """A checked row, before it is tokenised."""

    id: str  # empty if the row has none of its own
    where: str  # file and row, for errors
    messages: Messages
    instruction: str  # empty for a `prompt` column, which already says how to answer
    answers: tuple[str, ...]  # the truth, then other accepted answers; empty if the row has none
    columns: Mapping[str, Any]
    reward: str = ""  # what grades it


def find_reward(columns: Any, where: str, default: str, named: Mapping[str, str]) -> str:
    """The reward of a row: `named` by its columns, a built-in one, or the default.

    A data file must not choose code to run, so functions are named in the recipe only.
    """
    columns = columns if isinstance(columns, Mapping) else {}
    label, source = columns.get("reward"), columns.get("data_source")
    is_score = label is None or isinstance(label, int | float)  # of another run, say
    if not is_score and label != "":
        if isinstance(label, str) and (label in named or label in ROW_REWARDS):
            return named.get(label, label)
        known = ", ".join([*ROW_REWARDS, *named])
        raise DataError(
            f"{where}: 'reward' is {str(label)[:100]!r}, not one of {known}; add it to "
            "task.rewards, or rename the column if it means something else"
        )
    return named.get(source, default) if isinstance(source, str) else default


def needs_answer(reward: str) -> bool:
    """Does a reward compare with a truth? Your own may not; `code` runs tests."""
    return reward != "code" and not is_users_own(reward)


def with_tests(row: Row) -> Row:
    """A row for the reward `code`, with its tests, which a truth may hold as JSON (verl)."""
    if row.answers and row.answers[0].startswith("{"):
        try:
            tests = json.loads(row.answers[0])
        except (ValueError, RecursionError) as error:
            raise DataError(f"{row.where}: the truth is not valid JSON: {error}") from error
        _check_columns(tests, row.where)
        row = replace(row, columns={**row.columns, **tests}, answers=())
    if not any(row.columns.get(name) for name in TEST_COLUMNS):
        raise DataError(
            f"{row.where}: no tests for the reward 'code'; one of {', '.join(TEST_COLUMNS)} must "
            f"be there (found: {', '.join(map(str, row.columns))})"
        )
    try:
        read_tests(row.columns)
    except ValueError as error:
        raise DataError(f"{row.where}: {error}") from error
    return row


def read_row(columns: Any, where: str, *, needs_answer: bool) -> Row:
    """Check a row and find its question, truth and id."""
    if not isinstance(columns, Mapping):
        raise DataError(f"{where}: is a {type(columns).__name__}, not an object with columns")
    _check_columns(columns, where)
    column = next((c for c in QUESTION_COLUMNS if columns.get(c) is not None), "")
    truths = {name: columns[name] for name in ANSWER_COLUMNS if name in columns}
    nested = columns.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        truths = {"reward_model.ground_truth": nested["ground_truth"], **truths}
    if not column or (needs_answer and not truths):
        what, names = ("answer", ANSWER_COLUMNS) if column else ("question", QUESTION_COLUMNS)
        raise DataError(
            f"{where}: no {what}; one of {', '.join(names)} must be there "
            f"(found: {', '.join(map(str, columns)) or 'nothing'})"
        )
    answers = _read_answers(truths, where)
    if answers and columns.get("accepted_answers") is not None:
        others = _read_answers({"accepted_answers": columns["accepted_answers"]}, where)
        answers = tuple(dict.fromkeys([*answers, *others]))
    return Row(
        id=_read_id(columns),
        where=where,
        messages=_read_messages(columns[column], f"{where}: {column!r}"),
        instruction="" if column == "prompt" else INSTRUCTION,
        answers=answers,
        columns=columns,
    )


def _read_messages(value: Any, where: str) -> Messages:
    messages: Any = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and all(isinstance(m.get(k), str) for k in ("role", "content"))
        for m in messages
    ):
        raise DataError(
            f"{where} is {str(value)[:300]}; it must be text or a list of chat messages, objects "
            "with the texts 'role' and 'content'"
        )
    if not any(m["content"].strip() for m in messages):
        raise DataError(f"{where} is empty; give it a question or remove the row")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _read_answers(truths: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The answers of the first column that is not empty."""
    for column, value in truths.items():
        values = value if isinstance(value, list) else [value]
        texts = [_read_truth(v, column, where) for v in values]
        if answers := tuple(dict.fromkeys(t for t in texts if t)):
            return answers
    return ()


def _read_truth(value: Any, column: str, where: str) -> str:
    """The text of an answer; empty for null, and for the NaN that data frames write for it."""
    if value is None or value != value:
        return ""
    is_fraction = isinstance(value, float | Decimal) and math.isfinite(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, str) and not is_fraction and not is_whole:
        raise DataError(
            f"{where}: {column!r} is {value!r}; it must be text, a number, or a list of accepted "
            "answers"
        )
    if is_fraction:
        is_integer = value == int(value)
        return str(int(value)) if is_integer else f"{Decimal(str(value)):f}".rstrip("0")
    text = str(value).strip()
    if "####" in text:  # GSM8K: the working, then "#### 1,234"
        last = text.rpartition("####")[2].strip()
        return last.replace(",", "") if _THOUSANDS.fullmatch(last) else last
    boxed = last_boxed(text) if column == "solution" else None
    return text if boxed is None else boxed.strip()


def _check_columns(columns: Mapping[str, Any], where: str) -> None:
    """Refuse names of our own, text that UTF-8 cannot hold, and columns of columns without end."""
    if own := next((name for name in columns if name in RESERVED), None):
        raise DataError(f"{where}: {own!r} is a name of QuRL's own; rename that column")
    parts: list[Any] = [columns]
    for _ in range(_DEEPEST):
        if not parts:
            return
        texts = (part for part in parts if isinstance(part, str))
        if broken := next(filter(_SURROGATE.search, texts), None):
            raise DataError(
                f"{where}: {broken[:80]!r} is not valid text (a lone surrogate); remove that "
                "character"
            )
        keys = [key for part in parts if isinstance(part, Mapping) for key in part]
        values = [v for part in parts if isinstance(part, Mapping) for v in part.values()]
        parts = [*keys, *values, *(v for part in parts if isinstance(part, list) for v in part)]
    raise DataError(f"{where}: is nested too deeply; rows have {_DEEPEST} levels at most")


def read_numbers(columns: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The columns with whole `numbers` and a whole `target`, for the countdown reward."""
    numbers, target = columns.get("numbers", columns.get("nums")), columns.get("target")
    values: list[Any] = [*numbers, target] if isinstance(numbers, list) and numbers else [None]
    if not all(_is_whole(value) for value in values):
        raise DataError(
            f"{where}: the countdown reward needs a list of whole 'numbers' and a whole 'target', "
            f"not {str(numbers)[:100]} and {str(target)[:100]}"
        )
    *given, goal = (int(value) for value in values)
    return {**columns, "numbers": given, "target": goal}


def _is_whole(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) < 100 and value.strip().removeprefix("-").isdecimal()
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1


def _read_id(row: Mapping[str, Any]) -> str:
    for value in (row.get("id"), row.get("unique_id")):
        if value is not None:
            return str(value)
    info, source = row.get("extra_info"), row.get("data_source")
    if not isinstance(info, Mapping) or info.get("index") is None:
        return ""
    return f"{source}/{info['index']}" if source else str(info["index"])
