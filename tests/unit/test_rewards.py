"""What answers are worth: mathematics, countdown, length, and a step's rollouts."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl.answers import bare, find_answer, last_boxed, last_tagged, normalise, to_latex
from qurl.errors import ConfigError, RewardError, RewardTimeout
from qurl.rewards import Grade, Grading, GradingPool, grade_math, reward_metrics
from qurl.rewards.countdown import score_countdown
from qurl.rewards.grading import overlong_cache, overlong_penalty
from qurl.rewards.reward import load_reward, read_grade, score_exact
from qurl.types import Completion, Problem, Rollout

VECTORS = Path(__file__).parents[2].parent / "shared" / "vectors" / "systems.json"


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("It is \\boxed{18}.", "18"),
        ("First \\boxed{17}, no: \\boxed{18}", "18"),
        ("It is \\boxed{18.0}", "18"),
        ("It is \\boxed{\\$18}", "18"),
        ("It is \\boxed{18\\text{ dollars}}", "18"),
        ("2 + 2 = 4\n#### 1,234", "1234"),
        ("It is \\boxed{1234}", "1,234"),
        ("It is \\boxed{1{,}234}", "1234"),
        ("The answer is 7.", "7"),
        ("so $x = \\frac{6}{8}$", "\\frac{3}{4}"),
        ("\\boxed{0.75}", "\\frac{3}{4}"),
        ("\\boxed{\\dfrac34}", "3/4"),
        ("\\boxed{1+x^2}", "x^2+1"),
        ("\\boxed{(x+1)(x-1)}", "x^2-1"),
        ("\\boxed{\\left(1, 2\\right)}", "(1,2)"),
        ("\\boxed{25}", "025"),
        ("\\boxed{evelyn}", "\\text{Evelyn}"),
        ("\\boxed{3}", "so \\boxed{3}"),
        ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}"),
        ("\\boxed{{not} closed, but \\boxed{5}", "5"),
        ("\\boxed{18 dollars}", "18"),
        ("\\boxed{18\\ }", "18"),
        ("\\boxed{18 \\\\}", "18"),
        ("\\boxed{18,}", "18"),
        ("\\boxed{€18}", "18"),
        ("\\boxed{18°}", "18"),
        ("\\boxed{18~\\text{cm}}", "18"),
        ("\\boxed{18}", "18 years old"),
        ("\\boxed{2.5 \\times 10^{-5}}", "2.5e-05"),
        ("\\boxed{1e3}", "1000"),
        ("#### 1,800 eggs per day", "1800"),
        ("#### **18**", "18"),
        ("\\boxed{\\text{1,800 eggs}}", "1800"),
        ("#### **(5, -10)**", "(5,-10)"),
        ("#### The answer is **$18**.", "18"),
        ("<think>1 + 2 = 3</think>\n<answer>18</answer>", "18"),
        ("<think>\\boxed{17}, no</think> <answer> $18 </answer>", "18"),
        ("<think>18, then</think> <answer>2\\sqrt{3}", "2\\sqrt{3}"),
        ("<answer>(1, 2)</answer>", "(1,2)"),
        ("<answer>\\text{(C)}</answer>", "C"),
        ("<answer>The final answer is \\boxed{3/4}</answer>", "\\frac{3}{4}"),
        ("<answer>She has $18 left.</answer>", "18"),
        # an empty tag is no answer, so a marked one counts
        ("So it is \\boxed{18}. <answer></answer>", "18"),
        ("<answer> </answer> \\boxed{18 eggs}", "18"),
        ("<think>\\boxed{18}</think> <answer>", "18"),  # cut off
        ("#### 18\n<answer></answer>", "18"),
        ("<answer>No solution</answer>", "\\text{no solution}"),
        ("\\boxed{x \\ge 3}", "[3,\\infty)"),
        ("\\boxed{-2 < x \\le \\frac{7}{2}}", "(-2,3.5]"),
        ("\\boxed{[3,\\infty)}", "x \\ge 3"),
        ("\\boxed{2√15}", "2\\sqrt{15}"),
        ("<answer>(1 + √(x²+3)) / 2</answer>", "\\frac{1+\\sqrt{x^2+3}}{2}"),
        ("\\boxed{2½}", "\\frac{5}{2}"),
        ("\\boxed{6·10⁻²}", "0.06"),
        ("\\boxed{(-∞, 3]}", "(-\\infty,3]"),
        ("\\boxed{0.5}", "½"),
        ("\\boxed{-yx}", "-xy"),
        ("\\boxed{a-c-b}", "a-b-c"),
        ("\\boxed{X-axis}", "\\text{x-axis}"),
    ],
)
def test_right_answers(text, truth):
    assert grade_math(text, truth) == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("It is \\boxed{19}.", "18"),
        ("18, or rather \\boxed{19}", "18"),
        ("\\boxed{}", "18"),
        ("", "18"),
        ("I do not know", "18"),
        ("\\boxed{(2,1)}", "(1,2)"),
        ("\\boxed{x^2}", "x^2+1"),
        ("\\boxed{Eve}", "\\text{Evelyn}"),
        ("\\boxed{\\frac{}{\\sqrt{}", "\\frac{3}{4}"),
        ("#### 12 apples\n18", "18"),
        ("#### 12 and 18", "18"),
        ("\\boxed{2 sin x}", "2"),
        ("\\boxed{2 pi}", "2"),
        ("\\boxed{18 eggs}", "19 eggs"),
        ("\\boxed{18 to 20}", "20"),
        ("\\boxed{18 dollars}", "18 cents"),
        ("\\boxed{5 million}", "5"),
        ("\\boxed{2 thirds}", "2"),
        ("\\boxed{5 tenths}", "5"),
        ("\\boxed{5 millions}", "5"),
        ("\\boxed{18 divided by seven}", "18"),
        ("\\boxed{18 minus one}", "18"),
        ("<think>\\boxed{18}</think> <answer>17</answer>", "18"),
        ("<think>18</think> <answer></answer>", "18"),
        ("<answer>18</answer> <answer></answer>", "18"),
        ("\\boxed{18}, no: \\boxed{17} <answer></answer>", "18"),
        ("\\boxed{18} <answer>\\boxed{}</answer>", "18"),
        # who hedges has not answered: "about 18" would also be right for 18.3
        ("<answer>about 18</answer>", "18"),
        ("<answer>12 and 18</answer>", "18"),
        ("<answer>2\\sqrt{18}</answer>", "18"),
        ("\\boxed{seat}", "east"),
        ("<answer>DBCA</answer>", "\\boxed{ABCD}"),
        ("\\boxed{x > 3}", "[3,\\infty)"),
        ("\\boxed{x \\le 3}", "[3,\\infty)"),
        ("\\boxed{x^2 < 4}", "(-2,2)"),
        ("\\boxed{|x - 2| < 3}", "(-1,5)"),
        ("\\boxed{√15}", "5"),
        ("\\boxed{10⁵}", "105"),
        ("\\boxed{2½}", "\\frac{21}{2}"),
    ],
)
def test_wrong_answers(text, truth):
    assert grade_math(text, truth) == 0.0


def printed(program):
    """What a program of its own process prints."""
    words = [sys.executable, "-c", program]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_a_loaded_grader_has_nothing_left_to_import():
    """Else the first answers of each process would take as long as all others."""
    program = """if True:
        import sys
        from qurl.rewards.reward import load_reward
        grade = load_reward("math")
        before = set(sys.modules)
        for found in (r"\\frac{1}{2}", "x=4", r"\\sqrt{3}", r"7\\text{ weeks}", "3.5"):
            assert grade(f"it is \\\\boxed{{{found}}}", "2", {}) == 0
        assert grade(r"\\boxed{x < 7}", "(7,9)", {}) == 0
        print(sorted(set(sys.modules) - before))
    """
    assert printed(program) == "[]"


@pytest.mark.parametrize("memory", ["8.0", "None"])
def test_a_lower_limit_of_the_system_holds(memory):
    program = f"""if True:
        import resource
        from qurl.rewards import GradingPool
        resource.setrlimit(resource.RLIMIT_DATA, (4_000_000_000,) * 2)
        with GradingPool("math", workers=1, memory={memory}) as pool:
            print(pool.grade([("7", "7", {{}})])[0].score)
    """
    assert printed(program) == "1.0"


def test_a_forked_process_grades_too():
    program = """if True:
        import multiprocessing
        from qurl.rewards import grade_math
        assert grade_math("7", "7") == 1
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pairs = [(str(i), str(i // 2 * 2)) for i in range(6)]
            print(pool.starmap_async(grade_math, pairs).get(60))
    """
    assert printed(program) == str([1.0, 0.0] * 3)


def test_an_endless_comparison_is_killed_and_the_next_one_works():
    text = "\\boxed{9^{9^{9^{9}}}}"
    with pytest.raises(RewardTimeout, match=r"killed after 1\.0 s") as caught:
        grade_math(text, "7", timeout=1.0)
    assert vars(caught.value)["text"] == text
    assert isinstance(caught.value, TimeoutError)
    assert grade_math("\\boxed{7}", "7", timeout=1.0) == 1.0


def test_an_empty_truth_is_an_error_not_a_zero():
    with pytest.raises(RewardError, match="the truth is empty"):
        grade_math("\\boxed{7}", " ")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a \\boxed{\\frac{1}{2}} b", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed {3}", "3"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("#### 5\nmore", "5"),
        ("#### 4\n#### \\boxed{6}", "6"),
        ("nothing", None),
    ],
)
def test_where_the_answer_stands(text, answer):
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>4</answer> or <answer> 5 </answer>.", "5"),
        ("<answer>4", "4"),
        ("4</answer>", "4"),
        ("<answer>4</answer></answer>", "4"),
        ("in <answer> tags: <answer>4</answer>, not in <answer> or so", "4"),
        ("<answer></answer>", ""),
        ("nothing", None),
    ],
)
def test_what_stands_in_the_last_tags(text, content):
    assert last_tagged(text) == content


braces = st.recursive(
    st.text("ab ", max_size=3),
    lambda inner: st.lists(inner.map("{{{}}}".format), max_size=3).map("".join),
)


@given(before=st.text("ab{ }", max_size=5), inside=braces, after=st.text("ab }", max_size=5))
def test_boxed_braces_balance(before, inside, after):
    assert last_boxed(f"{before}\\boxed{{{inside}}}{after}") == inside


def test_a_text_of_boxes_is_read_in_one_pass():
    start = time.perf_counter()
    assert last_boxed("\\boxed{" * 20_000 + "5}") == "5"
    assert last_boxed("\\boxed{" * 20_000) is None
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("middle", [" ", " *", ",1", " abc"])
def test_a_long_answer_is_no_number_and_is_read_in_one_pass(middle):
    answer = f"1{middle * 20_000}!"
    start = time.perf_counter()
    assert bare(answer) == answer
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("part", ["√(", "√ ", "²", "½"])
def test_a_long_text_of_signs_is_read_in_one_pass(part):
    start = time.perf_counter()
    assert "√" not in to_latex(part * 20_000)
    assert time.perf_counter() - start < 2


def test_normalising_changes_only_the_look():
    assert normalise("\\left( \\dfrac{1}{2},\\, \\text{odd} \\right).") == "(\\frac{1}{2},odd)"
    assert normalise("\\leftarrow") == "\\leftarrow"


@pytest.mark.parametrize(
    "text", ["25+7*3", " (25 + 7*3) ", "3*7+25", "<think>25-7 = 18</think> <answer>25+7*3</answer>"]
)
def test_countdown_accepts_any_expression(text):
    assert score_countdown(text, "", {"numbers": [3, 7, 25], "target": 46}) == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("46", "not one of the numbers"),
        ("25+7+7+7", "7 is used three times"),
        ("25+7*3=46", "no equations"),
        ("25+7", "another value"),
        ("25+7**3", "no powers"),
        ("25//7*3", "no whole division"),
        ("--25+7*3", "no signs"),
        ("25/(7-7)", "division by zero"),
        ("(25", "syntax"),
        ("", "nothing"),
        ("__import__('os')", "code"),
        ("25+7*3 <answer>25+7</answer>", "the tag holds another one"),
        ("(" * 199 + "1", "deep"),
        ("1+" * 10_000 + "1", "long"),
    ],
)
def test_countdown_refuses(text, why):
    assert score_countdown(text, "", {"numbers": [3, 7, 25], "target": 46}) == 0.0, why


def test_countdown_is_exact():
    # 1/3*3 is 1 in fractions; 49*(1/49) is not 1 in floats.
    assert score_countdown("49*(1/49)", "", {"numbers": [1, 49, 49], "target": 1}) == 1.0
    assert score_countdown("7/2", "", {"numbers": [2, 7], "target": 3}) == 0.0


def test_exact():
    assert score_exact(" 122\n", "122", {}) == 1.0
    assert score_exact("122.", "122", {}) == 0.0
    assert score_exact("b", "a", {"accepted_answers": ["b"]}) == 1.0


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), None, "1", {"accuracy": 1.0}, [1], 1j, 1e308, -1e10, 10**400],
)
def test_what_is_no_reward(value):
    with pytest.raises(RewardError, match="the reward returned"):
        read_grade(value)


def test_what_is_a_reward():
    assert read_grade(True) == Grade(1.0)
    assert read_grade(-3) == Grade(-3.0)
    assert read_grade({"score": 0.5, "format": 1}) == Grade(0.5, {"format": 1.0})
    with pytest.raises(RewardError, match="format = nan"):
        read_grade({"score": 0.5, "format": float("nan")})


@pytest.mark.parametrize("spec", ["maths", "json:no_such_function", "json:"])
def test_unknown_rewards(spec):
    with pytest.raises(ConfigError, match=f"task.reward = '{spec}'"):
        load_reward(spec)


@pytest.mark.skipif(not VECTORS.is_file(), reason="the test vectors are not beside the repository")
def test_overlong_penalty_vectors():
    for case in json.loads(VECTORS.read_text())["dapo_overlong"]:
        penalty = overlong_penalty(case["length"], case["l_max"], case["l_cache"])
        assert penalty == case["penalty"]


def test_overlong_penalty():
    # Lmax = 100, Lcache = 20: 0 up to 80, then -(L - 80) / 20.
    lengths = [1, 80, 81, 90, 100, 101]
    assert [overlong_penalty(n, 100, 20) for n in lengths] == [0, 0, -0.05, -0.5, -1, -1]
    assert overlong_penalty(100, 100, 0) == 0.0


@pytest.mark.parametrize(
    ("fraction", "max_tokens", "cache"),
    [(0.0, 100, 0), (0.2, 20480, 4096), (0.29, 100, 29), (0.2, 4, 1), (0.01, 9, 1)],
)
def test_the_overlong_cache_is_rounded_and_never_off_by_that(fraction, max_tokens, cache):
    assert overlong_cache(fraction, max_tokens) == cache


def completion(text, length, finish="stop"):
    return Completion([1] * length, [0.0] * length, text, finish)


def test_rollouts_are_graded_and_summed_up():
    def rollout(answer, *completions):
        return Rollout(Problem("p", (), answer), completions, version=0, temperature=1.0)

    rollouts = [
        rollout("5", completion("5", 4), completion("5", 8)),
        rollout("6", completion("7", 2), completion("8", 10, "length")),
        rollout("7", completion("7", 1), completion("8", 1)),
    ]
    with GradingPool("exact") as pool:
        graded = Grading(pool, rollouts).rewards(overlong_cache=4, max_tokens=10)
        metrics = reward_metrics(graded)
    # The penalty starts beyond 6 tokens: (6 - 8) / 4 = -0.5 and (6 - 10) / 4 = -1.
    assert [list(g.rewards) for g in graded] == [[1.0, 0.5], [0.0, -1.0], [1.0, 0.0]]
    assert [g.accuracies for g in graded] == [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert [g.rollout for g in graded] == rollouts
    # mean = 1.5 / 6 = 0.25; E[r^2] = (1 + .25 + 0 + 1 + 1 + 0) / 6; var = 3.25/6 - 1/16
    assert metrics == pytest.approx(
        {
            "reward/timeouts": 0.0,
            "reward/mean": 0.25,
            "reward/std": (3.25 / 6 - 0.0625) ** 0.5,
            "reward/accuracy": 0.5,
            "reward/frac_equal": 0.0,  # the penalty parts the first two groups
            "reward/frac_all_correct": 1 / 3,
            "reward/frac_all_wrong": 1 / 3,
            "reward/pass@2": 2 / 3,
            "response_length/mean": 26 / 6,
            "response_length/max": 10.0,
            "response_length/clip_ratio": 1 / 6,
        }
    )
    plain = [dataclasses.replace(g, rewards=g.accuracies) for g in graded]
    assert reward_metrics(plain)["reward/frac_equal"] == 2 / 3
