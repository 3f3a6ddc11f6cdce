"""`qurl data`: the recipes' data files, from the Hugging Face hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qurl.errors import ConfigError, DataError, first_line
from qurl.tasks.columns import read_row
from qurl.tasks.files import read_columns
from qurl.tasks.sources import SOURCES, HubFile


def write_data(name: str, folder: Path) -> Iterator[str]:
    """Write the files of a data set that `folder` lacks; yields a line for each."""
    if name not in SOURCES:
        raise ConfigError(f"{name!r} is not one of the data sets {', '.join(SOURCES)}")
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder to write the data into")
    for file, source in SOURCES[name].items():
        path = folder / file
        if path.exists():
            yield f"{path} is there already; remove it to get it again"
            continue
        rows = list(_convert(_download(source, path), source))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{file}.partial")
        partial.write_text(lines, encoding="utf-8")
        os.replace(partial, path)
        yield f"{path}: {len(rows)} rows of {source.repo}"


def _download(source: HubFile, target: Path) -> list[Path]:
    """The files on this machine; they stay in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    options = {"repo_type": "dataset", "allow_patterns": [source.pattern]}
    try:
        folder = snapshot_download(source.repo, **options)
    except (OSError, EntryNotFoundError, HfHubHTTPError) as error:
        raise DataError(
            f"cannot get {source.pattern} of the data set {source.repo} from the hub: "
            f"{first_line(error)}. Without a network, write {target} yourself: JSON lines with "
            f"{' and '.join(repr(column) for column in source.columns)}"
        ) from error
    paths = sorted(Path(folder).glob(source.pattern))
    if not paths:
        raise DataError(f"the data set {source.repo} has no file {source.pattern} any more")
    return paths


def _convert(paths: list[Path], source: HubFile) -> Iterator[dict[str, Any]]:
    """The rows under our names of columns, each checked as training would."""
    for path in paths:
        for number, columns in read_columns(path):
            where = f"{source.repo}/{path.name} row {number}"
            if missing := [name for name in source.columns.values() if name not in columns]:
                found = ", ".join(map(str, columns))
                raise DataError(f"{where}: there is no column {missing[0]!r} (found: {found})")
            row = {ours: columns[theirs] for ours, theirs in source.columns.items()}
            read_row(row, where, needs_answer=True)
            yield row
