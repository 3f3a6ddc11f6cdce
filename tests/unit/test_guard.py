"""What an engine of one's own returns is checked before anything is trained on it."""

import math
from dataclasses import replace

import pytest

from qurl.errors import ConfigError, EngineError
from qurl.rollout.engine import QueueStream, generate
from qurl.rollout.guard import GuardedEngine
from qurl.types import Completion, Problem, Rollout, SamplingParams, SyncReport

PARAMS = SamplingParams(max_tokens=4, group_size=2)
PROBLEMS = [Problem(str(i), (1, 2), "right") for i in range(3)]
SOUND = Completion((5, 9), (-0.1, 0.0), "text", "stop")


class Scripted:
    """Gives the same completion to everything."""

    works_elsewhere = True

    def __init__(self, completion=SOUND, drops=0, lacks=0):
        self.completion, self.drops, self.lacks = completion, drops, lacks

    def sync(self, source, *, version):
        return SyncReport(version, 0.0, 0, 0.0, True, 0.0)

    def score(self, token_ids):
        raise OSError("the server is gone")

    def generate(self, problems, params):
        return generate(self, problems, params)

    def stream(self, params):
        return QueueStream(params, self.play)

    def play(self, waiting):
        for asked in list(waiting)[self.drops :]:
            group = (self.completion,) * (asked.size - self.lacks)
            yield Rollout(asked.problem, group, 0, 1.0)


def run(engine, sizes=()):
    with GuardedEngine(engine, vocabulary=10).stream(PARAMS) as stream:
        stream.submit(PROBLEMS, sizes)
        return list(stream)


def test_a_sound_engine_is_let_through():
    engine = GuardedEngine(Scripted(), vocabulary=10)
    assert engine.works_elsewhere
    assert engine.sync(None, version=1).version == 1
    assert [len(r.completions) for r in run(Scripted(), sizes=(1, 3, 2))] == [1, 3, 2]
    assert [r.problem.id for r in engine.generate(PROBLEMS, PARAMS)] == ["0", "1", "2"]


def test_a_problem_may_be_asked_twice_but_not_answered_more_often():
    twice = [PROBLEMS[0], PROBLEMS[0]]
    with GuardedEngine(Scripted(), vocabulary=10).stream(PARAMS) as stream:
        stream.submit(twice, (1, 3))
        assert [len(r.completions) for r in stream] == [1, 3]
    stream = GuardedEngine(Scripted(), vocabulary=10).stream(PARAMS)
    stream._stream.submit(twice)  # type: ignore[attr-defined]
    stream.submit(PROBLEMS[1:])
    with pytest.raises(EngineError, match="a rollout of problem '0', which nothing asks for"):
        list(stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": (-0.1, math.nan)}, r"completion 0: logprobs\[1\] = nan is not the logarithm"),
        ({"logprobs": (0.7, -0.1)}, r"logprobs\[0\] = 0.7 is not the logarithm of a probability"),
        ({"logprobs": (-0.1,)}, r"1 logprobs for 2 tokens; each token has one"),
        ({"versions": (1,)}, r"1 versions for 2 tokens"),
        ({"token_ids": (5, 10)}, r"token_ids\[1\] = 10 is outside the vocabulary \[0, 10\)"),
    ],
)
def test_a_flaw_of_a_completion_is_named(change, message):
    engine = Scripted(replace(SOUND, **change))
    with pytest.raises(EngineError, match=message):
        run(engine)
    with pytest.raises(EngineError, match=message):
        GuardedEngine(engine, vocabulary=10).generate(PROBLEMS, PARAMS)


def test_the_tokens_of_a_tool_need_no_probability():
    run(Scripted(replace(SOUND, logprobs=(-0.1, math.nan), trained=(True, False))))


def test_what_is_missing_is_counted():
    with pytest.raises(EngineError, match="has 1 completions; 2 were asked for"):
        run(Scripted(lacks=1))
    with pytest.raises(EngineError, match="ended before 1 of the problems"):
        run(Scripted(drops=1))
    with pytest.raises(EngineError, match="without a rollout of problem '0'"):
        GuardedEngine(Scripted(drops=1), vocabulary=10).generate(PROBLEMS, PARAMS)


def test_a_method_that_fails_is_named():
    class Wrong(Scripted):
        def sync(self, source, *, version):
            return None

        def stream(self, params):
            return None

    engine = GuardedEngine(Wrong(), vocabulary=10)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"sync returned None; it must return a .*SyncReport"):
        engine.sync(None, version=1)
    with pytest.raises(EngineError, match=r"stream returned None, which lacks submit, "):
        engine.stream(PARAMS)
    with pytest.raises(ConfigError, match=r"rollout.engine: score failed: OSError: the server is"):
        engine.score([1])
