"""An engine in a process of its own, and what the group may ask of it.

Everything that touches an engine runs in one thread, in the order in which it was asked for. Calls
come in on other threads, in any order: a worker answers while its engine computes, or hangs.
"""

from __future__ import annotations

import pickle
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qurl.ops.ray import describe_process, redirect_stderr
from qurl.ops.shelf import Address as ShelfAddress
from qurl.ops.shelf import shelve
from qurl.quant.shipment import Chunk, Packing
from qurl.rollout import build_engine
from qurl.rollout.engine import Asked, close
from qurl.rollout.group.wire import Address, Wire
from qurl.types import Rollout, SamplingParams, SyncReport


@dataclass(frozen=True)
class EngineSpec:
    """All that it takes to build an engine elsewhere, but its weights."""

    kind: str
    model_config: Any
    """The config of a model of transformers."""
    generation_config: Any
    tokenizer: Any
    quant: str
    options: Mapping[str, Any]
    device: str

    def build(self, device: torch.device) -> Any:
        options = {"device": device, "is_empty": True, **self.options}
        model = self.build_empty_model()
        return build_engine(self.kind, model, self.tokenizer, quant=self.quant, **options)

    def build_empty_model(self) -> Any:
        """A model that takes no memory: the first sync brings the weights."""
        from transformers import AutoModelForCausalLM

        plain = {"dtype": torch.float32, "attn_implementation": "eager"}  # it never computes
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model_config, **plain)
        model.generation_config = self.generation_config
        if self.kind == "vllm":  # it starts from files
            return model.to_empty(device="cpu")
        rotation = model.model.rotary_emb  # computed, not loaded
        model.model.rotary_emb = type(rotation)(config=rotation.config)
        return model


@dataclass(frozen=True)
class Question:
    """The engine wants to know the trainer's log-probs of these tokens."""

    token_ids: tuple[int, ...]
    quant: str


@dataclass(frozen=True)
class Progress:
    """What became of a stream since the last time."""

    rollouts: bytes
    """Pickled, so that their size is known."""
    num_steps: int
    """Steps that the engine has decoded so far."""


class EngineWorker:
    """Lives in the other process."""

    def __init__(self, threads: int = 0, log: str | None = None, gpu: int | None = None) -> None:
        """`log`: a file for what this process writes to stderr. `gpu`: number of the one to use,
        where several are in sight."""
        if log is not None:
            redirect_stderr(log)
        self._engines: dict[str, Any] = {}
        self._device, self._gpu = torch.device("cpu"), gpu
        self._wire: Wire | None = None
        self._thread = ThreadPoolExecutor(1)
        if threads:  # torch counts them by the thread that asks
            self._thread.submit(torch.set_num_threads, threads).result()
        self._talk: Talk | None = None
        self._plays: dict[str, Play] = {}

    def describe(self) -> str:
        return describe_process()

    def build(self, name: str, spec: EngineSpec) -> Packing:
        """Make an engine without weights; returns how it wants them."""
        self._device = torch.device(spec.device)
        if spec.device == "cuda":
            self._device = torch.device("cuda", self._gpu or 0)
        close(self._engines.pop(name, None))
        self._engines[name] = self._thread.submit(spec.build, self._device).result()
        return self._engines[name].packing

    def join(self, address: Address, rank: int, size: int) -> None:
        """Become a member of a wire."""
        self._wire = self._talk = None
        self._wire = Wire(address, rank, size, self._device)

    def begin_sync(self, name: str, version: int, dtype: torch.dtype) -> None:
        """Take in the shipment that the wire brings next."""
        assert self._wire is not None
        self._talk = Talk(self._wire, dtype)
        talk, engine = self._talk, self._engines[name]
        talk.follow(self._thread.submit(talk.receive, engine, version))

    def question(self) -> Question | SyncReport:
        """What the engine asks next, or its report if it has nothing more to ask."""
        assert self._talk is not None
        return self._talk.listen()

    def failure(self) -> str:
        """Why the last sync over this wire failed; empty if it did not, or not yet."""
        return self._talk.failure() if self._talk is not None else ""

    def answer(self, logprobs: Tensor) -> None:
        assert self._talk is not None
        self._talk.answers.put(logprobs)

    def open(
        self, stream: str, name: str, params: SamplingParams, shelves: Sequence[ShelfAddress] = ()
    ) -> None:
        """Begin a stream of that engine; the next one begins when this one is closed.

        Tokens of its rollouts go to `shelves`, if any are given.
        """
        self._plays[stream] = Play(self._engines[name], params, shelves)
        self._plays[stream].done = self._thread.submit(self._plays[stream].run)

    def submit(self, stream: str, asked: bytes) -> None:
        self._plays[stream].inbox.put(pickle.loads(asked))

    def poll(self, stream: str, seconds: float) -> Progress:
        """Rollouts that have finished; waits so long for the first of them."""
        return self._plays[stream].poll(seconds)

    def close_stream(self, stream: str) -> None:
        self._plays.pop(stream).close()

    def score(self, name: str, token_ids: Sequence[int]) -> Tensor:
        return self._thread.submit(self._engines[name].score, token_ids).result().cpu()

    def get(self, name: str, attribute: str) -> Any:
        return getattr(self._engines[name], attribute, None)


class Talk:
    """A sync under way: a shipment off the wire, and questions to the trainer."""

    def __init__(self, wire: Wire, dtype: torch.dtype) -> None:
        self.dtype, self._chunks = dtype, wire.receive()
        self.answers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[Question | Future[SyncReport]] = queue.SimpleQueue()

    def receive(self, engine: Any, version: int) -> SyncReport:
        try:
            return engine.sync(self, version=version)
        finally:
            for _ in self._chunks:  # the sender goes on, for the others
                pass

    def pack(self, packing: Packing) -> Iterator[Chunk]:
        return self._chunks

    def score(self, token_ids: Sequence[int], quant: str) -> Tensor:
        self._questions.put(Question(tuple(token_ids), quant))
        return self.answers.get()

    def follow(self, report: Future[SyncReport]) -> None:
        self._report = report
        report.add_done_callback(self._questions.put)

    def failure(self) -> str:
        error = self._report.exception() if self._report.done() else None
        return f"{type(error).__name__}: {error}" if error else ""

    def listen(self) -> Question | SyncReport:
        heard = self._questions.get()
        return heard.result() if isinstance(heard, Future) else heard


class Play:
    """A stream of the engine, fed from an inbox until it is closed."""

    done: Future[None]

    def __init__(
        self, engine: Any, params: SamplingParams, shelves: Sequence[ShelfAddress]
    ) -> None:
        self._engine, self._params = engine, params
        self._shelves = deque(shelves)
        self.inbox: queue.SimpleQueue[Sequence[Asked] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Rollout] = queue.SimpleQueue()
        self._is_closed = False

    def run(self) -> None:
        with self._engine.stream(self._params) as stream:
            while not self._is_closed and (asked := self.inbox.get()) is not None:
                _submit(stream, asked)
                for rollout in stream:
                    self._finished.put(rollout)
                    if self._is_closed:
                        return
                    while not self.inbox.empty():
                        _submit(stream, self.inbox.get() or ())

    def poll(self, seconds: float) -> Progress:
        deadline, found = time.monotonic() + seconds, []
        while not found and time.monotonic() < deadline and not self.done.done():
            try:
                found.append(self._finished.get(timeout=min(0.2, seconds)))
            except queue.Empty:
                continue
        while not self._finished.empty():
            found.append(self._finished.get())
        if not found and self.done.done():
            self.done.result()  # raises what the stream did
        if self._shelves:
            found = [self._shelve(rollout) for rollout in found]
        return Progress(pickle.dumps(found), getattr(self._engine, "num_steps", 0))

    def _shelve(self, rollout: Rollout) -> Rollout:
        """Put its tokens on the shelf whose turn it is; they outlive this process there."""
        self._shelves.rotate()
        return shelve(rollout, tuple(self._shelves))

    def close(self) -> None:
        self._is_closed = True
        self.inbox.put(None)


def _submit(stream: Any, asked: Sequence[Asked]) -> None:
    if asked:
        stream.submit([one.problem for one in asked], [one.size for one in asked])
