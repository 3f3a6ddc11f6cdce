"""Lists of values as flags, and tables that grow as configurations are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qurl.errors import ConfigError


@dataclass(frozen=True)
class Column:
    """One figure of a row."""

    key: str
    title: str
    form: str = ""
    """Format specification; figures are aligned right, words left."""
    width: int = 0
    """The title's width at least."""

    def show(self, value: Any) -> str:
        text = "-" if value is None else format(value, self.form)
        return self._align(text, is_word=isinstance(value, str))

    def head(self) -> str:
        return self._align(self.title, is_word=not self.form)

    def _align(self, text: str, *, is_word: bool) -> str:
        width = max(self.width, len(self.title))
        return text.ljust(width) if is_word else text.rjust(width)


def head(columns: Sequence[Column]) -> str:
    return "  ".join(column.head() for column in columns).rstrip()


def row(columns: Sequence[Column], values: Mapping[str, Any]) -> str:
    """One line; a missing key or None is shown as a dash."""
    return "  ".join(column.show(values.get(column.key)) for column in columns).rstrip()


def split_list(flag: str, text: str, allowed: Sequence[str] | None = None) -> list[str]:
    """Values separated by commas, without duplicates."""
    values = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for value in values:
        if not value or (allowed is not None and value not in allowed):
            known = f"; there are {', '.join(allowed)}" if allowed else ""
            raise ConfigError(f"--{flag} {text!r}: {value!r} is not a value{known}")
    return values
