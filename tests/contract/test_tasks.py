"""Every task keeps the same promises, whatever it is made from."""

import json
import random
import sys
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest

from qurl.errors import ConfigError, DataError, MissingExtra
from qurl.rewards import GradingPool
from qurl.tasks import load_task
from qurl.tasks.generated import split_of
from qurl.tasks.tokenizer import build_tokenizer

DATA = Path(__file__).parents[2].parent / "shared" / "data"
DATA_SETS = {
    "aime24": 30,
    "amc_validation": 83,
    "dapo_math_17k": 17255,
    "deepscaler_partial": 21824,
    "gsm8k_test": 1319,
    "gsm8k_train": 7473,
    "math500": 500,
    "math_test": 5000,
    "math_train": 7500,
    "minerva_math": 272,
    "olympiadbench_math_en": 675,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(params=["arithmetic", "countdown", "gym:basic_arithmetic", "rows.jsonl"])
def load(request, tmp_path):
    """Loads the task with further options."""
    name = request.param
    if name.startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    if name == "rows.jsonl":
        name = tmp_path / name
        rows = [{"question": f"What is {i}+1?", "answer": str(i + 1)} for i in range(60)]
        name.write_text("\n".join(json.dumps(r) for r in rows))
    return lambda **options: load_task(name, **options)


def test_a_task_is_a_sequence(load):
    task = load()
    assert len(task) > 50
    assert task[len(task) - 1].id != task[0].id
    with pytest.raises(IndexError):
        task[len(task)]
    assert [p.id for p in islice(task, 5)] == [task[i].id for i in range(5)]


def test_problems_are_the_same_each_time(load):
    first, second = load(seed=3), load(seed=3)
    for i in (0, 7, 40):
        assert first[i] == first[i] == second[i]
    ids = [first[i].id for i in range(50)]
    assert len(set(ids)) == 50


def test_without_a_tokenizer_there_is_all_but_the_ids(load):
    problem = load()[0]
    assert problem.prompt_ids == ()
    assert problem.answer
    assert problem.extra["prompt"]


def test_prompts_are_tokenised_as_plain_text_without_a_chat_template(load):
    tokenizer = build_tokenizer()
    problem = load(tokenizer=tokenizer)[1]
    assert tokenizer.decode(problem.prompt_ids) == problem.extra["prompt"]
    assert "[user]" not in problem.extra["prompt"]


def test_a_chat_template_renders_the_question(load):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    problem = load(tokenizer=tokenizer, instruction="Go.")[1]
    assert problem.extra["prompt"].startswith("[user]")
    assert problem.extra["prompt"].endswith("\nGo.[assistant]")
    assert tokenizer.decode(problem.prompt_ids) == problem.extra["prompt"]


def test_the_truth_is_worth_one_and_something_else_nothing(load):
    task = load()
    problems = [task[i] for i in range(4)]
    with GradingPool(task.reward, workers=1) as pool:
        right = pool.grade([(p.answer, p.answer, p.extra) for p in problems])
        wrong = pool.grade([("none", p.answer, p.extra) for p in problems])
    assert [g.score for g in right] == [1.0] * 4
    assert all(g.score < 0.1 for g in wrong)


def test_the_reward_can_be_chosen(load):
    assert load(reward="mine:score").reward == "mine:score"


def test_a_long_prompt_is_an_error(load):
    with pytest.raises(DataError, match="max_prompt_tokens = 3"):
        load(tokenizer=build_tokenizer(), max_prompt_tokens=3)[0]


GENERATED = ["arithmetic", "countdown", "gym:basic_arithmetic"]


@pytest.fixture(params=GENERATED)
def generated(request):
    if request.param.startswith("gym:"):
        pytest.importorskip("reasoning_gym")
    return request.param


def test_train_and_eval_are_disjoint_whatever_the_seeds(generated):
    train, held_out = load_task(generated, seed=0), load_task(generated, split="eval", seed=1)
    trained = {p.extra["prompt"] for p in islice(train, 1500)}
    evaluated = {p.extra["prompt"] for p in islice(held_out, 100)}
    assert len(evaluated) > 50
    assert not trained & evaluated


def test_seeds_give_other_problems(generated):
    a, b = (load_task(generated, seed=s) for s in (0, 1))
    assert [a[i].extra["prompt"] for i in range(9)] != [b[i].extra["prompt"] for i in range(9)]


def test_the_worked_answer_is_right(generated):
    task = load_task(generated, difficulty=3)
    problems = [task[i] for i in range(100)]
    with GradingPool(task.reward, workers=1) as pool:
        grades = pool.grade([(task.worked_answer(p), p.answer, p.extra) for p in problems])
    assert [g.score for g in grades] == [1.0] * 100


def test_long_generated_prompts_are_drawn_again():
    # "1,1:2=" has 6 tokens, most others more; a sum of four digits always has 8.
    options = {"tokenizer": build_tokenizer(), "skip_long_prompts": True}
    task = load_task("countdown", difficulty=2, max_prompt_tokens=7, **options)
    assert all(len(p.prompt_ids) <= 7 for p in islice(task, 20))
    with pytest.raises(DataError, match="no fitting train problem"):
        load_task("arithmetic", difficulty=4, max_prompt_tokens=7, **options)[0]


@pytest.mark.parametrize("terms", [2, 4, 12])
def test_arithmetic(terms):
    for problem in islice(load_task("arithmetic", difficulty=terms), 200):
        digits = problem.extra["prompt"].removesuffix("=").split("+")
        assert len(digits) == terms
        assert all(len(digit) == 1 for digit in digits)
        assert problem.answer == str(sum(map(int, digits)))


def test_swapped_terms_are_one_problem():
    splits = {}
    for split in ("train", "eval"):
        for problem in islice(load_task("arithmetic", difficulty=2, split=split), 500):
            key = tuple(sorted(problem.extra["prompt"].removesuffix("=").split("+")))
            assert splits.setdefault(key, split) == split


@pytest.mark.parametrize("numbers", [2, 3, 6])
def test_countdown(numbers):
    for problem in islice(load_task("countdown", difficulty=numbers), 200):
        given, target = problem.extra["numbers"], problem.extra["target"]
        assert problem.extra["prompt"] == f"{','.join(map(str, given))}:{target}="
        assert len(given) == numbers
        assert 1 <= target <= 999
        # The worked answer is ours, so eval is safe; whole quotients are exact in floats.
        assert Fraction(eval(problem.answer)) == target


def test_one_key_in_eight_is_held_out():
    share = sum(split_of(str(i)) == "eval" for i in range(4000)) / 4000
    assert share == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chess", {}, "'chess' is not one of arithmetic, countdown"),
        ("arithmetic", {"difficulty": 13}, "task.difficulty = 13"),
        ("countdown", {"difficulty": 1}, "task.difficulty = 1"),
        ("arithmetic", {"split": "test"}, "split = 'test' is not one of train, eval"),
    ],
)
def test_wrong_settings(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_task(name, **options)


def test_gym_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"qurl-rl\[gym\]"):
        load_task("gym:countdown")


def test_an_unknown_gym_task():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="gym:no_such"):
        load_task("gym:no_such")


@pytest.mark.parametrize("name", ["arc_agi", "chain_sum", "kakurasu", "word_ladder"])
def test_gym_scorers_work_across_the_pipe(name):
    pytest.importorskip("reasoning_gym")
    task = load_task(f"gym:{name}")
    problem = task[0]
    with GradingPool(task.reward, workers=1) as pool:
        tagged = f"I think <answer>{problem.answer}"  # cut at the stop string
        tagged_twice = f"<answer>no</answer> {tagged}</answer> between <answer> tags"
        texts = [problem.answer, f"{tagged}</answer>", tagged, tagged_twice, "no"]
        grades = pool.grade([(t, problem.answer, problem.extra) for t in texts])
    assert [g.score for g in grades[:4]] == [1.0] * 4
    assert grades[4].score < 1


@pytest.fixture(scope="module")
def math_pool():
    with GradingPool("math", workers=2) as pool:
        yield pool


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside the repository")
@pytest.mark.parametrize("name", DATA_SETS)
def test_real_data(name, math_pool):
    task = load_task(DATA / f"{name}.jsonl.gz")
    num_blank = DATA_SETS[name] - len(task)
    assert 0 <= num_blank <= 6
    assert len(task.notes) == (num_blank > 0)
    rows = random.Random(0).sample(range(len(task)), min(40, len(task)))
    problems = [task[i] for i in rows]
    right = [(f"So it is $\\boxed{{{p.answer}}}$.", p.answer, p.extra) for p in problems]
    wrong = [("So it is $\\boxed{-987654.25}$.", p.answer, p.extra) for p in problems]
    assert [g.score for g in math_pool.grade(right)] == [1.0] * len(rows)
    assert [g.score for g in math_pool.grade(wrong)] == [0.0] * len(rows)
