"""Workloads: a number of prompts of one length, and of completions of one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qurl.errors import ConfigError
from qurl.types import Problem, SamplingParams


@dataclass(frozen=True)
class Workload:
    """Groups of completions that all have exactly the same length."""

    name: str
    num_prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if name != "name"}

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def num_new_tokens(self) -> int:
        return self.num_sequences * self.new_tokens


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("A", 32, 8, 512, 1024),
        Workload("B", 8, 8, 512, 1024),
        Workload("C", 8, 8, 512, 8192),
        Workload("Cp", 8, 8, 512, 4096),
    )
}


def get_workload(name: str, **changes: int | None) -> Workload:
    """A named workload; with changes, its name becomes its sizes."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
    given = {field: value for field, value in changes.items() if value is not None}
    for field, value in given.items():
        if value < 1:
            raise ConfigError(f"{field} = {value} must be at least 1")
    workload = dataclasses.replace(WORKLOADS[name], **given)
    if workload == WORKLOADS[name]:
        return workload
    batch = f"{workload.num_prompts}x{workload.group_size}"
    return dataclasses.replace(
        workload, name=f"{batch}:{workload.prompt_tokens}+{workload.new_tokens}"
    )


def make_problems(workload: Workload, vocabulary: int, seed: int) -> list[Problem]:
    """Random prompts; another seed gives prompts that no prefix cache has seen."""
    generator = torch.Generator().manual_seed(seed)
    size = (workload.num_prompts, workload.prompt_tokens)
    prompts = torch.randint(vocabulary, size, generator=generator).tolist()
    return [Problem(f"prompt-{i}", ids) for i, ids in enumerate(prompts)]


def sampling_params(workload: Workload, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=workload.new_tokens,
        temperature=1.0,
        group_size=workload.group_size,
        seed=seed,
        ignore_eos=True,
    )
