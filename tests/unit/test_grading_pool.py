"""Graders that hang, crash, print or lie: none of it is silent, and nothing hangs."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qurl.errors import RewardError
from qurl.rewards import Grade, Grading, GradingPool, reward_metrics
from qurl.rewards.reward import read_grade
from qurl.types import Completion, Problem, Rollout

GRADERS = '''
import asyncio, os, subprocess, sys, time

def length(text, answer, extra):
    return {"score": len(text) - extra.get("minus", 0), "is_short": len(text) < 3}

def odd(text, answer, extra):
    """Does what the text says."""
    if text == "hang":
        while True:
            pass
    if text == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open("child", "w").write(str(child.pid))
        time.sleep(60)
    if text == "raise":
        raise KeyError("the grader is broken")
    if text == "die":
        os._exit(3)
    if text == "exit":
        sys.exit("bye")
    if text == "print":
        print("noise on stdout")
        os.write(1, b"more noise\\n")
        subprocess.run(["echo", "even more"])
        try:
            input()
        except EOFError:
            pass
    if text == "nan":
        return float("nan")
    if text == "none":
        return None
    if text == "torch":
        return float("torch" in sys.modules)
    return 1.0 if text == answer else -2.5

def shaped(text, answer, extra):
    right = odd(text, answer, extra) == 1.0
    return {"score": 2.0 * right - 1.0, "accuracy": float(right)}

def pid(text, answer, extra):
    return os.getpid()

def rank(texts, answer, extra):
    if "hang" in texts:
        time.sleep(60)
    return [sorted(texts).index(text) for text in texts if text != "few"]

async def judge(text, answer, extra):
    if text == "raise":
        raise KeyError("the judge is broken")
    if text == "block":
        time.sleep(60)
    if text == "die":
        await asyncio.sleep(0.05)
        os._exit(3)
    await asyncio.sleep(float(text))
    return float(text)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graders")
    (folder / "my_graders.py").write_text(GRADERS)
    return folder


@pytest.fixture(scope="module")
def pool(folder):
    """A pool of two, whose graders stand in the working directory."""
    with contextlib.chdir(folder):
        pool = GradingPool("my_graders:odd", workers=2, timeout=1.0)
    with pool:
        yield pool


def items(*texts):
    return [(text, "right", {}) for text in texts]


def test_grades_come_in_order(pool):
    grades = pool.grade(items(*["right", "wrong"] * 20))
    assert grades == [Grade(1.0), Grade(-2.5)] * 20
    assert pool.grade([]) == []


def test_a_hanging_grader_is_killed_at_the_deadline(pool):
    start = time.monotonic()
    grades = pool.grade(items("right", "hang", "right", "right"))
    assert 1.0 <= time.monotonic() - start < 5.0
    assert grades == [Grade(1.0), Grade(0.0, timed_out=True), Grade(1.0), Grade(1.0)]


def test_what_a_killed_grader_started_dies_with_it(pool, folder):
    assert pool.grade(items("spawn"))[0].timed_out
    child = int((folder / "child").read_text())
    for _ in range(50):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the child of the grader is alive")


@pytest.mark.parametrize(
    ("text", "message", "evidence"),
    [
        ("raise", "KeyError: 'the grader is broken'", "in odd"),
        ("exit", "SystemExit: bye", "in odd"),
        ("die", "died, exit status 3", ""),
        ("nan", "score = nan; it must be a finite number", "read_grade"),
        ("none", "score = None; it must be a finite number", "read_grade"),
    ],
)
def test_a_broken_grader_is_an_error_with_the_evidence(pool, text, message, evidence):
    with pytest.raises(RewardError, match=message) as caught:
        pool.grade(items("right", text, "hang"))
    error = vars(caught.value)
    assert (error["text"], error["answer"]) == (text, "right")
    assert evidence in error["traceback"]
    assert repr(text) in str(caught.value)
    assert pool.grade(items("right", "wrong")) == [Grade(1.0), Grade(-2.5)]


def test_printing_does_not_disturb(pool):
    assert pool.grade(items("print", "right")) == [Grade(-2.5), Grade(1.0)]


def test_texts_of_any_size_and_script_cross_the_pipe(pool):
    texts = ["x" * 1_000_000, "日本\n\u2028 \ud800 \x00", ""]
    grades = pool.grade([(t, t, {"big": t, "path": Path("x")}) for t in texts])
    assert grades == [Grade(1.0)] * 3


def test_the_worker_does_not_import_torch(pool):
    assert pool.grade(items("torch")) == [Grade(0.0)]


def test_the_built_in_graders_are_light():
    code = (
        "import sys, qurl.rewards.worker, qurl.rewards.math\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_timeouts_are_counted(pool):
    completions = [Completion([1], [0.0], text, "stop") for text in ("right", "hang")]
    rollout = Rollout(Problem("p", (), "right"), completions, version=0, temperature=1.0)
    [graded] = Grading(pool, [rollout]).rewards(overlong_cache=0, max_tokens=5)
    assert list(graded.rewards) == [1.0, 0.0]
    assert reward_metrics([graded])["reward/timeouts"] == 1.0


def test_a_timeout_may_be_worth_what_a_wrong_answer_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with GradingPool("my_graders:odd", workers=1, timeout=0.3, timeout_score=-2.5) as pool:
        wrong, hung = pool.grade(items("wrong", "hang"))
    assert (hung.score, hung.accuracy, hung.timed_out) == (wrong.score, wrong.accuracy, True)


def test_a_killed_answer_is_wrong_if_the_reward_gives_an_accuracy_of_its_own(folder, monkeypatch):
    """Also in a group whose answers were all killed; its score is what the recipe says."""
    monkeypatch.chdir(folder)
    rollouts = [
        Rollout(Problem("p", (), "1"), [Completion([1], [0.0], t, "stop") for t in texts], 0, 1.0)
        for texts in (("1", "0", "hang"), ("hang",))
    ]
    with GradingPool("my_graders:shaped", timeout=0.3, timeout_score=-1.0) as pool:
        graded = Grading(pool, rollouts).rewards(overlong_cache=0, max_tokens=5)
    assert [g.accuracies for g in graded] == [[1.0, 0.0, 0.0], [0.0]]
    assert [list(g.rewards) for g in graded] == [[1.0, -1.0, -1.0], [-1.0]]
    assert reward_metrics(graded)["reward/timeouts"] == 2.0


@pytest.mark.parametrize("name", ["mean", "timed_out", "overlong"])
def test_details_have_names_of_their_own(name):
    with pytest.raises(RewardError, match=f"{name} would be logged under a name"):
        read_grade({"score": 1.0, name: 2.0})


def test_a_mapping_gives_details(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with GradingPool("my_graders:length", workers=1) as pool:
        grades = pool.grade([("ab", "", {}), ("abcd", "", {"minus": 1})])
        rollout = Rollout(
            Problem("p", (), extra={"minus": 5}), [Completion([1], [0.0], "ab", "stop")], 0, 1.0
        )
        [graded] = Grading(pool, [rollout]).rewards(overlong_cache=2, max_tokens=2)
    assert grades == [Grade(2.0, {"is_short": 1.0}), Grade(3.0, {"is_short": 0.0})]
    assert graded.details == [{"accuracy": -3.0, "timed_out": 0.0, "is_short": 1.0}]
    assert list(graded.rewards) == [-3.5]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:score", "there is no module 'no_such_module'"),
        ("my_graders:no_such", "my_graders has no 'no_such'; it has .*odd"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_an_error_at_once(folder, monkeypatch, spec, message):
    monkeypatch.chdir(folder)
    with pytest.raises(RewardError, match=message):
        GradingPool(spec, workers=1)


def test_cheap_graders_need_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with GradingPool("exact") as pool:
        assert pool.grade([("a", "a", {}), ("b", "a", {})]) == [Grade(1.0), Grade(0.0)]
    with GradingPool("countdown") as pool, pytest.raises(RewardError, match="numbers") as caught:
        pool.grade([("1+1", "", {})])
    assert vars(caught.value)["text"] == "1+1"


def rollout_of(*texts):
    completions = [Completion([1], [0.0], text, "stop") for text in texts]
    return Rollout(Problem("p", (), "right"), completions, version=0, temperature=1.0)


def test_async_rewards_wait_at_the_same_time(folder, monkeypatch):
    """Four calls of 0.6 s and one of a minute take 1 s, the deadline, in one process."""
    monkeypatch.chdir(folder)
    with GradingPool("my_graders:judge", workers=1, timeout=1.0) as pool:
        start = time.monotonic()
        [grades] = Grading(pool, [rollout_of("0.6", "0.6", "60", "0.6", "0.6")]).grades()
        assert time.monotonic() - start < 2.0
        assert [g.timed_out for g in grades] == [False, False, True, False, False]
        assert [g.score for g in grades] == [0.6, 0.6, 0.0, 0.6, 0.6]
        with pytest.raises(RewardError, match="KeyError: 'the judge is broken'") as caught:
            Grading(pool, [rollout_of("0", "raise")]).grades()
        assert vars(caught.value)["text"] == "raise"


@pytest.mark.parametrize(("text", "message"), [("block", ""), ("die", "died, exit status 3")])
def test_an_async_call_that_takes_its_process_down_takes_no_other_with_it(
    folder, monkeypatch, text, message
):
    monkeypatch.chdir(folder)
    with GradingPool("my_graders:judge", workers=1, timeout=0.5) as pool:
        grading = Grading(pool, [rollout_of("0.1", text, "0.2")])
        if message:
            with pytest.raises(RewardError, match=message) as caught:
                grading.grades()
            assert vars(caught.value)["text"] == text
        else:
            [grades] = grading.grades()
            assert grades == [Grade(0.1), Grade(0.0, timed_out=True), Grade(0.2)]


def test_a_reward_of_texts_sees_the_whole_group(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with GradingPool("my_graders:rank", workers=2, timeout=1.0) as pool:
        groups = Grading(pool, [rollout_of("a", "ccc", "bb"), rollout_of("a")]).grades()
        assert [[g.score for g in group] for group in groups] == [[0.0, 2.0, 1.0], [0.0]]
        [group] = Grading(pool, [rollout_of("hang", "a")]).grades()
        assert group == [Grade(0.0, timed_out=True)] * 2
        with pytest.raises(RewardError, match="one score for each") as caught:
            Grading(pool, [rollout_of("few", "a")]).grades()
    assert vars(caught.value)["text"] == "few\n\na"


def test_a_function_runs_in_a_process_if_that_can_import_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    from my_graders import odd, pid

    with GradingPool(pid, workers=1) as pool:
        assert pool.reward == "my_graders:pid"
        assert pool.grade(items(""))[0].score != os.getpid()
    with GradingPool(lambda text, answer, extra: os.getpid()) as pool:
        assert pool.grade(items(""))[0].score == os.getpid()
    with GradingPool(lambda text, answer, extra: odd(text, answer, extra)) as pool:
        with pytest.raises(RewardError, match="SystemExit: bye") as caught:
            pool.grade(items("right", "exit"))
        assert vars(caught.value)["text"] == "exit"
        assert "in odd" in vars(caught.value)["traceback"]


def test_an_async_function_without_a_name_runs_here():
    async def judge(text, answer, extra):
        await asyncio.sleep(0)
        return float(text == answer)

    with GradingPool(judge) as pool:
        assert pool.grade(items("right", "wrong")) == [Grade(1.0), Grade(0.0)]


def test_a_failed_grade_stops_the_next_submission(pool):
    def arriving():
        yield rollout_of("raise")
        for _ in range(200):
            yield rollout_of("right")
            time.sleep(0.01)

    with pytest.raises(RewardError, match="the grader is broken"):
        Grading(pool, arriving())


def test_closing_does_not_wait_for_what_is_queued(folder, monkeypatch):
    monkeypatch.chdir(folder)
    start = time.monotonic()
    with GradingPool("my_graders:odd", workers=1, timeout=30.0) as pool:
        futures = pool.submit(["hang"] * 5, "", {})
    assert time.monotonic() - start < 10.0
    assert all(future.done() for future in futures)


def test_closing_ends_the_processes_and_the_pool(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with GradingPool("my_graders:odd", workers=1) as pool:
        pass
    pool.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.grade(items("right"))


DESCRIPTORS = '''
import os

def write(text, answer, extra):
    """Writes into all descriptors from 3 on, or into low ones, as a careless program would."""
    found = map(int, os.listdir("/proc/self/fd")) if text == "all" else range(3, 100)
    for number in sorted(set(found) - {0, 1, 2}):
        try:
            os.write(number, extra["bytes"])
        except OSError:
            pass
    return 1.0
'''


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("junk", [b"hello " * 20, b"\0\0\0\xff", b"\xff" * 40, b"\0\0\0\x08" * 9])
def test_a_grader_that_writes_into_descriptors_it_did_not_open(tmp_path, monkeypatch, junk):
    """Low numbers are not ours; whoever finds our socket anyway gets an error, and no crash."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "descriptors.py").write_text(DESCRIPTORS)
    with GradingPool("descriptors:write", workers=1, timeout=5.0) as pool:
        [grade] = pool.grade([("low", "42", {"bytes": junk})])
        assert grade == Grade(1.0)
        with pytest.raises(RewardError, match="it wrote into a file descriptor that it did not"):
            pool.grade([("all", "42", {"bytes": junk})])
        [grade] = pool.grade([("low", "42", {"bytes": junk})])
        assert grade == Grade(1.0)


def test_a_reward_that_is_imported_for_long_gets_a_word(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qurl.rewards.pool._QUIET_SECONDS", 0.2)
    monkeypatch.setattr("qurl.rewards.pool._START_SECONDS", 1.0)
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(RewardError, match="it could not be imported in 120 s"):
        GradingPool("slow_import:score", workers=1)
    said = "reward 'slow_import:score' is still being imported; it is given up after 1 s"
    assert said in capfd.readouterr().err
