"""Types of values in a recipe, and what all sections have in common."""

from __future__ import annotations

from os.path import expanduser
from typing import Annotated, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

# Strict, or pydantic would take true for 1 and "no" for false.
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
NonNegative = Annotated[float, Field(ge=0, strict=True)]
Temperature = Annotated[float, Field(ge=1e-6, strict=True)]  # COLDEST of qurl.types
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]
# A larger one overflows in the update, and trains nothing.
Rate = Annotated[float, Field(gt=0, le=1000, strict=True)]
Share = Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]
FilePath = Annotated[str, AfterValidator(expanduser)]
T = TypeVar("T")
# TOML has no null, so "none" stands for it.
OrNone = Annotated[T | None, BeforeValidator(lambda value: None if value == "none" else value)]
# A table of names that a user chooses; kept as pairs, as flags and config.json give them.
Table = Annotated[
    tuple[tuple[str, T], ...],
    BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, dict) else value),
]


class Section:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
