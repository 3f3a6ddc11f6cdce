"""Sampled completions as the page shows them: token by token, with what happened to each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qurl.errors import DataError
from qurl.objectives import OBJECTIVES

MAX_BYTES = 3_000_000
"""Most bytes of samples.jsonl that a page starts with; evenly spread lines are chosen."""
HEAD_TOKENS, TAIL_TOKENS = 1500, 500
"""Tokens kept of a longer completion, at either end."""

Mark = str
PLAIN, CLIPPED, RESCUED, TRUNCATED, LEFT_OUT = " ", "c", "r", "t", "x"


def choose_lines(path: Path) -> tuple[list[bytes], int, int]:
    """Complete lines of a file, evenly spread if they are too many; their number, and their end.

    The file can be larger than memory.
    """
    spans: list[tuple[int, int]] = []
    position = 0
    with path.open("rb") as file:
        while (line := file.readline()).endswith(b"\n"):
            spans.append((position, len(line)))
            position += len(line)
        total = len(spans)
        if position > MAX_BYTES and total > 2:
            count = max(2, int(total * MAX_BYTES / position))
            spans = [spans[round(i * (total - 1) / (count - 1))] for i in range(count)]
        lines = []
        for start, length in spans:
            file.seek(start)
            lines.append(file.read(length))
    return lines, total, position


def parse_sample(line: bytes, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One line of samples.jsonl as the page takes it; `config` is the flat recipe of its run."""
    try:
        record = json.loads(line)
        tokens = list(record.get("tokens") or [f"[{i}]" for i in record.get("token_ids", ())])
        behav = [logp for (logp,) in _columns(record, "logp_behav")]
        gaps = [p - b for b, p in _columns(record, "logp_behav", "logp_prox")]
        marks = mark_tokens(record, config)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{where} holds a line that is no sample: {error}") from error
    kept, num_left_out = _shorten(len(tokens))
    has_prox = record.get("has_prox", True) and config.get("correction.mode") != "bypass"

    def pick(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in kept] if len(values) == len(tokens) else []

    return {
        "step": record.get("step", 0),
        "problem": printable(str(record.get("problem", ""))),
        "prompt": printable(str(record.get("prompt", ""))),
        "answer": printable(str(record.get("answer", ""))),
        "completion": printable(str(record.get("completion", "")))[:4000] if not tokens else "",
        "reward": finite(record.get("reward")),
        "finish": str(record.get("finish", "")),
        "length": len(tokens),
        "left_out": num_left_out,
        "tokens": [printable(str(token)) for token in pick(tokens)],
        "gaps": [round(gap, 5) for gap in pick(gaps)] if has_prox else [],
        "behav": [round(logp, 4) for logp in pick(behav)],
        "marks": "".join(pick(marks)) if has_prox else "",
    }


def mark_tokens(record: Mapping[str, Any], config: Mapping[str, Any]) -> list[Mark]:
    """What the objective did to each token when its sequence was trained on for the last time.

    With R = pi / base, A the advantage and r = w / rho:

        left out    not trained: rejected, or no action
        clipped     A > 0 and R > upper, or A < 0 and R < 1 - el
        rescued     A > 0 and 1 + eh < R <= upper = (1 + eh) / r    (acr only)
        truncated   rho > C, so the weight is C
    """
    if "logp" not in record:  # as version 0.2 wrote them
        cap = config.get("algo.cap")
        pairs = _columns(record, "logp_behav", "logp_prox")
        return [TRUNCATED if cap is not None and p - b > math.log(cap) else PLAIN for b, p in pairs]
    facts = OBJECTIVES.get(str(config.get("algo.objective")))
    against = facts.against if facts else "prox"
    widest = config.get("experimental.acr_max_bound") or math.inf
    lower, plain = 1 - config["algo.clip_low"], 1 + config["algo.clip_high"]
    marks = []
    for logp, base, advantage, shrink, kept in _columns(
        record, "logp", f"logp_{against}", "advantages", "shrink", "mask"
    ):
        ratio, upper = math.exp(min(logp - base, 20.0)), plain
        if facts and facts.is_widened and shrink > 0:
            upper = max(plain, min(plain / shrink, widest))
        is_clipped = (advantage > 0 and ratio > upper) or (advantage < 0 and ratio < lower)
        if not kept:
            marks.append(LEFT_OUT)
        elif is_clipped:
            marks.append(CLIPPED)
        elif advantage > 0 and ratio > plain:
            marks.append(RESCUED)
        else:
            marks.append(TRUNCATED if shrink < 1 else PLAIN)
    return marks


def printable(text: str) -> str:
    """Text that cannot disturb a page: no control, no lone surrogate, no change of direction."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff]"
)


def _columns(record: Mapping[str, Any], *names: str) -> list[tuple[float, ...]]:
    """Numbers of each token. Log-probs that are not finite are impossible ones, other numbers 0."""
    columns = []
    for name in names:
        values = [float(value) for value in record.get(name, ())]
        instead = -50.0 if name.startswith("logp") else 0.0
        columns.append([value if math.isfinite(value) else instead for value in values])
    return list(zip(*columns, strict=True))


def _shorten(length: int) -> tuple[list[int], int]:
    """Positions that are kept, and how many are not."""
    if length <= HEAD_TOKENS + TAIL_TOKENS:
        return list(range(length)), 0
    kept = [*range(HEAD_TOKENS), *range(length - TAIL_TOKENS, length)]
    return kept, length - len(kept)


def finite(value: Any) -> float | int | None:
    """Six digits suffice for a page; a number that is not finite is a gap in it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 2**53 else None
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return None
