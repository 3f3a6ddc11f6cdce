"""Hooks of mkdocs: sections of README.md inside pages, and formulas that need no JavaScript."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
INCLUDE = re.compile(r"^<!-- README\.md: (.+) -->$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return include_readme(markdown)


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_as_mathml, content)


def include_readme(markdown: str) -> str:
    """Replace `<!-- README.md: Title -->` by that section of README.md, without its title."""
    return INCLUDE.sub(lambda match: readme_section(match[1]), markdown)


def readme_section(title: str) -> str:
    """The text below one title, up to the next, with links as seen from docs/."""
    found = re.search(
        rf"^#+ {re.escape(title)}\n(.*?)(?=^## |\Z)",
        README.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    if found is None:
        raise ValueError(f"README.md has no section {title!r}")
    return found[1].strip().replace("](docs/", "](")


def _as_mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert  # tests use the functions above without it

    tag, formula = match.groups()
    return convert(html.unescape(formula), display="block" if tag == "div" else "inline")
