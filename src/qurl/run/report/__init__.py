"""The page of a run: whether it is healthy, where its time goes, what its tokens are.

reader.py reads run directories, verdict.py and compare.py judge them, charts.py and samples.py
choose what is shown, page.py puts it into one HTML file with the scripts in assets/. `qurl report`
writes that file, and `qurl watch` serves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qurl.run.directory import replacing
from qurl.run.report.compare import compare
from qurl.run.report.page import render_page
from qurl.run.report.reader import RunReader
from qurl.run.report.samples import printable


def write_report(*run_dirs: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of one run, or of several side by side; runs may still be going on.

    One file that needs no network: RUN/report.html, or comparison.html here for several runs.
    """
    runs = open_runs(run_dirs)
    updates = [run.read() for run in runs]
    default = Path("comparison.html") if len(runs) > 1 else runs[0].path / "report.html"
    path = Path(out) if out else default
    data = {"live": False, "runs": updates, "comparison": compare(runs)}
    page, _ = render_page(page_title(runs), data)
    with replacing(path) as file:
        file.write(page.encode())
    return path


def open_runs(run_dirs: Sequence[str | Path]) -> list[RunReader]:
    """Readers with different names: paths where the folders' names are the same."""
    runs = [RunReader(Path(path).expanduser()) for path in run_dirs]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = printable(str(run.path))
    return runs


def page_title(runs: Sequence[RunReader]) -> str:
    return f"{' · '.join(run.name for run in runs)} · QuRL"
