"""What a check of this machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a verdict, what was found, and what to do about it."""

    verdict: Literal["ok", "note", "FAIL"]
    name: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return (
            f"{self.verdict:<4}  {self.name}: {'; '.join(filter(None, (self.found, self.advice)))}"
        )
