"""The engines that are compared, behind one face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from qurl.bench.shapes import Shape
from qurl.bench.workload import Workload
from qurl.errors import ConfigError
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
        """Names a result."""
        return f"{self.engine} {self.shape.name} {self.quant} kv={self.kv} {workload.name}"


class Contender(Protocol):
    """Generates, and then says what. Only the first is timed."""

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> Any: ...

    def read(self, result: Any) -> list[list[Completion]]:
        """Completions of each problem."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else is worth keeping with the figures."""
        ...


class EngineContender:
    """One of our engines."""

    def __init__(self, setup: Setup, model: nn.Module, max_batch: int) -> None:
        options: dict[str, Any] = {}
        if setup.engine == "local":
            options = {"max_batch": max_batch, "kv": setup.kv}
        self.engine = build_engine(setup.engine, model, quant=setup.quant, **options)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> Any:
        return self.engine.generate(problems, params)

    def read(self, result: Any) -> list[list[Completion]]:
        return [list(rollout.completions) for rollout in result]

    def facts(self) -> dict[str, Any]:
        preemptions = getattr(self.engine, "num_preemptions", None)
        return {} if preemptions is None else {"num_preemptions": preemptions}


def check_setup(setup: Setup) -> None:
    """Refuse what an engine cannot do, before anything is loaded."""
    if setup.engine == "hf" and setup.kv != "none":
        raise ConfigError("--against hf keeps keys and values in full precision: use --kv none")
    if setup.engine == "vllm":
        from qurl.bench.vllm_contender import check_vllm

        check_vllm(setup.quant)


def build_contender(setup: Setup, model: nn.Module, workloads: Sequence[Workload]) -> Contender:
    """An engine that has room for every one of the workloads."""
    if setup.engine == "vllm":
        from qurl.bench.vllm_contender import VllmContender

        return VllmContender(setup, workloads)
    return EngineContender(setup, model, max(w.num_sequences for w in workloads))
