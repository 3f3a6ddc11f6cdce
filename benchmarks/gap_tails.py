"""How often do sampler and trainer differ by more than the clip range?

    python -m benchmarks.gap_tails RUN...

Counts the tokens with |log pi_prox - log pi_behav| > log 1.2 in the samples that runs keep. With a
clip range of 0.2, `correction.mode = "auto"` compares this share with
`qurl.correction.LARGEST_TAIL`. Writes benchmarks/results/gap_tails.json.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmarks.scripts import RESULTS, write_result
from qurl.run.directory import read_jsonl

RESULT = RESULTS / "gap_tails.json"
LIMIT = math.log(1.2)
"""Of the default clip range."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    found = {f"{run.parent.name}/{run.name}": measure(run) for run in parser.parse_args().runs}
    write_result(RESULT, runs=found)
    for name, row in found.items():
        print(f"{name}: {row['tail']:.2g} of {row['tokens']} tokens")


def measure(run: Path) -> dict[str, float]:
    """Of the rows whose prox the trainer computed."""
    gaps = [
        abs(prox - behav)
        for row in read_jsonl(run / "samples.jsonl")
        if row["has_prox"]
        for prox, behav, mask in zip(row["logp_prox"], row["logp_behav"], row["mask"], strict=True)
        if mask
    ]
    if not gaps:
        raise SystemExit(f"{run}: no sample has a prox of the trainer")
    tail = sum(gap > LIMIT for gap in gaps) / len(gaps)
    return {"tokens": len(gaps), "tail": float(f"{tail:.3g}")}


if __name__ == "__main__":
    main()
