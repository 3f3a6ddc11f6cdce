"""Completions from vLLM: one request each, with a seed of its own."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qurl.errors import EngineError
from qurl.rollout.engine import Earlier, Stream, check_finite, list_asked
from qurl.rollout.sampler import request_key
from qurl.rollout.stop import StopRule
from qurl.types import Completion, Problem, Rollout, SamplingParams


@dataclass(eq=False)
class Request:
    """One completion that is being sampled."""

    group: Group
    params: Any
    """vLLM's sampling parameters."""
    id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion: Completion | None = None

    def take(self, output: Any, stop: StopRule, version: int) -> None:
        """Append what was sampled since the last time, up to where the completion ends."""
        problem = self.group.problem
        for token, row in zip(output.token_ids, output.logprobs, strict=True):
            check_finite(row[token].logprob, problem, len(self.token_ids))
            self.token_ids.append(token)
            self.logprobs.append(row[token].logprob)
            if finish := stop.finish(self.token_ids, self.params.max_tokens - len(self.token_ids)):
                versions = [version] * len(self.token_ids)
                self.completion = stop.complete(self.token_ids, self.logprobs, finish, versions)
                return
        if output.finish_reason is not None:
            raise EngineError(
                f"problem {problem.id!r}: vLLM ended a completion after {len(self.token_ids)} "
                f"tokens ({output.finish_reason}), where it should have gone on"
            )


@dataclass(eq=False)
class Group:
    """The completions of one problem."""

    problem: Problem
    stream: VllmStream
    requests: list[Request] = field(default_factory=list)


class Requests:
    """All requests that vLLM works on, of whatever stream."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._open: dict[str, Request] = {}
        self._answers: dict[str, Any] = {}
        """Outputs of `ask`; None until they come."""
        self._paused: deque[Request] = deque()
        self._num_asked = self.num_steps = 0

    def add(self, request: Request) -> None:
        """Sample a completion from its first token on."""
        request.id = self._submit(request.group.problem.prompt_ids, request.params)
        request.token_ids, request.logprobs = [], []
        self._open[request.id] = request

    def ask(self, token_ids: Sequence[int], **params: Any) -> Any:
        """vLLM's output for one prompt, decoded greedily."""
        vllm = importlib.import_module("vllm")
        greedy = vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **params)
        self._answers[id := self._submit(token_ids, greedy)] = None
        while self._answers[id] is None:
            self.step()
        return self._answers.pop(id)

    def _submit(self, token_ids: Sequence[int], params: Any) -> str:
        self._num_asked += 1
        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        self._engine.add_request(id := f"qurl-{self._num_asked}", prompt, params)
        return id

    def step(self) -> None:
        """Let vLLM compute one step, and hand out what it sampled."""
        self.num_steps += 1
        for output in self._engine.step():
            if output.request_id in self._answers and output.finished:
                self._answers[output.request_id] = output
            # None: dropped, while its last step was under way.
            if (request := self._open.get(output.request_id)) is not None:
                request.group.stream.take(request, output.outputs[0])
                if request.completion is not None:
                    del self._open[request.id]
                    if not output.finished:
                        self._engine.abort_request([request.id])

    def drop(self, requests: Collection[Request]) -> None:
        """Stop working on them."""
        self._abort(requests)
        self._paused = deque(request for request in self._paused if request not in requests)

    def pause(self) -> None:
        """Stop working on all of them, until they `restart`."""
        self._paused.extend(self._abort(list(self._open.values())))

    def restart(self) -> None:
        """Sample those that are paused, from their first tokens on."""
        while self._paused:
            self.add(self._paused.popleft())

    def _abort(self, requests: Collection[Request]) -> list[Request]:
        """Returns those that were unfinished."""
        found = [request for request in requests if self._open.pop(request.id, None)]
        if found:
            self._engine.abort_request([request.id for request in found])
        return found


class VllmStream:
    """Groups of requests; see `qurl.rollout.engine.Stream`."""

    def __init__(
        self,
        requests: Requests,
        params: SamplingParams,
        stop: StopRule,
        check: Callable[[Sequence[Problem]], None],
        get_version: Callable[[], int],
    ) -> None:
        """`get_version` raises if the weights are not to be sampled from."""
        self._requests, self._params, self._stop = requests, params, stop
        self._check, self._get_version = check, get_version
        self._groups: set[Group] = set()
        self._ready: deque[Group] = deque()

    def submit(
        self, problems: Sequence[Problem], sizes: Sequence[int] = (), earlier: Earlier = ()
    ) -> None:
        self._check(problems)
        for problem, size, _ in list_asked(problems, sizes, self._params):
            group = Group(problem, self)
            self._groups.add(group)
            params = replace(self._params, max_tokens=self._params.limit(problem))
            for index in range(size):
                seed = request_key(self._params.seed, problem.id, index) & (2**63 - 1)
                request = Request(group, vllm_params(params, self._stop, seed))
                group.requests.append(request)
                self._requests.add(request)

    def take(self, request: Request, output: Any) -> None:
        """What vLLM sampled for one of our requests."""
        request.take(output, self._stop, self._get_version())
        if all(other.completion for other in request.group.requests):
            self._ready.append(request.group)

    def __iter__(self) -> Iterator[Rollout]:
        while self._groups:
            while not self._ready:
                self._get_version()
                self._requests.step()
            group = self._ready.popleft()
            self._groups.remove(group)
            completions = [r.completion for r in group.requests if r.completion]
            version = min(min(c.versions) for c in completions)
            yield Rollout(group.problem, completions, version, self._params.temperature)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.drop({r for group in self._groups for r in group.requests})
        self._groups.clear()
        self._ready.clear()


def vllm_params(params: SamplingParams, stop: StopRule, seed: int) -> Any:
    """vLLM's words for ours. It has no tokenizer: ends are token ids, and we look for strings."""
    vllm = importlib.import_module("vllm")
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
    is_greedy = params.temperature == 0
    return vllm.SamplingParams(
        temperature=params.temperature,
        # A greedy row takes the most likely token: no filter changes that, nor its log-prob.
        top_p=1.0 if is_greedy else params.top_p,
        top_k=0 if is_greedy else max(params.top_k, 0),
        seed=None if is_greedy else seed,
        max_tokens=params.max_tokens,
        stop_token_ids=sorted(stop.token_ids),
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=kinds.DELTA if stop.strings else kinds.FINAL_ONLY,
    )
