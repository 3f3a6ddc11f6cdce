"""Tasks from files: JSON lines (also gzipped), a JSON list, or parquet."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from qurl.errors import DataError, ModelError
from qurl.plugins import import_extra
from qurl.tasks import sources
from qurl.tasks.columns import (
    INSTRUCTIONS,
    Row,
    find_reward,
    needs_answer,
    read_numbers,
    read_row,
    with_tests,
)
from qurl.tasks.task import Prompts
from qurl.types import Problem

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".parquet")

_REPEATED = re.compile(r"@\d+$")
"""What `Problem.name` takes for an earlier problem that is asked again."""
_UNREADABLE = (OSError, EOFError, ValueError, OverflowError, NotImplementedError, MemoryError)
"""What gzip, json and pyarrow raise about files that are damaged, or hold what Python cannot."""
_TEMPLATE_ROOM = 512  # more tokens than any chat template adds to a question


class FileTask:
    """The problems of one file. All rows are checked now and tokenised when asked for.

    Prompts that could exceed the limit are tokenised now too, so that it is known before the run.
    """

    def __init__(
        self,
        path: str | Path,
        name: str,
        reward: str,
        path_key: str,
        prompts: Prompts,
        rewards: Mapping[str, str],
    ) -> None:
        """`path_key` is the setting that names the file, for errors; `rewards` are of rows."""
        self.name, self.reward, self._prompts = name, reward, prompts
        rows = read_rows(Path(path), reward, rewards, path_key=path_key)
        answerable = [row for row in rows if row.answers or not needs_answer(row.reward)]
        self._rows = [row for row in answerable if self._fits(row)]
        self.rewards = frozenset(row.reward for row in self._rows)
        self.notes = tuple(self._notes(path, rows, answerable))
        if not self._rows:
            raise DataError(f"no row of {path} is left: {'; '.join(self.notes) or 'it is empty'}")
        self.path = Path(path)

    @property
    def fingerprint(self) -> str:
        """Changes with the file's contents."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def questions(self) -> set[str]:
        """What is asked, to see whether two files ask the same."""
        return {"\n".join(m["content"].strip() for m in row.messages) for row in self._rows}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Problem:
        row = self._rows[index]
        text, ids = self._encode(row)
        answer, *others = row.answers or ("",)
        accepted = {"accepted_answers": others} if others else {}
        own = {"qurl_reward": row.reward} if row.reward != self.reward else {}
        return Problem(row.id, ids, answer, {**row.columns, "prompt": text, **accepted, **own})

    def _fits(self, row: Row) -> bool:
        # A token has at least one byte, so that most prompts are short without tokenising them.
        prompts, question = self._prompts, (row.messages, row.instruction)
        num_bytes = sum(len(m["content"].encode()) for m in prompts.instruct(*question))
        is_short = num_bytes + _TEMPLATE_ROOM <= prompts.max_tokens
        return is_short or prompts.admit(self._encode(row)[1], row.where)

    def _encode(self, row: Row) -> tuple[str, tuple[int, ...]]:
        try:
            return self._prompts.encode(row.messages, row.instruction)
        except ModelError as error:
            raise ModelError(f"{row.where}: {error}") from error

    def _notes(self, path: str | Path, rows: list[Row], answerable: list[Row]) -> Iterator[str]:
        """Which rows were left out and why, and whether the file has answers at all."""
        blank = [row for row in rows if not row.answers]
        out = f"of {len(rows)} rows of {path} are left out because their"
        if len(answerable) < len(rows):
            yield f"{len(blank)} {out} answer is empty; the first is {blank[0].where}"
        if num_long := len(answerable) - len(self._rows):
            yield f"{num_long} {out} prompt has more tokens than {self._prompts.limit}"
        if blank and len(blank) == len(rows) and self.rewards != {"code"}:
            yield (
                f"no row of {path} has an answer (columns: {', '.join(rows[0].columns)}): the "
                "reward gets '' as the truth"
            )


def read_rows(
    path: Path, reward: str, rewards: Mapping[str, str], *, path_key: str, first: int | None = None
) -> list[Row]:
    """The first rows of a file, or all, checked. An id that repeats gets its row number too."""
    check_file(path, path_key)
    stem, unit = path.name.split(".")[0], "line" if ".jsonl" in path.suffixes else "row"
    rows: dict[str, Row] = {}
    for number, columns in islice(read_columns(path), first):
        where = f"{path} {unit} {number}"
        own_reward = find_reward(columns, where, reward, rewards)
        row = read_row(columns, where, needs_answer=needs_answer(own_reward))
        if own_reward == "countdown":
            row = replace(row, columns=read_numbers(row.columns, where))
        if row.instruction:  # it asks for what the reward reads
            row = replace(row, instruction=INSTRUCTIONS.get(own_reward, row.instruction))
        id = row.id or f"{stem}-{number}"
        while id in rows or _REPEATED.search(id):
            id = f"{id}#{number}"
        row = with_tests(row) if own_reward == "code" else row
        rows[id] = replace(row, id=id, reward=own_reward)
    return list(rows.values())


def check_file(path: Path, path_key: str) -> None:
    """Raise DataError unless there is a file that can be read."""
    remedy = f"set {path_key} to a file that is there"
    if not os.path.isfile(path):
        what = f"does not exist (seen from {Path.cwd()})"
        if os.path.lexists(path):
            what = "is a folder" if os.path.isdir(path) else "is not a regular file"
        raise DataError(f"data file {path} {what}{sources.hint(path.name)}; {remedy}")
    if not os.access(path, os.R_OK):
        raise DataError(f"data file {path} cannot be read: no permission; {remedy}")
    if not path.name.endswith(FORMATS):
        hint = "; `datasets` and pandas can write a CSV file as JSON lines"
        is_table = path.suffix.lower() in (".csv", ".tsv")
        formats = ", ".join(FORMATS) + (hint if is_table else "")
        raise DataError(f"{path}: the format is not one of {formats}")


def read_columns(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, columns) of each row."""
    number, opener = 0, gzip.open if path.suffix == ".gz" else open
    try:
        if path.suffix == ".parquet":
            yield from enumerate(_read_parquet(path), start=1)
        elif path.suffix == ".json":
            rows = json.loads(path.read_bytes())
            if not isinstance(rows, list):
                raise ValueError(f"it must hold a list of objects, not a {type(rows).__name__}")
            yield from enumerate(rows, start=1)
        else:
            # Text is decoded many lines at a time: an error of its own would name another line.
            with opener(path, "rt", encoding="utf-8", errors="surrogateescape") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.isascii():
                        line.encode(errors="surrogateescape").decode()
                    # Files that begin with a BOM may have been joined.
                    if row := line.lstrip("\ufeff").strip():
                        yield number, json.loads(row)
    except (*_UNREADABLE, RecursionError, zlib.error) as error:
        where = f"{path} line {number}" if number else str(path)
        raise DataError(f"{where}: {_explain(error)}") from error


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import_extra("pyarrow", "pyarrow", "data", f"reading {path}")
    from pyarrow import parquet

    table = parquet.read_table(path)
    columns: dict[str, list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except _UNREADABLE as error:  # a date that Python does not have, say
            raise ValueError(
                f"the column {name!r} of type {column.type} ({error}); remove it or write it as "
                "text"
            ) from error
    for row in range(table.num_rows):
        yield {name: values[row] for name, values in columns.items()}


def _explain(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error}"
    what = f"cannot be read: {type(error).__name__}: {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"{what}; save the file as UTF-8"
    if "int_max_str_digits" in str(error):
        return f"{what.partition(';')[0]}; write such a number as text"
    return what
