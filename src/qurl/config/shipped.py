"""The recipes that come with QuRL: in an installed package, or at the root of a checkout."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from qurl.errors import ConfigError


def shipped_recipes() -> dict[str, Path]:
    """All recipes by name."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def find_recipe(path: str | Path) -> Path:
    """The file at `path`, else the shipped recipe of that name."""
    path, recipes = Path(path), shipped_recipes()
    if path.is_file() or str(path) not in recipes:
        return path
    return recipes[str(path)]


def get_recipe(name: str) -> Path:
    """The shipped recipe of that name, or an error that names similar ones."""
    recipes = shipped_recipes()
    if name not in recipes:
        raise ConfigError(f"there is no recipe named {name!r}; {suggest(name)}")
    return recipes[name]


def suggest(name: str) -> str:
    """What to type instead of a recipe that is not there."""
    similar = difflib.get_close_matches(Path(name).stem, shipped_recipes(), n=3)
    meant = f"did you mean {' or '.join(similar)}? " if similar else ""
    return f"{meant}`qurl recipes` lists those that come with QuRL"


def read_head(path: Path) -> Mapping[str, str]:
    """What the comment at the top of a recipe says: title, hardware, time, expect, data."""
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    title, _, rest = re.sub(r"^# ?", "", head, flags=re.MULTILINE).partition("\n\n")
    fields = re.findall(r"^([a-z]+)   +(.*(?:\n   +.*)*)", rest, re.MULTILINE)
    return {"title": _joined(title)} | {name: _joined(text) for name, text in fields}


def _joined(text: str) -> str:
    return " ".join(text.split())
