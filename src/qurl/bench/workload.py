"""What is compared: engines with copies of models, on workloads of fixed lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from qurl.errors import ConfigError
from qurl.rollout import build_engine
from qurl.run.shape import Shape
from qurl.types import Completion, Problem, SamplingParams


@dataclass(frozen=True)
class Workload:
    """Groups of completions that all have exactly the same length."""

    name: str
    num_prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def num_new_tokens(self) -> int:
        return self.num_sequences * self.new_tokens

    def resized(self, **sizes: int | None) -> Workload:
        """With other sizes, which become its name; None keeps a size."""
        given = {field: size for field, size in sizes.items() if size is not None}
        for field, size in given.items():
            if size < 1:
                raise ConfigError(f"{field} = {size} must be at least 1")
        other = dataclasses.replace(self, **given)
        if other == self:
            return self
        batch = f"{other.num_prompts}x{other.group_size}"
        return dataclasses.replace(other, name=f"{batch}:{other.prompt_tokens}+{other.new_tokens}")

    def problems(self, vocabulary: int, seed: int) -> list[Problem]:
        """Random prompts; another seed gives prompts that no prefix cache has seen."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.num_prompts, self.prompt_tokens)
        prompts = torch.randint(vocabulary, size, generator=generator).tolist()
        return [Problem(f"prompt-{i}", ids) for i, ids in enumerate(prompts)]

    def params(self, seed: int) -> SamplingParams:
        group_size = self.group_size
        return SamplingParams(self.new_tokens, group_size=group_size, seed=seed, ignore_eos=True)


WORKLOADS: Mapping[str, Workload] = {
    "A": Workload("A", 32, 8, 512, 1024),
    "B": Workload("B", 8, 8, 512, 1024),
    "C": Workload("C", 8, 8, 512, 8192),
    "Cp": Workload("Cp", 8, 8, 512, 4096),
}


@dataclass(frozen=True)
class Setup:
    """One engine with one copy of one model."""

    engine: str
    shape: Shape
    quant: str
    kv: str

    def __str__(self) -> str:
        return f"{self.engine} {self.shape.name} {self.quant} kv={self.kv}"


class Contender(Protocol):
    """An engine under test. Only `generate` is timed."""

    setup: Setup

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> Any: ...

    def read(self, result: Any) -> list[list[Completion]]: ...  # of each problem


class EngineContender:
    """The local engine, with room for `max_batch` sequences."""

    def __init__(self, setup: Setup, model: nn.Module, max_batch: int) -> None:
        self.setup = setup
        engine = build_engine("local", model, quant=setup.quant, kv=setup.kv, max_batch=max_batch)
        self.generate = engine.generate

    def read(self, result: Any) -> list[list[Completion]]:
        return [list(rollout.completions) for rollout in result]
