"""The engines to compare, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from qurl.bench.shapes import Shape
from qurl.bench.workload import Workload
from qurl.rollout import build_engine
from qurl.types import Completion, Problem, SamplingParams


@dataclass(frozen=True)
class Setup:
    """One engine with one copy of one model."""

    engine: str
    shape: Shape
    quant: str
    kv: str

    def key(self, workload: Workload) -> str:
        """The name of a result."""
        return f"{self.engine} {self.shape.name} {self.quant} kv={self.kv} {workload.name}"


class Contender(Protocol):
    """An engine under test. Only `generate` is timed."""

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> Any: ...

    def read(self, result: Any) -> list[list[Completion]]:
        """The completions of each problem."""
        ...

    def facts(self) -> dict[str, Any]:
        """Facts to save with the figures."""
        ...


class EngineContender:
    """One of our engines, with room for `max_batch` sequences."""

    def __init__(self, setup: Setup, model: nn.Module, max_batch: int) -> None:
        is_local = setup.engine == "local"
        options: Any = {"max_batch": max_batch, "kv": setup.kv} if is_local else {}
        self.engine = build_engine(setup.engine, model, quant=setup.quant, **options)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> Any:
        return self.engine.generate(problems, params)

    def read(self, result: Any) -> list[list[Completion]]:
        return [list(rollout.completions) for rollout in result]

    def facts(self) -> dict[str, Any]:
        preemptions = getattr(self.engine, "num_preemptions", None)
        return {} if preemptions is None else {"num_preemptions": preemptions}
