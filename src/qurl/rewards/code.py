"""Does a program pass its tests (`qurl.programs`)? 1.0 if it passes all of them, else 0.0.

Outputs never enter the sandbox. Statements run in the program's own process: a program that sets
out to deceive them can, for instance with objects that equal everything.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from textwrap import dedent
from typing import Any

from qurl.programs import read_tests
from qurl.rewards.sandbox import Limits, Sandbox, Subprocess

ScoreFunction = Callable[[str, str, Mapping[str, Any]], float]

_FENCED = re.compile(r"```[^`\n]++```|```[ \t]*+([\w.+#-]*+)[^`\n]*+\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"py(thon)?[\d.]*", re.IGNORECASE)

_DRIVER = """
import json, os, sys

def main(run=exec, build=compile, write=os.write):  # as they are before the program runs
    work, report = json.loads(sys.stdin.read()), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)
    module = sys.modules["program"] = type(sys)("program")  # imported: its main block does not run
    names = module.__dict__
    run(build(work["program"], "program.py", "exec"), names)
    module.__name__ = "__main__"  # so that a main block of the tests does
    for test in work["tests"]:
        run(build(test, "test.py", "exec"), names)
    write(report, work["token"].encode())

main()
"""


def make_reward(sandbox: Sandbox, limits: Limits | None = None) -> ScoreFunction:
    """The reward `code` with a sandbox of your own: `score = make_reward(MySandbox())`."""
    usual = limits or Limits()

    def score_code(text: str, answer: str, extra: Mapping[str, Any]) -> float:
        del answer  # It may be a solution, of many.
        program = find_program(text)
        pairs, statements, seconds = read_tests(extra)
        if program is None:
            return 0.0
        allowed = usual if seconds is None else replace(usual, seconds=seconds)
        if statements:
            token = secrets.token_hex()
            work = {"program": program, "tests": statements, "token": token}
            return float(sandbox.run(_DRIVER, json.dumps(work), allowed).output == token)
        for given, expected in pairs:
            ran = sandbox.run(program, given, allowed)
            if ran.finish != "ok" or _words(ran.output) != _words(expected):
                return 0.0
        return 1.0

    return score_code


def load() -> ScoreFunction:
    """The reward with our sandbox, tried out."""
    sandbox = Subprocess()
    if not sandbox.has_spaces:
        warning = "WARNING: reward 'code': without namespaces, programs can reach the network"
        print(warning, file=sys.stderr)
    return make_reward(sandbox)


def find_program(text: str) -> str | None:
    """The last block fenced as Python, else the last without a language; all of a text without
    fences. None if there are only others, or one that is not closed."""
    blocks = _FENCED.findall(text)
    named = [block for label, block in blocks if _PYTHON.fullmatch(label)]
    programs = named or [block for label, block in blocks if block and not label]
    if not programs:
        return None if "```" in text else text
    program = programs[-1]
    return dedent(program) if program[:1].isspace() else program  # it may stand in a list


def _words(text: str) -> list[list[str]]:
    """Lines of words: spaces, and empty lines at the end, do not count."""
    return [line.split() for line in text.strip().splitlines()]
