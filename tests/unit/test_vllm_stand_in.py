"""What becomes of vLLM and its requests if a sync fails, with a stand-in for vLLM."""

import sys
from types import SimpleNamespace

import pytest

from qurl.errors import EngineError, SyncError
from qurl.rollout.vllm.engine import VllmEngine
from qurl.types import Problem, SamplingParams
from tests.models import tiny_llama

PROBLEMS = [Problem("a", (5, 6)), Problem("b", (7,))]
PARAMS = SamplingParams(max_tokens=3, group_size=2, ignore_eos=True)


class Core:
    """Samples one token 9 per step for each request, and hands all of them out at the end."""

    def __init__(self) -> None:
        self.num_sampled: dict[str, int] = {}
        self.engine_core, self.num_ended = self, 0

    def shutdown(self) -> None:
        self.num_ended += 1

    def add_request(self, id, prompt, params) -> None:
        self.num_sampled[id] = 0

    def abort_request(self, ids) -> None:
        for id in ids:
            del self.num_sampled[id]

    def step(self):
        assert self.num_sampled, "nothing to do: who steps would wait for ever"
        self.num_sampled = {id: number + 1 for id, number in self.num_sampled.items()}
        done = [id for id, number in self.num_sampled.items() if number == PARAMS.max_tokens]
        for id in done:
            del self.num_sampled[id]
        row = {9: SimpleNamespace(logprob=-0.5)}
        sampled = {"token_ids": [9] * PARAMS.max_tokens, "logprobs": [row] * PARAMS.max_tokens}
        output = SimpleNamespace(**sampled, finish_reason="length")
        return [SimpleNamespace(request_id=id, finished=True, outputs=[output]) for id in done]


class Engine(VllmEngine):
    """Without vLLM; a sync sends nothing, and fails if `is_broken`."""

    is_broken = False

    def _start(self, *_) -> None:
        self.core, self._max_length = Core(), 64
        self._is_open, self._is_companion = True, False
        self.llm = SimpleNamespace(llm_engine=self.core)

    def _send(self, shipment, version) -> int:
        if self.is_broken:
            raise SyncError("broken")
        return 0

    def _verify(self, shipment, version) -> float:
        return 0.0


@pytest.fixture
def engine(monkeypatch):
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1, FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    return Engine(tiny_llama())


def fail_to_sync(engine) -> None:
    engine.is_broken = True
    with pytest.raises(SyncError):
        engine.sync(engine._model, version=1)
    engine.is_broken = False


def test_a_stream_goes_on_with_the_sync_after_one_that_failed(engine):
    with engine.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        engine._requests.step()
        fail_to_sync(engine)
        with pytest.raises(EngineError, match="sync again"):
            next(iter(stream))
        fail_to_sync(engine)
        engine.sync(engine._model, version=2)
        rollouts = list(stream)
    assert [rollout.problem.id for rollout in rollouts] == ["a", "b"]
    completions = [c for rollout in rollouts for c in rollout.completions]
    assert [(c.token_ids, c.versions) for c in completions] == [((9, 9, 9), (2, 2, 2))] * 4


def test_a_stream_that_closes_after_a_failed_sync_is_not_sampled_again(engine):
    with engine.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        fail_to_sync(engine)
    engine.sync(engine._model, version=2)
    assert engine.core.num_sampled == {}


def test_vllm_ends_if_its_first_weights_are_not_sound(engine):
    class Unsound(Engine):
        def _verify(self, shipment, version):
            cores.append(self.core)
            raise SyncError("not what was sent")

    cores = []
    with pytest.raises(SyncError, match="not what was sent"):
        Unsound(tiny_llama())
    assert [core.num_ended for core in cores] == [1]
    engine.close()
    engine.close()
    assert engine.core.num_ended == 1
