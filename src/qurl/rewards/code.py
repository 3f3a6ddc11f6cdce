"""Does a program pass its tests? 1.0 if it passes all of them, else 0.0.

A row has one of

    inputs, outputs        lists of texts: what a program reads and must print
    tests | test_list      Python statements such as "assert add(1, 2) == 3", a list or a text
    test and entry_point   a text that defines check(candidate), as in HumanEval

Outputs never enter the sandbox. Statements run in the program's own process: a program that sets
out to deceive them can, for instance with objects that equal everything.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from qurl.rewards.sandbox import Limits, Sandbox, Subprocess

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

_DRIVER = """
import json, os, sys

def main(run=exec, build=compile, write=os.write):  # as they are before the program runs
    work, report = json.loads(sys.stdin.read()), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)
    names = {"__name__": "__main__"}
    run(build(work["program"], "program.py", "exec"), names)
    for test in work["tests"]:
        run(build(test, "test.py", "exec"), names)
    write(report, work["token"].encode())

main()
"""


class CodeReward:
    """Grades programs in a sandbox."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox, self._limits = sandbox, limits

    def __call__(self, text: str, answer: str, extra: Mapping[str, Any]) -> float:
        program, limits = find_program(text), self._limits
        del answer  # It may be a solution, of many.
        pairs, statements = read_tests(extra)
        if program is None:
            return 0.0
        if seconds := extra.get("time_limit"):
            limits = Limits(float(seconds), limits.memory, limits.output, limits.processes)
        if statements:
            token = secrets.token_hex()
            work = {"program": program, "tests": statements, "token": token}
            return float(self._sandbox.run(_DRIVER, json.dumps(work), limits).output == token)
        for given, expected in pairs:
            ran = self._sandbox.run(program, given, limits)
            if ran.finish != "ok" or _words(ran.output) != _words(expected):
                return 0.0
        return 1.0


def make_reward(sandbox: Sandbox, limits: Limits | None = None) -> CodeReward:
    """The reward `code` with a sandbox of your own: `score = make_reward(MySandbox())`."""
    return CodeReward(sandbox, limits or Limits())


def load() -> CodeReward:
    """The reward with our sandbox, tried out."""
    sandbox = Subprocess()
    if not sandbox.has_spaces:
        warning = "WARNING: reward 'code': without namespaces, programs can reach the network"
        print(warning, file=sys.stderr)
    return make_reward(sandbox)


def find_program(text: str) -> str | None:
    """The last fenced block, or all of a text without fences; None if a fence is not closed."""
    blocks = _FENCED.findall(text)
    if blocks:
        return blocks[-1]
    return None if "```" in text else text


def read_tests(extra: Mapping[str, Any]) -> tuple[Sequence[tuple[str, str]], list[str]]:
    """(input, output) pairs, or statements; ValueError if a row has neither."""
    if "inputs" in extra:
        inputs, outputs = extra["inputs"], extra.get("outputs", ())
        function = extra.get("fn_name")
        if function or len(inputs) != len(outputs) or not inputs:
            raise ValueError(
                f"{len(inputs)} inputs and {len(outputs)} outputs, fn_name = {function!r}: as many "
                "outputs as inputs are needed, at least one, and tests of functions as 'tests'"
            )
        return [(str(i), str(o)) for i, o in zip(inputs, outputs, strict=True)], []
    if "test" in extra and "entry_point" in extra:
        return [], [extra["test"], f"check({extra['entry_point']})"]
    tests = extra.get("tests", extra.get("test_list"))
    tests = [tests] if isinstance(tests, str) else tests
    if not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(
            f"the row has no tests: {tests!r}; give 'tests', or 'inputs' and 'outputs'"
        )
    return [], [*filter(None, [extra.get("test_setup_code")]), *tests]


def _words(text: str) -> list[list[str]]:
    """Lines of words: spaces, and empty lines at the end, do not count."""
    return [line.split() for line in text.strip().splitlines()]
