"""The documentation site holds together, as far as can be seen without mkdocs (`make site`)."""

import itertools
import re
import runpy
from pathlib import Path

import pytest
import yaml

from tests.docs.test_docs import PUBLIC, RECORDS, SOURCE, prose, resolve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
HOOKS = runpy.run_path(str(DOCS / "site_hooks.py"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)


def nav_files(entries):
    for entry in entries:
        for target in entry.values():
            yield from nav_files(target) if isinstance(target, list) else [target]


def text_of(page):
    """The page as mkdocs sees it: with sections of README.md and without code blocks."""
    return HOOKS["include_readme"](prose(page))


def anchors(page):
    """Ids of the headings, as Python-Markdown makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_every_page_is_in_the_navigation_once():
    assert sorted(nav_files(SITE["nav"])) == [str(page.relative_to(DOCS)) for page in PAGES]


@each_page
def test_links_stay_on_the_site(page):
    """A link to a file outside docs/ works on GitHub, but not on the site."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_file(), target
        assert path.is_relative_to(DOCS), f"{target} is not on the site"
        assert not anchor or anchor in anchors(path), target


def test_sections_of_the_readme_are_found():
    assert "make demo" in HOOKS["include_readme"]("<!-- README.md: QuRL -->")
    assert "](figures/report.png)" in text_of(DOCS / "index.md")
    with pytest.raises(ValueError, match="no section 'Nonsense'"):
        HOOKS["include_readme"]("<!-- README.md: Nonsense -->")


@each_page
def test_lists_and_tables_start_after_an_empty_line(page):
    """GitHub needs none; Python-Markdown would make them part of the paragraph above."""
    lines = text_of(page).splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"(- |\d+\. |\|)", line) and not re.match(r"\s*$|(- |\d+\. |\||  )", above):
            raise AssertionError(f"{page.name}: no empty line before {line!r}")


def test_api_page_has_the_public_names():
    named = set(re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    for name in named:
        resolve(name)
    methods = {name for name in PUBLIC if name.rpartition(".")[0] in named}
    assert PUBLIC.keys() | RECORDS.keys() <= named | methods


def test_troubleshooting_quotes_messages_that_exist():
    """What stands between the dots of a message is somewhere in the source, on one line or two."""
    source = re.sub(r'"\s*f?"', "", SOURCE)  # adjacent strings are one
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for message in rows:
        for part in re.split(r"\.\.\.", message):
            assert part.strip(" :()") in source, f"{part!r} of {message!r}"
