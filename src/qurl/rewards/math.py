"""Is a mathematical answer right? math-verify decides whether two expressions are equal.

Run this in a process that can be killed (`GradingPool`, `grade_math`): sympy may never return, and
math-verify's own time limits are off here because they use signals.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import math_verify
import sympy

from qurl.answers import bare, find_answer, is_sentence, is_words, last_tagged, normalise, to_latex

# It would warn that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_parse = functools.partial(math_verify.parse, parsing_timeout=0)


def score_math(text: str, answer: str, extra: Mapping[str, Any]) -> float:
    """1.0 if the answer in `text` equals `answer` or one of `extra["accepted_answers"]`.

    The answer is the last \\boxed{...}, else the line after ####, else what math-verify finds. An
    <answer> tag limits all this to its content, which is the answer itself if it is no sentence; an
    empty one hides no \\boxed{...} or ####. An answer that does not parse is wrong. A truth that
    does not parse is compared as text.
    """
    accepted = map(to_latex, (answer, *extra.get("accepted_answers", ())))
    truths = [find_answer(truth) or truth.strip() for truth in accepted]
    if not all(truths):
        raise ValueError(f"the truth is empty: {answer!r}")
    tagged = last_tagged(text)
    if tagged == "" and find_answer(text) is not None:
        tagged = None
    text = to_latex(text if tagged is None else tagged)
    found = find_answer(text)
    if found is None and tagged is not None and not is_sentence(text):
        found = text
    if found == "":
        return 0.0
    candidate = text.strip() if found is None else found
    if any(_same_text(candidate, truth) for truth in truths):
        return 1.0
    if found and is_words(normalise(found)):  # to math-verify, seat is a product and equals east
        truths = [truth for truth in truths if not is_words(normalise(truth))]
    if _is_any(text, found, truths):
        return 1.0
    # math-verify takes "18 eggs" for a product of letters. One side may have a unit that the other
    # lacks; 18 dollars are not 18 cents.
    plain = found and bare(found)
    plain_truths = [bare(t) for t in truths if (plain == found) != (bare(t) == t)]
    return float(_is_any(text, plain, plain_truths))


def warm_up() -> None:
    """Parse a few expressions: the first ones are slow, which must not count against an answer."""
    for expression in (r"\frac{1}{2}", "x=3", r"2\text{ m}", r"\sqrt{2}", "x>3"):
        for truth in ("2", "(3,5)"):
            _same_value(_parse(f"\\boxed{{{expression}}}"), truth)


def _same_text(candidate: str, truth: str) -> bool:
    a, b = normalise(candidate), normalise(truth)
    return a == b or (is_words(b) and a.casefold() == b.casefold())


def _is_any(text: str, found: str | None, truths: Sequence[str]) -> bool:
    parsed = _parse(text if found is None else f"\\boxed{{{found}}}")
    return any(_same_value(parsed, truth) for truth in truths)


def _same_value(parsed: list[Any], truth: str) -> bool:
    return math_verify.verify(
        _parse(f"\\boxed{{{truth}}}"),
        parsed,
        allow_set_relation_comp=all(map(_is_solved, parsed)),  # x > 3 is (3, oo)
        timeout_seconds=None,
    )


def _is_solved(value: Any) -> bool:
    """Has it no inequality like x^2 < 4, a copied question that math-verify would solve?"""
    relations = value.atoms(sympy.Rel) if isinstance(value, sympy.Basic) else ()
    return all(side.is_Symbol or side.is_number for rel in relations for side in rel.args)
