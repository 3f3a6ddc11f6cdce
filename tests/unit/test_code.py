"""Programs that loop, fork, flood, escape and look for the answer; and graders with limits."""

import contextlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
from models import tiny_policy

from qurl.config import build_config
from qurl.errors import DataError, RewardError
from qurl.rewards import GradingPool
from qurl.rewards.code import find_program, load, make_reward
from qurl.rewards.sandbox import Limits, Ran, Subprocess
from qurl.run.inputs import check_inputs
from qurl.tasks import load_task

ADD = "def add(a, b):\n    return a + b\n"
TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
ECHO = {"inputs": ["3 4", "10 -2"], "outputs": ["7", "8\n"]}


@pytest.fixture(scope="module")
def reward():
    return load()


@pytest.fixture(scope="module")
def sandbox():
    return Subprocess()


def fenced(program):
    return f"Let me think.\n```python\nwrong(\n```\nBetter:\n```python\n{program}\n```\nDone."


@pytest.fixture(scope="module", autouse=True)
def own_folder(tmp_path_factory):
    """Programs of other tests on this machine run elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("programs")))
        patch.setattr(tempfile, "tempdir", None)
        yield


def num_left():
    """Processes that still run a program of ours."""
    count, folder = 0, os.environ["TMPDIR"].encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += folder in path.read_bytes()
    return count


def none_left():
    for _ in range(100):
        if num_left() == 0:
            return True
        time.sleep(0.02)
    return False


# Right and wrong


def test_statements(reward):
    assert reward(fenced(ADD), "", TESTS) == 1.0
    assert reward(ADD, "", TESTS) == 1.0, "a text without fences is the program"
    assert reward(fenced(ADD.replace("+", "-")), "", TESTS) == 0.0
    assert reward(fenced("def add(a, b): return ("), "", TESTS) == 0.0
    assert reward("```python\n" + ADD, "", TESTS) == 0.0, "cut off"
    looped = "def check(a):\n    assert add(a, 1) == a + 1\n[check(a) for a in range(3)]"
    assert reward(ADD, "", {"tests": looped}) == 1.0
    setup = {"test_list": ["assert add(1, 2) == THREE"], "test_setup_code": "THREE = 3"}
    assert reward(ADD, "", setup) == 1.0
    mbpp = {"test_list": ["assert math.isclose(add(1, 2), 3)"], "test_imports": ["import math"]}
    assert reward(ADD, "", mbpp) == 1.0
    humaneval = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"}
    assert reward(ADD, "", {**humaneval, "entry_point": "add"}) == 1.0
    assert reward(ADD, "", {**humaneval, "entry_point": "sub"}) == 0.0


def test_inputs_and_outputs(reward):
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')\n"
    assert reward(fenced(program), "", ECHO) == 1.0
    assert reward(fenced(program.replace("+", "*")), "", ECHO) == 0.0
    assert reward(fenced(program + "raise SystemExit(3)"), "", ECHO) == 0.0


def test_rows_without_tests_are_errors(reward):
    for extra in ({}, {"tests": []}, {"inputs": ["1"], "outputs": []}, {**ECHO, "fn_name": "f"}):
        with pytest.raises(ValueError):
            reward(ADD, "", extra)


def test_find_program():
    assert find_program("```py\na\n```") == "a\n"
    assert find_program("```\na\n``` ```Python  \nb\n```") == "b\n"
    assert find_program("x = 1") == "x = 1"
    assert find_program("```c\nint x;\n```") is None
    start = time.monotonic()
    assert find_program("``` " + "a" * 60_000) is None
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "text",
    [
        f"```python3\n{ADD}```",
        f"``` python\n{ADD}```",
        f"```python\n{ADD}```".replace("\n", "\r\n"),
        f"```bash\npip install x\n```\nThen:\n```python\n{ADD}```\n",
        f"Call ```add``` as here:\n```python\n{ADD}```\n",
        f"```python\n{ADD}```\nIt prints\n```\n3\n```\n",
        "1. It is\n   ```python\n   def add(a, b):\n       return a + b\n   ```",
    ],
)
def test_right_programs_between_other_things(reward, text):
    assert reward(text, "", TESTS) == 1.0


@pytest.mark.parametrize("main", ["a = input()", "import sys; sys.exit(0)"])
def test_statements_do_not_run_the_main_block(reward, main):
    guarded = f"{ADD}\nif __name__ == '__main__':\n    {main}\n"
    assert reward(fenced(guarded), "", TESTS) == 1.0
    program = "if __name__ == '__main__':\n    print(sum(map(int, input().split())))"
    assert reward(fenced(program), "", ECHO) == 1.0
    own = {"tests": "if __name__ == '__main__':\n    assert add(1, 2) == 3"}
    assert [reward(fenced(p), "", own) for p in (guarded, ADD.replace("+", "-"))] == [1.0, 0.0]


# Programs that misbehave


def test_an_endless_loop_ends(reward):
    start = time.monotonic()
    assert reward("while True: pass", "", {**TESTS, "time_limit": 0.4}) == 0.0
    assert reward("import time; time.sleep(60)", "", {**ECHO, "time_limit": 0.4}) == 0.0
    assert time.monotonic() - start < 3.0
    assert none_left()


def test_a_fork_bomb_is_put_out(sandbox):
    if os.getuid() == 0 and not sandbox.cell:
        pytest.skip("the system does not count root's processes")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert sandbox.run(bomb, "", Limits(seconds=0.5)).finish == "timeout"
    assert none_left()
    escape = "import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(60)"
    sandbox.run(escape, "", Limits(seconds=2))
    if sandbox.has_spaces:
        assert none_left(), "a namespace ends with its first process"


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 1_000_000)",
        "with open('big', 'w') as file:\n    while True: file.write('x' * 1_000_000)",
        "import os\nwhile True: os.write(2, b'x' * 1_000_000)",
        "x = bytearray(1 << 33)",
        "x = []\nwhile True: x.append('x' * 1_000_000)",
    ],
)
def test_floods_are_cut(sandbox, program):
    ran = sandbox.run(program, "", Limits(seconds=1.0, memory=1 << 28, output=1 << 16))
    assert ran.finish != "ok"
    assert len(ran.output) <= 1 << 16


def test_paths_lead_nowhere(sandbox, tmp_path):
    """A program plays with its folder; nothing of ours is harmed, and nothing stays."""
    victim = tmp_path / "precious"
    victim.write_text("keep me")
    tmp_path.chmod(0o755)
    program = f"""
import os, shutil
os.makedirs("deep/closed"); open("deep/closed/file", "w").close()
os.symlink({str(tmp_path)!r}, "link"); os.symlink("/", "root")
os.chmod("deep/closed", 0)
for path in ("json.py", "sitecustomize.py", "random.py"):
    open(path, "w").write("raise SystemExit(0)")
open("odd \\n name", "w").close()
try:
    open("../program.py", "w").write("print(1)")
except OSError:
    pass
import json, random
print(os.getcwd())
"""
    ran = sandbox.run(program, "", Limits())
    assert ran.finish == "ok", "local files do not shadow modules"
    assert not Path(ran.output.strip()).parent.exists()
    assert victim.read_text() == "keep me"
    write = f"open({str(victim)!r}, 'w').write('gone')"
    if sandbox.cell and os.getuid() == 0:
        assert sandbox.run(write, "", Limits()).finish == "error"
        assert victim.read_text() == "keep me"


def test_the_answer_cannot_be_found_by_looking_around(reward):
    """Not in files, arguments, environment, input, globals, nor in the grader's memory maps."""
    program = """
import glob, os, sys
seen = [sys.stdin.read(), str(sys.argv), str(os.environ), str(vars(sys.modules["__main__"]))]
for path in [*glob.glob("../**", recursive=True), *glob.glob("/proc/[0-9]*/cmdline")]:
    try:
        seen.append(open(path).read())
    except (OSError, UnicodeDecodeError):
        pass
def secret():
    return 734 * 1000 + 621 if "734" "621" in str(seen) + str(globals()) else 0
"""
    assert reward(fenced(program), "", {"tests": ["assert secret() == 734621"]}) == 0.0
    echo = "import sys; print(734621 if '734621' in sys.stdin.read() else 0)"
    assert reward(fenced(echo), "", {"inputs": ["guess"], "outputs": ["734621"]}) == 0.0


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b): raise SystemExit",
        "print('ok'); print('passed')\ndef add(a, b): return 0",
        "import os, sys\ndef add(a, b): os._exit(0)",
        "import builtins; builtins.exec = lambda *a: None",
    ],
)
def test_leaving_early_is_not_passing(reward, trick):
    assert reward(fenced(trick), "", TESTS) == 0.0


def test_a_deceiver_gets_past_statements_but_not_past_outputs(reward):
    """What docs/tasks.md says: statements run in the program's own process."""
    liar = "class Same:\n    __eq__ = lambda *_: True\n    __repr__ = lambda *_: '7'\n"
    assert reward(fenced(liar + "def add(a, b): return Same()"), "", TESTS) == 1.0
    assert reward(fenced(liar + "print(Same())"), "", ECHO) == 0.0


def test_no_network(sandbox):
    if not sandbox.has_spaces:
        pytest.skip("there are no namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert sandbox.run(program, "", Limits()).finish == "error"
        assert Subprocess()._run((), program, "", Limits()).finish == "ok", "the server is there"


def test_the_weakest_cell_has_limits_too():
    plain = Subprocess()
    loop = plain._run((), "while True: pass", "", Limits(seconds=0.3))
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)', 'qurl-']"
    spawn = f"import subprocess, sys\nsubprocess.Popen({sleeper})"
    spawned = plain._run((), spawn, "", Limits(processes=1 << 16))
    large = plain._run((), "x = bytearray(1 << 33)", "", Limits())
    assert [ran.finish for ran in (loop, spawned, large)] == ["timeout", "ok", "error"]
    assert none_left()


def test_a_sandbox_of_ones_own():
    class Recorder:
        def run(self, program, stdin, limits):
            self.seen = (program, stdin, limits)
            return Ran("ok", "7")

    recorder = Recorder()
    score = make_reward(recorder, Limits(seconds=9))
    assert score("print(7)", "", {"inputs": ["3 4"], "outputs": ["7"]}) == 1.0
    assert recorder.seen == ("print(7)", "3 4", Limits(seconds=9))
    assert score("print(7)", "", TESTS) == 0.0, "7 is not the secret that says all tests passed"


# In the grading processes


def test_code_is_a_reward_of_the_pool():
    with GradingPool("code", workers=1, timeout=5) as pool:
        grades = pool.grade([(ADD, "", TESTS), ("def add(a, b): return 3", "", TESTS)])
        assert [grade.score for grade in grades] == [1.0, 0.0]
        with pytest.raises(RewardError, match="the row has no tests"):
            pool.grade([(ADD, "", {})])


def test_a_program_dies_with_its_grader():
    with GradingPool("code", workers=1, timeout=0.5) as pool:
        slow = {**TESTS, "time_limit": 50}
        assert pool.grade([("import time; time.sleep(60)", "", slow)])[0].timed_out
    assert none_left()


def test_a_grader_that_takes_too_much_memory_is_like_one_that_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "def score(text, answer, extra): return len(bytearray(int(text))) > 0\n"
    Path("greedy.py").write_text(source)
    with GradingPool("greedy:score", workers=1, memory=0.5) as pool:
        grades = pool.grade([("1000", "", {}), ("900000000", "", {}), ("1000", "", {})])
    assert [(g.score, g.timed_out) for g in grades] == [(1, False), (0, True), (1, False)]
    with GradingPool("greedy:score", workers=1, memory=None) as pool:
        assert pool.grade([("900000000", "", {})])[0].score == 1


# The task


def test_the_task_asks_for_a_program(tmp_path):
    path = tmp_path / "code.jsonl"
    rows = [{"question": "Add.", **TESTS, "solution": ADD}, {"prompt": "Echo.", **ECHO}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("code", path=path)
    assert task.reward == "code"
    assert task[0].extra["prompt"].endswith("between ```python and ```.")
    assert task[0].extra["tests"] == TESTS["tests"]
    assert task[0].answer == ADD.strip()
    assert task[1].extra["prompt"] == "Echo."
    path.write_text(
        json.dumps({"prompt": "Echo.", "reward_model": {"ground_truth": json.dumps(ECHO)}})
    )
    [problem] = load_task("code", path=path)
    assert (problem.answer, problem.extra["outputs"]) == ("", ECHO["outputs"]), "as verl has them"
    path.write_text(json.dumps({"question": "Add.", "ground_truth": "{1"}))
    with pytest.raises(DataError, match="line 1: the truth is not valid JSON"):
        load_task("code", path=path)
    path.write_text(json.dumps({"question": "Add.", "solution": ADD}))
    with pytest.raises(DataError, match="line 1: no tests for the reward 'code'; one of tests, te"):
        load_task("code", path=path)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"inputs": "12", "outputs": "34"}, "'inputs' and 'outputs' must be lists of texts"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [["1", "2"]], "outputs": ["3"]}, "hold ['1', '2']; each must be text"),
        ({"inputs": ["1"], "outputs": [None]}, "hold None; each must be text"),
        ({"tests": [1, 2]}, "the row has no tests: [1, 2]"),
        ({"tests": '["assert add(1, 2) == 3"]'}, "check nothing"),
        ({"tests": ["add(1, 2) == 3", "add(1, 1) == 2 and add(2, 2) == 4"]}, "check nothing"),
        ({"tests": "def check(candidate):\n    assert candidate(1, 2) == 3"}, "check nothing"),
        ({"tests": ["assert add(1"]}, "the test 'assert add(1' is not Python: SyntaxError"),
        ({"tests": ["assert '\0'"]}, "is not Python"),
        ({"test": {"a": 1}}, "the row has no tests"),
        ({"test": "def check(f): pass", "entry_point": 5}, "entry_point = 5 must be the name of a"),
        ({**TESTS, "time_limit": "2 s"}, "time_limit = 2 s must be a number of seconds from 0 to"),
        ({**TESTS, "time_limit": -3}, "time_limit = -3 must be"),
        ({**TESTS, "time_limit": float("inf")}, "time_limit = inf must be"),
        ({"answer": '{"a":' * 30_000}, "the truth is not valid JSON"),
        ({"answer": '{"tests": ["\\ud800"]}'}, "is not valid text (a lone surrogate)"),
        ({"answer": json.dumps({**TESTS, "qurl_reward": "math"})}, "'qurl_reward' is a name of Qu"),
    ],
)
def test_tests_that_no_program_could_pass_are_found_when_the_file_is_read(
    tmp_path, columns, reason
):
    path = tmp_path / "code.jsonl"
    rows = [{"question": "Add.", **TESTS}, {"question": "Add.", **columns}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        load_task("code", path=path)
    assert f"{path} line 2: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_row_has_its_own_time(sandbox):
    class Patient:
        seconds = None

        def run(self, program, stdin, limits):
            self.seconds = limits.seconds
            return Ran("ok", "7")

    patient = Patient()
    make_reward(patient)("x", "", {"inputs": [""], "outputs": ["7"], "time_limit": 9})
    assert patient.seconds == 9


def test_a_file_of_programs_is_an_input(tmp_path):
    """What is looked at before torch is imported agrees with the task."""
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps({"question": "Add.", **TESTS}))
    tiny_policy().save(tmp_path / "model")
    tree = {"model": {"path": str(tmp_path / "model")}, "task": {"name": "code", "path": str(path)}}
    check_inputs(build_config(tree))
    path.write_text(json.dumps({"question": "Add.", "tests": ["assert ("]}))
    with pytest.raises(DataError, match="is not Python"):
        check_inputs(build_config(tree))
