"""Made-up answers: the reward must accept what the prompt asks for."""

import json

import pytest

from qurl.errors import ConfigError
from qurl.rewards import GradingPool
from qurl.run.rehearsal import compare_splits, rehearse
from qurl.tasks import load_task
from qurl.tasks.tokenizer import build_tokenizer


def file_task(path, rows, **options):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(path, tokenizer=build_tokenizer(), **options)


def rehearsal_of(task):
    with GradingPool(task.reward, workers=1) as pool:
        return rehearse(task, pool)


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_a_question_asks_for_what_its_reward_reads(tmp_path, reward):
    rows = [{"question": f"{i}+1?", "answer": f"{i + 1}"} for i in range(20)]
    found = rehearsal_of(file_task(tmp_path / "d.jsonl", rows, reward=reward))
    assert (found.truth, found.wrong, found.refused, found.num_tried) == (1, 0, (), 8)
    assert found.check(1.0) is None


def test_a_prompt_that_asks_for_another_format_than_the_reward_reads(tmp_path):
    rows = [{"prompt": "6*7? Put it in \\boxed{}.", "answer": "42"}]
    found = rehearsal_of(file_task(tmp_path / "d.jsonl", rows, reward="exact"))
    assert (found.truth, found.refused) == (0, ("d-1",))
    with pytest.raises(ConfigError, match="in the form that the prompt asks for, must earn more"):
        found.check(1.0)
    assert rehearsal_of(file_task(tmp_path / "d.jsonl", rows)).check(1.0) is None


def test_some_rows_that_cannot_be_answered_are_a_note(tmp_path):
    bare, boxed = {"prompt": "6*7?", "answer": "42"}, {"prompt": "\\boxed{}?", "answer": "1"}
    found = rehearsal_of(file_task(tmp_path / "d.jsonl", [bare, boxed], reward="exact"))
    assert found.check(1.0) == (
        "1 of 2 right answers that were tried earn no more than a wrong one; the first is that of "
        "problem d-2"
    )


@pytest.mark.parametrize("numbers", [["3", "7", "25"], [3.0, 7, "25"]])
def test_countdown_numbers_written_as_text_count(tmp_path, numbers):
    row = {"prompt": "3,7,25:46=", "numbers": numbers, "target": "46"}
    task = file_task(tmp_path / "d.jsonl", [row], reward="countdown")
    assert (task[0].extra["numbers"], task[0].extra["target"]) == ([3, 7, 25], 46)
    with GradingPool("countdown") as pool:
        right, wrong = pool.grade([(t, "46", task[0].extra) for t in ("25+7*3", "25+7+3")])
    assert (right.score, wrong.score) == (1, 0)
    assert str(rehearsal_of(task)) == "'countdown' runs; no right answer is known to try it with"


def test_evaluating_on_the_trained_questions_is_refused(tmp_path):
    rows = [{"prompt": f"{i}+1?", "answer": f"{i + 1}"} for i in range(4)]
    train = file_task(tmp_path / "a.jsonl", rows)
    same = file_task(tmp_path / "b.jsonl", rows[::-1])
    some = file_task(tmp_path / "c.jsonl", [*rows[:1], {"prompt": "9+9?", "answer": "18"}])
    other = file_task(tmp_path / "d.jsonl", [{"prompt": "9+9?", "answer": "18"}])
    with pytest.raises(ConfigError, match=r"ask the same questions as the training files"):
        compare_splits(train, same)
    assert compare_splits(train, some) == "1 of 2 held-out questions are in the training files too"
    assert compare_splits(train, other) is None
