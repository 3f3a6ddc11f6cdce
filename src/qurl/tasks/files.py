"""Tasks from files: JSON lines (also gzipped), a JSON list, or parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl.errors import DataError
from qurl.plugins import import_extra, is_users_own
from qurl.tasks.columns import Question, read_question
from qurl.tasks.task import Prompts, text_of
from qurl.types import Problem

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".parquet")

_TEMPLATE_ROOM = 512
"""More tokens than any chat template adds to a question."""


@dataclass(frozen=True)
class Row:
    """A checked row."""

    id: str
    where: str
    """File and row, for errors."""
    question: Question
    columns: Mapping[str, Any]


class FileTask:
    """The problems of one file. All rows are checked now and tokenised when asked for.

    Prompts that could exceed the limit are tokenised now too, so that a long one is found before
    the run starts.
    """

    def __init__(
        self, path: str | Path, name: str, reward: str, path_key: str, prompts: Prompts
    ) -> None:
        """`path_key` is the setting that names the file, for errors."""
        self.name = name
        self.reward = reward
        self._prompts = prompts
        needs_answer = not is_users_own(reward)
        rows = read_rows(Path(path), needs_answer=needs_answer, path_key=path_key)
        kept = [row for row in rows if row.question.answers] if needs_answer else rows
        self._rows = [r for r in kept if self._fits(r)] if prompts.skip_long else kept
        self.notes = tuple(_notes(path, rows, kept, self._rows, prompts.limit))
        if not self._rows:
            raise DataError(f"no row of {path} is left: {'; '.join(self.notes) or 'it is empty'}")
        for row in filter(self._may_be_long, self._rows):
            self._problem(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Problem:
        return self._problem(self._rows[index])

    def _problem(self, row: Row) -> Problem:
        text, ids = self._encode(row)
        if len(ids) > self._prompts.max_tokens:
            raise DataError(
                f"{row.where}: the prompt has {len(ids)} tokens, more than {self._prompts.limit}; "
                "change that, or set task.skip_long_prompts"
            )
        answer, *others = row.question.answers or ("",)
        extra = {**row.columns, "prompt": text}
        if others:
            extra["accepted_answers"] = others
        return Problem(id=row.id, prompt_ids=ids, answer=answer, extra=extra)

    def _encode(self, row: Row) -> tuple[str, tuple[int, ...]]:
        return self._prompts.encode(row.question.content, row.question.instruction)

    def _fits(self, row: Row) -> bool:
        return not self._may_be_long(row) or len(self._encode(row)[1]) <= self._prompts.max_tokens

    def _may_be_long(self, row: Row) -> bool:
        """A token has at least one byte, so that most prompts are short without tokenising them."""
        content = self._prompts.instruct(row.question.content, row.question.instruction)
        return len(text_of(content, "").encode()) + _TEMPLATE_ROOM > self._prompts.max_tokens


def _notes(
    path: str | Path, rows: list[Row], answerable: list[Row], kept: list[Row], limit: str
) -> Iterator[str]:
    """Which rows were left out and why, and whether the file has answers at all."""
    blank = [row for row in rows if not row.question.answers]
    if len(answerable) < len(rows):
        yield (
            f"{len(blank)} of {len(rows)} rows of {path} are left out because their answer is "
            f"empty; the first is {blank[0].where}"
        )
    if num_long := len(answerable) - len(kept):
        yield (
            f"{num_long} of {len(rows)} rows of {path} are left out because their prompt has more "
            f"tokens than {limit}"
        )
    if len(blank) == len(rows):
        yield (
            f"no row of {path} has an answer (columns: {', '.join(rows[0].columns)}): the reward "
            "gets '' as the truth"
        )


def read_rows(path: Path, *, needs_answer: bool, path_key: str) -> list[Row]:
    """Every row of a file, checked. An id that repeats gets its row number too."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else f"does not exist (seen from {Path.cwd()})"
        raise DataError(
            f"data file {path} {what}; nothing is downloaded: set {path_key} to a file that is "
            "there"
        )
    stem, unit = path.name.split(".")[0], "line" if ".jsonl" in path.suffixes else "row"
    rows: list[Row] = []
    seen: set[str] = set()
    for number, columns in _read_columns(path):
        where = f"{path} {unit} {number}"
        if not isinstance(columns, Mapping):
            raise DataError(f"{where}: is a {type(columns).__name__}, not an object with columns")
        question = read_question(columns, where, needs_answer=needs_answer)
        own_id = question.own_id or f"{stem}-{number}"
        id = f"{own_id}#{number}" if own_id in seen else own_id
        seen.add(id)
        rows.append(Row(id, where, question, columns))
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _read_columns(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, columns) of each row."""
    if path.suffix == ".parquet":
        return enumerate(_read_parquet(path), start=1)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _read_json_lines(path)
    if path.suffix == ".json":
        return enumerate(_read_json_list(path), start=1)
    raise DataError(f"{path}: the format is not one of {', '.join(FORMATS)}")


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    number, opener = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {number}: is not valid JSON: {error}") from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path} cannot be read after line {number}: {error}") from error


def _read_json_list(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold a list of objects, not a {type(rows).__name__}")
    return rows


def _read_parquet(path: Path) -> list[Any]:
    pyarrow = import_extra("pyarrow", "pyarrow", "data", f"reading {path}")
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
