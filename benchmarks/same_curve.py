"""Are two runs the same, to the bit? The proof that a refactoring changed no number.

    python -m benchmarks.same_curve RUN RUN

Compares metrics (without times and memory), samples, evaluations and the weights of all common
checkpoints; prints what differs first and exits with 1 if anything does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from qurl.run.directory import read_jsonl

UNSTEADY = ("timing_s/", "perf/", "sync/seconds")
"""Metrics that differ from run to run."""


def differences(a: Path, b: Path) -> Iterator[str]:
    """One line for each thing that differs."""
    rows_a, rows_b = ({r["step"]: r for r in read_jsonl(run / "metrics.jsonl")} for run in (a, b))
    if rows_a.keys() != rows_b.keys():
        yield f"rows: {sorted(rows_a.keys() ^ rows_b.keys())} are in one run only"
    for step in sorted(rows_a.keys() & rows_b.keys()):
        row_a, row_b = rows_a[step], rows_b[step]
        for name in sorted(row_a.keys() | row_b.keys()):
            if not name.startswith(UNSTEADY) and row_a.get(name) != row_b.get(name):
                yield f"step {step}: {name} = {row_a.get(name)} and {row_b.get(name)}"
    for name in ("samples.jsonl", "evals.jsonl"):
        if (a / name).exists() and (a / name).read_bytes() != (b / name).read_bytes():
            yield f"{name} differs"
    yield from _weights(a / "checkpoints", b / "checkpoints")


def _weights(a: Path, b: Path) -> Iterator[str]:
    common = {p.name for p in a.glob("step-*")} & {p.name for p in b.glob("step-*")}
    if not common:
        yield "there is no checkpoint of the same step in both runs"
    for step in sorted(common):
        for path in sorted((a / step / "policy").glob("*.safetensors")):
            mine, theirs = load_file(path), load_file(b / step / "policy" / path.name)
            for name in sorted(mine.keys() | theirs.keys()):
                if (
                    name not in mine
                    or name not in theirs
                    or not torch.equal(mine[name], theirs[name])
                ):
                    yield f"{step}: {name} differs"


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    found = list(differences(Path(sys.argv[1]), Path(sys.argv[2])))
    for line in found[:10]:
        print(line)
    print(f"{len(found)} differences" if found else "the same curve, to the bit")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
