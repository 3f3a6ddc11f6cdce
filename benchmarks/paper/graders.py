"""Do two graders agree? Ours, and the plainest one: is the last number the right one?

    python -m benchmarks.paper.graders COMPLETIONS.jsonl [OUT.json]

A line holds "completion" and "answer", as `baseline` and the samples.jsonl of a run write them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from benchmarks.paper.results import GRADERS
from qurl.answers import find_answer
from qurl.rewards.pool import GradingPool
from qurl.run.directory import read_jsonl

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_TAIL = 160
"""Last characters of a completion that are shown of a difference."""


def last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def is_last_number_right(completion: str, answer: str) -> bool:
    truth = last_number(find_answer(answer) or answer)
    return truth is not None and last_number(completion) == truth


def compare(rows: Sequence[Mapping[str, Any]], *, workers: int = 4) -> dict[str, Any]:
    """How often both, one or neither say right, and every case in which they differ."""
    with GradingPool("math", workers=workers) as pool:
        grades = pool.grade([(row["completion"], row["answer"], {}) for row in rows])
    ours = [grade.accuracy >= 1 for grade in grades]
    plain = [is_last_number_right(row["completion"], row["answer"]) for row in rows]
    differences = [
        {
            "ours": a,
            "last_number": b,
            "answer": find_answer(row["answer"]) or row["answer"],
            "completion": row["completion"][-_TAIL:],
        }
        for row, a, b in zip(rows, ours, plain, strict=True)
        if a != b
    ]
    return {
        "completions": len(rows),
        "ours_right": sum(ours),
        "last_number_right": sum(plain),
        "timeouts": sum(grade.timed_out for grade in grades),
        "differences": differences,
    }


def main(argv: Sequence[str]) -> None:
    source, out = Path(argv[0]), Path(argv[1]) if len(argv) > 1 else GRADERS
    result = compare(read_jsonl(source))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print({k: v for k, v in result.items() if k != "differences"}, len(result["differences"]))


if __name__ == "__main__":
    main(sys.argv[1:])
