"""One row of a data file with any of the usual column names.

question   prompt (text or chat messages: verl, TRL) | question (GSM8K) | problem (MATH)
truth      reward_model.ground_truth (verl) | answer | ground_truth | target | solution
id         id | unique_id | extra_info.index (verl), else the row number
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qurl.answers import last_boxed
from qurl.errors import DataError
from qurl.tasks.task import Content

INSTRUCTION = "Think step by step, and put your final answer in \\boxed{}."

QUESTION_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "ground_truth", "target", "solution")


@dataclass(frozen=True)
class Question:
    """What a row asks, before it is tokenised."""

    content: Content
    instruction: str
    """Empty for a `prompt` column, which already says how to answer."""
    answers: tuple[str, ...]
    """The truth, then other accepted answers; empty if the row has none."""
    own_id: str
    """Empty if the row has none."""


def read_question(row: Mapping[str, Any], where: str, *, needs_answer: bool) -> Question:
    """The question of a row; `where` names the file and the row in errors."""
    column = next((c for c in QUESTION_COLUMNS if row.get(c) is not None), None)
    if column is None or (needs_answer and not _truths(row)):
        answers = ("answer", (*ANSWER_COLUMNS, "reward_model.ground_truth"))
        what, columns = ("question", QUESTION_COLUMNS) if column is None else answers
        raise DataError(
            f"{where}: no {what}; one of {', '.join(columns)} must be there "
            f"(found: {', '.join(map(str, row)) or 'nothing'})"
        )
    return Question(
        content=_read_content(row[column], column, where),
        instruction="" if column == "prompt" else INSTRUCTION,
        answers=_read_answers(row, where),
        own_id=_read_id(row),
    )


def _read_content(value: Any, column: str, where: str) -> Content:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: {column!r} is empty; give it a question or remove the row")
        return value
    if not isinstance(value, list):
        raise DataError(
            f"{where}: {column!r} is a {type(value).__name__}; it must be text or a list of chat "
            "messages"
        )
    texts = [m.get("content") if isinstance(m, Mapping) else "?" for m in value]
    if not any(str(text or "").strip() for text in texts):
        raise DataError(f"{where}: {column!r} is empty; give it a message or remove the row")
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise DataError(
                f"{where}: {column!r} holds the message {message!r}; a message is an object with "
                "the texts 'role' and 'content'"
            )
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _read_answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The answers of the first column that is not empty."""
    for column, value in _truths(row).items():
        values = value if isinstance(value, list) else [value]
        texts = [_read_truth(v, column, where) for v in values if not _is_missing(v)]
        if answers := tuple(dict.fromkeys(t for t in texts if t)):
            return answers
    return ()


def _is_missing(value: Any) -> bool:
    """Null, or the NaN that data frames write for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _truths(row: Mapping[str, Any]) -> dict[str, Any]:
    truths = {column: row[column] for column in ANSWER_COLUMNS if column in row}
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return {"reward_model.ground_truth": nested["ground_truth"], **truths}
    return truths


def _read_truth(value: Any, column: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{where}: {column!r} holds a {type(value).__name__}; it must be text, a number, or a "
            "list of accepted answers"
        )
    if isinstance(value, float) and math.isinf(value):
        raise DataError(f"{where}: {column!r} is {value}; give it an answer or remove the row")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    if "####" in text:  # GSM8K: the working, then "#### 1,234"
        return text.rpartition("####")[2].strip().replace(",", "")
    boxed = last_boxed(text) if column == "solution" else None
    return text if boxed is None else boxed.strip()


def _read_id(row: Mapping[str, Any]) -> str:
    for column in ("id", "unique_id"):
        if row.get(column) is not None:
            return str(row[column])
    info = row.get("extra_info")
    if isinstance(info, Mapping) and info.get("index") is not None:
        source = row.get("data_source")
        return f"{source}/{info['index']}" if source else str(info["index"])
    return ""
