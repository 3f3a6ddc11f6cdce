"""Finding the answer in a text, and comparing two answers as strings."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_INVISIBLE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|[\s$~]+")


def find_answer(text: str) -> str | None:
    """The content of the last \\boxed{...}, else the line after the last ####, else None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() if mark else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces; None without one."""
    for match in reversed(list(_BOXED.finditer(text))):
        end = _closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in re.finditer(r"\\[{}]|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return start + brace.start()
    return None


def normalise(answer: str) -> str:
    """Remove what only changes the look of an answer: spaces, text wrappers, \\left, dfrac."""
    answer = _WRAPPERS.sub(r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = _INVISIBLE.sub("", answer)
    return answer.removesuffix(".")


def is_words(answer: str) -> bool:
    """Is a normalised answer a word such as "yes" or "Evelyn", in which case does not matter?"""
    return bool(re.fullmatch(r"[A-Za-z'-]{3,}|no", answer, re.IGNORECASE))
