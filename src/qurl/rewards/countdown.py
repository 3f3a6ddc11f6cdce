"""Does an expression reach the target with the numbers given?"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from qurl.answers import last_tagged

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ALLOWED = re.compile(r"[0-9+\-*/() ]{1,200}")
"""Only this reaches the parser; 200 characters cannot nest too deeply for it."""


def score_countdown(text: str, answer: str, extra: Mapping[str, Any]) -> float:
    """1.0 if an expression of `extra["numbers"]`, each used at most once, equals the target.

    The expression is the content of the last <answer> tag, or a whole text without one.
    """
    del answer  # It is one right expression of many.
    tagged = last_tagged(text)
    expression = text.strip() if tagged is None else tagged
    if not _ALLOWED.fullmatch(expression):
        return 0.0
    try:
        tree = ast.parse(expression, mode="eval").body
        used, value = _evaluate(tree)
    except (SyntaxError, ZeroDivisionError, ValueError):
        return 0.0
    given = Counter(int(number) for number in extra["numbers"])
    return float(used <= given and value == int(extra["target"]))


def _evaluate(node: ast.AST) -> tuple[Counter[int], Fraction]:
    """The numbers that an expression uses and its exact value."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Counter([node.value]), Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        used_left, left = _evaluate(node.left)
        used_right, right = _evaluate(node.right)
        return used_left + used_right, _OPERATIONS[type(node.op)](left, right)
    raise ValueError("only + - * / and whole numbers are allowed")
