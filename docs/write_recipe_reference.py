"""Writes docs/recipe.md from the recipe's dataclasses and the docstring under each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from qurl.config import PRESETS, Config

TARGET = Path(__file__).with_name("recipe.md")
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

HEAD = """\
# Recipe reference

<!-- Written by docs/write_recipe_reference.py (`make docs`). Edit the docstrings in
     src/qurl/config/schema.py instead. -->

A recipe is a TOML file; `qurl recipes` lists examples. Every key is also a flag:
`qurl train RECIPE.toml --quant.format fp8 --algo.whiten`. `qurl train --help` prints the same list.

- **Order.** Flags override the recipe. The recipe overrides the preset of `algo.name`. The preset
  overrides the defaults below.
- **Unknown keys are refused.** QuRL reports all mistakes at once.
- **Your own parts.** If a key allows `module:name`, write the name of a Python module in the
  working directory or on Python's path, a colon, and a name in it ([extending](extending.md)).
- **Tables.** Some keys, such as `task.mix`, are TOML tables. As a flag, write pairs:
  `--task.mix a.jsonl 3 b.jsonl 1`.
- **none.** TOML has no null. Write `"none"` if a key below allows none.
- **Paths.** `~` is your home folder in every path.
- **Check first.** `qurl validate RECIPE.toml` finds everything that `qurl train` would refuse:
  keys, device, run directory, trackers, model, weights, memory, data, stops and grader. It prints
  the first prompt. [Troubleshooting](troubleshooting.md) explains the messages.
  `qurl train RECIPE.toml --dry-run` prints the resolved recipe and its memory.
- **Resuming.** QuRL saves the resolved recipe as `config.json` in the run directory. A run resumes
  only with the same recipe; `qurl.run.directory.CHANGEABLE` lists the keys that may differ.
"""

PRESETS_HEAD = """\
## Presets

`algo.name` sets the keys below; the default is `"grpo"`. You can override each of them in the
recipe or with a flag. `-` means that the preset keeps the default.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, render_presets()]
    parts += [render_section(path, section) for path, section in walk_sections()]
    return "\n".join(parts)


def walk_sections(section: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """("", top level), ("model", ...), ("model.scratch", ...), ..."""
    section = Config() if section is None else section
    yield path, section
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk_sections(value, f"{path}.{field.name}".lstrip("."))


def render_presets() -> str:
    keys = dict.fromkeys(
        f"{section}.{key}"
        for preset in PRESETS.values()
        for section, values in preset.items()
        for key in values
    )
    rows = [["key", *(f"`{name}`" for name in PRESETS)]]
    for path in keys:
        section, key = path.split(".")
        values = [preset.get(section, {}).get(key) for preset in PRESETS.values()]
        shown = ["-" if value is None else render_value(value) for value in values]
        rows.append([f"`{path}`", *shown])
    return f"{PRESETS_HEAD}\n{render_table(rows)}\n"


def render_section(path: str, section: Any) -> str:
    docs = field_docs(type(section))
    hints = get_type_hints(type(section), include_extras=True)
    rows = [["key", "values", "default", "meaning"]]
    for field in dataclasses.fields(section):
        default = getattr(section, field.name)
        if dataclasses.is_dataclass(default):
            continue
        key = f"{path}.{field.name}".lstrip(".")
        values = render_type(hints[field.name])
        rows.append([f"`{key}`", values, render_value(default), docs[field.name]])
    title = f"`[{path}]`" if path else "Top level"
    about = inspect.cleandoc(type(section).__doc__ or "")
    keys = f"\n{render_table(rows)}\n" if rows[1:] else ""
    return f"## {title}\n\n{about}\n{keys}"


def field_docs(section: type) -> dict[str, str]:
    """{field: the string below it} of a dataclass; Python itself keeps no such docstrings."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for above, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(above.target, ast.Name)
            docs[above.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def render_type(hint: Any) -> str:
    """`int ≥ 1`, `"a"`, `"b"`, `float or none`: what a reader of TOML needs to know."""
    origin, args = get_origin(hint), get_args(hint)
    if (
        origin is Annotated
        and get_origin(args[0]) is tuple
        and get_origin(get_args(args[0])[0]) is tuple
    ):
        return f"table of {render_type(get_args(get_args(args[0])[0])[1])}"
    if origin is Annotated:
        return f"{render_type(args[0])} {render_bounds(args[1])}".rstrip()
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else render_type(a) for a in args)
    if origin is dict:
        return f"table of {render_type(args[1])}"
    if origin is tuple:
        items = "list of " if args[-1] is Ellipsis else f"{len(args)} x "
        return items + render_type(args[0])
    return hint.__name__


def render_bounds(info: Any) -> str:
    """The bounds of a pydantic Field; other annotations have none."""
    found = [
        f"{sign} {getattr(bound, name):g}"
        for bound in getattr(info, "metadata", ())
        for name, sign in BOUNDS.items()
        if hasattr(bound, name)
    ]
    return " and ".join(found)


def render_value(value: Any) -> str:
    """A value in TOML."""
    if value is None:
        return '`"none"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value!r}`"


def render_table(rows: list[list[str]]) -> str:
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}", file=sys.stderr)
