"""Training problems of MATH, levels 3 to 5, without those of the held-out set.

    python -m benchmarks.paper.math_data math_train.jsonl math500.jsonl math_train_345.jsonl

Rows have `problem`, `answer` and, in the first file, `level` as in the published data ("Level 3").
Two problems are the same if their letters and digits are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from qurl.run.directory import read_jsonl

LEVELS = ("Level 3", "Level 4", "Level 5")


def select(rows: Iterable[Mapping], held_out: Iterable[Mapping]) -> Iterator[dict[str, str]]:
    known = {letters(row["problem"]) for row in held_out}
    for row in rows:
        if row["level"] in LEVELS and letters(row["problem"]) not in known:
            yield {"problem": row["problem"], "answer": row["answer"]}


def letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("train", "test", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    kept = list(select(read_jsonl(args.train), read_jsonl(args.test)))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    print(f"{args.out}: {len(kept)} problems")


if __name__ == "__main__":
    main()
