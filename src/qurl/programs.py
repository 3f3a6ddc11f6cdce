"""The tests of a program, as a row of a data file holds them.

A row has one of

    inputs, outputs        lists of texts: what a program reads and must print
    tests | test_list      Python statements such as "assert add(1, 2) == 3", a list or a text
    test and entry_point   a text that defines check(candidate), as in HumanEval

and may have a `time_limit`, in seconds, and what MBPP runs before the statements: `test_imports`
and `test_setup_code`.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_UNUSED = (ast.Constant, ast.Compare, ast.BoolOp, ast.List, ast.Dict)  # values that nothing reads
_IDLE = (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass, *_UNUSED)
LONGEST = 600.0
"""Seconds that a row may give a program."""


class Tests(NamedTuple):
    """What a program must do: print the right output for each input, or pass all statements."""

    pairs: Sequence[tuple[str, str]]
    statements: Sequence[str]
    seconds: float | None
    """None: as long as any other program."""


def read_tests(row: Mapping[str, Any]) -> Tests:
    """The tests of a row; ValueError if they could never be passed."""
    seconds = row.get("time_limit")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= LONGEST):
        raise ValueError(
            f"time_limit = {str(seconds)[:40]} must be a number of seconds from 0 to {LONGEST:g}"
        )
    if row.get("inputs") is not None:
        return Tests(_read_pairs(row), (), seconds)
    statements = _read_statements(row)
    can_fail = [_can_fail(statement) for statement in statements]
    if not any(can_fail):
        raise ValueError(
            f"the tests {str(statements)[:200]} check nothing, so that every program passes; give "
            "statements such as 'assert add(1, 2) == 3'"
        )
    return Tests((), statements, seconds)


def _read_pairs(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    inputs, outputs, function = row["inputs"], row.get("outputs"), row.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("'inputs' and 'outputs' must be lists of texts")
    if function or len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"{len(inputs)} inputs and {len(outputs)} outputs, fn_name = {function!r}: as many "
            "outputs as inputs are needed, at least one, and tests of functions as 'tests'"
        )
    for value in (*inputs, *outputs):
        if not isinstance(value, str | int | float):
            raise ValueError(
                f"'inputs' or 'outputs' hold {str(value)[:80]}; each must be text, as the program "
                "reads or prints it"
            )
    return [(str(i), str(o)) for i, o in zip(inputs, outputs, strict=True)]


def _read_statements(row: Mapping[str, Any]) -> list[str]:
    name = row.get("entry_point")
    if row.get("test") is not None and name is not None:
        if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
            raise ValueError(f"entry_point = {name!r} must be the name of a function")
        tests: Any = [row["test"], f"check({name})"]
    else:
        tests = row.get("tests", row.get("test_list"))
        tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError(
            f"the row has no tests: {str(tests)[:200]}; give 'tests', or 'inputs' and 'outputs'"
        )
    imports = row.get("test_imports") or []
    imports = [imports] if isinstance(imports, str) else imports
    return [*imports, *filter(None, [row.get("test_setup_code")]), *tests]


def _can_fail(statement: str) -> bool:
    """Does it check or call anything? Raises for what no Python runs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(statement, "test.py")
            compile(tree, "test.py", "exec")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the test {str(statement)[:80]!r} is not Python: {reason}") from error
    parts = (part.value if isinstance(part, ast.Expr) else part for part in tree.body)
    return not all(isinstance(part, _IDLE) for part in parts)
