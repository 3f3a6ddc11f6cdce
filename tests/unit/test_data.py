"""Several files with shares, several held-out sets, and a reward for each row."""

import json
from collections import Counter

import pytest
from models import tiny_policy

from qurl.config import build_config, load_config
from qurl.errors import DataError, RewardError
from qurl.rewards import GradingPools
from qurl.rewards.pool import wait_for
from qurl.run.assembly import build_pool
from qurl.run.directory import read_jsonl
from qurl.run.splits import held_out_problems, load_split
from qurl.sampling import ProblemStream, mix
from qurl.tasks import load_task
from qurl.train import train


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions(num, **columns):
    return [{"prompt": f"{i}+0=", "answer": str(i), **columns} for i in range(num)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", questions(5))
    write(tmp_path / "b.jsonl", questions(40))
    return tmp_path


MIXED = {"name": "file", "mix": {"a.jsonl": 3, "b.jsonl": 1}}


# Shares


def test_every_batch_has_its_shares():
    """Shares 3 to 1 of 5 and 40 problems: 12 of 16, though the second part has more."""
    select = mix([5, 40], [3, 1])
    for step in range(50):
        indices = select(16, 45, 16 * step, {}, 0)
        assert sum(index < 5 for index in indices) in (11, 12, 13)
    everything = select(1600, 45, 0, {}, 0)
    assert abs(sum(index < 5 for index in everything) - 1200) <= 2


def test_each_part_is_used_up_before_it_comes_again():
    indices = mix([5, 40], [3, 1])(160, 45, 0, {}, 7)
    small = [index for index in indices if index < 5]
    large = [index for index in indices if index >= 5]
    assert all(sorted(small[i : i + 5]) == [0, 1, 2, 3, 4] for i in range(0, len(small) - 4, 5))
    assert len(set(large)) == len(large) >= 38
    assert [small[i : i + 5] for i in (0, 5)] != [small[:5]] * 2, "in a new order each time"


def test_the_choice_depends_on_the_position_alone():
    select = mix([5, 40, 3], [3, 1, 0.5])
    parts = [index for start in range(0, 60, 6) for index in select(6, 48, start, {}, 1)]
    assert parts == select(60, 48, 0, {}, 1)
    assert parts != select(60, 48, 0, {}, 2)


def test_a_mix_is_one_task_whose_problems_differ_by_id(folder):
    task = load_split(build_config({"task": MIXED}), "train")
    assert len(task) == 45
    assert [task[i].id for i in (0, 5, -1)] == ["a.jsonl/a-1", "b.jsonl/b-1", "b.jsonl/b-40"]
    stream = ProblemStream(task, seed=0)
    problems = stream.take(64)
    assert Counter(p.extra["qurl_set"] for p in problems)["a.jsonl"] in (47, 48, 49)
    assert len({p.id for p in problems}) == 64
    resumed = ProblemStream(task, seed=0)
    resumed.load_state_dict({"position": 32})
    assert [p.id for p in resumed.take(32)] == [p.id for p in problems[32:]]


def test_a_missing_file_of_a_mix_is_named(folder):
    config = build_config({"task": {"name": "file", "mix": {"a.jsonl": 1, "c.jsonl": 1}}})
    with pytest.raises(DataError, match=r"c\.jsonl does not exist .*; set task\.mix to a file"):
        load_split(config, "train")


def test_so_many_problems_of_each_held_out_set(folder):
    sets = {"small": "a.jsonl", "large": "b.jsonl"}
    tree = {"task": {"name": "file", "eval_sets": sets}, "eval": {"problems": 7}}
    config = build_config(tree)
    problems = held_out_problems(config, load_split(config, "eval"))
    assert Counter(p.extra["qurl_set"] for p in problems) == {"small": 5, "large": 7}
    assert problems[5].id == "large/b-1"


# Rewards of rows


def test_a_row_names_its_reward(folder):
    rows = [
        {"question": "a?", "answer": "1/2"},
        {"question": "b?", "answer": "yes", "reward": "exact"},
        {"question": "c?", "reward": "poem"},
        {"question": "d?", "answer": "x", "data_source": "my/strings"},
        {"question": "e?", "answer": "2", "data_source": "other"},
        {"question": "f?", "answer": "2", "reward": 0.5},
    ]
    write(folder / "rows.jsonl", rows)
    (folder / "poems.py").write_text("def judge(text, answer, extra): return len(text) / 10\n")
    named = {"poem": "poems:judge", "my/strings": "exact"}
    config = build_config({"task": {"name": "file", "path": "rows.jsonl", "rewards": named}})
    task = load_split(config, "train")
    assert task.rewards == {"math", "exact", "poems:judge"}
    texts = ["0.5", "yes", "abcde", "0.5", "\\boxed{2}", "2"]
    items = [(text, p.answer, p.extra) for text, p in zip(texts, task, strict=True)]
    with build_pool(config, task.reward, task) as pool:
        assert isinstance(pool, GradingPools)
        grades = [wait_for(pool.submit([text], *rest))[0] for text, *rest in items]
        assert [grade.score for grade in grades] == [1, 1, 0.5, 0, 1, 1]


def test_a_data_file_does_not_choose_code(folder):
    write(folder / "rows.jsonl", [{"question": "a?", "answer": "1", "reward": "os:system"}])
    with pytest.raises(DataError, match=r"line 1: 'reward' is 'os:system', not one of math, exac"):
        load_task("rows.jsonl")


def test_a_rows_reward_that_cannot_be_loaded_is_an_error_at_once(folder):
    (folder / "broken.py").write_text("raise ImportError('no such luck')\n")
    with pytest.raises(RewardError, match="no such luck"):
        GradingPools("exact", ["broken:judge"], workers=1)


def test_a_run_with_all_of_it(folder):
    tiny_policy().save(folder / "llama")
    write(folder / "held.jsonl", questions(3, reward="countdown", numbers=[1], target=1))
    tree = """
        steps = 2
        run_dir = "run"
        [model]
        path = "llama"
        [task]
        name = "file"
        reward = "exact"
        [task.mix]
        "a.jsonl" = 1
        "b.jsonl" = 1
        [task.eval_sets]
        first = "a.jsonl"
        second = "held.jsonl"
        [batch]
        problems = 4
        minibatches = 1
        [sampling]
        max_tokens = 3
        group_size = 2
        [algo]
        kl_coef = 0.0
        [eval]
        every = 2
        problems = 3
        precision = "full"
    """
    (folder / "recipe.toml").write_text(tree)
    train(load_config("recipe.toml"))
    rows = read_jsonl("run/metrics.jsonl")
    assert [row["step"] for row in rows] == [-1, 0, 1]
    assert {"eval/full/accuracy", "eval/full/first/accuracy", "eval/full/second/accuracy"} <= set(
        rows[0]
    )
    train(load_config("run", ["--steps", "3"]))
    assert read_jsonl("run/events.jsonl")[-1]["message"] == "saved step-000003"
