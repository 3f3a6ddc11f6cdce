"""Episodes: turns are joined into one completion, and only sampled tokens are trained."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from examples.episode_calculator import calculator, last_number
from qurl.errors import ConfigError, EngineError
from qurl.rollout.episode import EpisodeEngine
from qurl.tasks.tokenizer import build_tokenizer
from qurl.types import Completion, Problem, Rollout, SamplingParams

TOKENIZER = build_tokenizer()


def encode(text):
    return tuple(TOKENIZER(text).input_ids)


class Script:
    """Continues a prompt that ends in `key` with one of `answers[key]` per completion.

    The i-th token of a turn has the log-prob -(i + 1). A turn ends at `=`, as with that stop
    string, or at the end of its text.
    """

    def __init__(self, answers, version=3):
        self.answers, self.version = answers, version
        self.submitted = []
        self.limits = {}

    @contextmanager
    def stream(self, params):
        yield ScriptStream(self, params)

    def sync(self, source, *, version):
        self.version = version

    def turn(self, prompt, number, params):
        key = max((k for k in self.answers if prompt.endswith(k)), key=len)
        text = self.answers[key][number % len(self.answers[key])]
        ids, finish = encode(text)[: params.max_tokens], "stop"
        if len(ids) < len(text):
            text, finish = TOKENIZER.decode(ids), "length"
        logprobs = tuple(-(i + 1.0) for i in range(len(ids)))
        versions = (self.version,) * len(ids)
        return Completion(ids, logprobs, text.removesuffix("="), finish, (), versions)


class ScriptStream:
    def __init__(self, engine, params):
        self.engine, self.params, self.queue = engine, params, []

    def submit(self, problems):
        self.engine.limits |= {p.id: self.params.limit(p) for p in problems}
        self.engine.submitted += [(p.id, self.params.group_size) for p in problems]
        self.queue += problems

    def __iter__(self):
        while self.queue:
            problem = self.queue.pop()
            prompt = TOKENIZER.decode(problem.prompt_ids)
            group = [
                self.engine.turn(prompt, g, self.params) for g in range(self.params.group_size)
            ]
            yield Rollout(problem, group, self.engine.version, self.params.temperature)


def problem(id, text):
    return Problem(id, encode(text), answer="12")


def play(engine, episode, problems, **params):
    return EpisodeEngine(engine, episode, TOKENIZER).generate(problems, SamplingParams(**params))


def test_turns_and_tools_become_one_completion():
    """`3+4+5=`: the first answers at once, the second calls the calculator twice."""
    engine = Script({"3+4+5=": ["13", "3+4="], "7;": ["7+5="], "12;": ["\n"]})
    [rollout] = play(engine, calculator, [problem("p", "3+4+5=")], group_size=2, max_tokens=20)
    plain, tool = rollout.completions
    assert plain == Completion(encode("13"), (-1.0, -2.0), "13", "stop", versions=(3, 3))
    assert tool.text == "3+4=7;7+5=12;\n"
    assert tool.token_ids == encode(tool.text)
    marks = "".join("x" if trained else "." for trained in tool.trained)
    assert marks == "xxxx..xxxx...x"
    assert tool.logprobs == (-1, -2, -3, -4, 0, 0, -1, -2, -3, -4, 0, 0, 0, -1)
    assert tool.versions == (3,) * 14
    assert tool.finish == "stop"
    assert (rollout.problem.id, rollout.problem.prompt_ids) == ("p", encode("3+4+5="))
    assert engine.submitted == [("p", 2), ("p/1/2", 1), ("p/1/4", 1)]
    assert [last_number(c.text, "12", {}) for c in (plain, tool)] == [0.0, 1.0]


def test_an_episode_of_one_turn_changes_nothing():
    def once(problem, tokenizer):
        yield problem.prompt_ids

    engine = Script({"=": ["1", "22", "3="]})
    problems = [problem("a", "1="), problem("b", "2=")]
    rollouts = play(engine, once, problems, group_size=3, max_tokens=2)
    with engine.stream(SamplingParams(group_size=3, max_tokens=2)) as stream:
        stream.submit(problems)
        assert rollouts == list(stream)[::-1]


@pytest.mark.parametrize(
    ("max_tokens", "text", "marks"),
    [
        (3, "3+4", "xxx"),  # the first turn is cut
        (4, "3+4=", "xxxx"),  # no room for the tool
        (6, "3+4=", "xxxx"),  # nor for a token after it
        (7, "3+4=7;7", "xxxx..x"),  # the second turn is cut
        (9, "3+4=7;7+5", "xxxx..xxx"),
        (10, "3+4=7;7+5=", "xxxx..xxxx"),
    ],
)
def test_all_turns_share_the_limit_and_end_in_a_sampled_token(max_tokens, text, marks):
    engine = Script({"3+4+5=": ["3+4="], "7;": ["7+5="], "12;": ["12"]})
    [rollout] = play(engine, calculator, [problem("p", "3+4+5=")], max_tokens=max_tokens)
    [completion] = rollout.completions
    assert completion.token_ids == encode(text)
    assert "".join("x" if t else "." for t in completion.trained) == marks
    assert completion.finish == "length"
    assert completion.text == text.removesuffix("=" if max_tokens in (4, 6, 10) else "?")


def test_a_turn_may_have_the_tokens_that_are_left():
    """The second turn begins behind 4 + 2 tokens of 9, or of the problem's own 7."""
    engine = Script({"3+4+5=": ["3+4="], "7;": ["7+5="]})
    play(engine, calculator, [problem("p", "3+4+5=")], max_tokens=9)
    assert engine.limits == {"p": 9, "p/0/2": 3}
    engine.limits.clear()
    limited = replace(problem("p", "3+4+5="), max_tokens=7)
    [rollout] = play(engine, calculator, [limited], max_tokens=9)
    assert engine.limits == {"p": 7, "p/0/2": 1}
    assert len(rollout.completions[0].token_ids) == 7


def test_ids_may_repeat():
    engine = Script({"1+1=": ["1+1="], "2;": ["2"], "5=": ["5"]})
    problems = [problem("p", "1+1="), problem("p", "5="), problem("q", "5=")]
    rollouts = play(engine, calculator, problems, max_tokens=9)
    assert [rollout.completions[0].text for rollout in rollouts] == ["1+1=2;2", "5", "5"]


def test_rollouts_come_as_they_finish_and_more_can_be_submitted():
    engine = Script({"1+1=": ["1+1="], "2;": ["2"], "5=": ["5"]})
    order = []
    player = EpisodeEngine(engine, calculator, TOKENIZER)
    with player.stream(SamplingParams(max_tokens=9)) as stream:
        stream.submit([problem("short", "5="), problem("long", "1+1=")])
        for rollout in stream:
            order.append(rollout.problem.id)
            if rollout.problem.id == "long":
                stream.submit([problem("late", "5=")])
    assert order == ["short", "long", "late"]


def test_an_episode_may_change_the_prompt_and_a_rollout_is_as_old_as_its_oldest_turn():
    def hint(problem, tokenizer):
        tokens = [*encode("hint "), *problem.prompt_ids]
        turn = yield tokens
        engine.sync(None, version=4)
        yield [*tokens, *turn.token_ids]

    engine = Script({"hint 5=": ["a"], "a": ["b"]})
    [rollout] = play(engine, hint, [problem("p", "5=")], max_tokens=9)
    assert rollout.problem.prompt_ids == encode("hint 5=")
    assert rollout.version == 3
    assert rollout.completions[0].versions == (3, 4)
    assert rollout.completions[0].trained == (True, True)


def forgets(problem, tokenizer):
    yield problem.prompt_ids
    yield encode("99999999")


def breaks(problem, tokenizer):
    yield problem.prompt_ids
    raise KeyError("no tool")


def silent(problem, tokenizer):
    return
    yield


def rolls(problem, tokenizer, seen=[]):  # noqa: B006
    seen.append(0)
    yield encode(str(len(seen)))


def writes(problem, tokenizer):
    yield "5="


def pauses(problem, tokenizer):
    yield problem.prompt_ids
    yield


def wants_nothing():
    yield


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (wants_nothing, r"the episode of problem p failed: TypeError\(.*takes 0 positional"),
        (writes, "problem p yields '5='; it must yield all tokens so far, as token ids"),
        (pauses, "problem p yields None; it must yield all tokens so far, as token ids"),
        (forgets, "problem p changed tokens of earlier turns"),
        (breaks, r"the episode of problem p failed: KeyError\('no tool'\)"),
        (silent, "problem p yields no prompt"),
        (rolls, "problem p begin with different prompts"),
    ],
)
def test_a_wrong_episode_is_an_error(episode, message):
    engine = Script({"5=": ["a"]})
    with pytest.raises(EngineError, match=message):
        play(engine, episode, [problem("p", "5=")], max_tokens=20, group_size=2)


def test_an_episode_may_yield_tensors():
    def turns(problem, tokenizer):
        yield torch.tensor(problem.prompt_ids)

    (rollout,) = play(
        Script({"5=": ["a"]}), turns, [problem("p", "5=")], max_tokens=9, group_size=2
    )
    assert rollout.problem.prompt_ids == encode("5=")


def test_an_episode_is_loaded_by_name():
    player = EpisodeEngine(Script({}), "examples.episode_calculator:calculator", TOKENIZER)
    assert player.episode is calculator
    with pytest.raises(ConfigError, match=r"rollout\.episode = 'examples\.no:such'"):
        EpisodeEngine(Script({}), "examples.no:such", TOKENIZER)
