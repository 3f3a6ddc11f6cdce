"""The plug points of sampling, and what all parts on them have in common.

    select       which problems are asked next                        sampling.select
    budget       how many completions each of them gets               sampling.budget
    thermostat   the temperature of a step                            sampling.thermostat
    replay       earlier groups that are trained on again             sampling.replay
    subselect    which completions of the step are trained on         batch.subselect

A part is a function, or a class that is built with a `Setup` and then called like that function. An
object of such a class can also have

    observe(step, graded, metrics)    is told, after its update, what a step sampled and measured
    metrics(trained)                  its own numbers for the step's row, of the batch as trained;
                                      None if all such parts have `reads_batch = False`
    state_dict(), load_state_dict()   what a resumed run needs, in plain containers and tensors
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from qurl.config import Config
from qurl.errors import ConfigError, first_line
from qurl.plugins import is_users_own, load_plugin, naming_failures
from qurl.sampling.history import History
from qurl.sampling.stream import Selector, shuffle
from qurl.tasks.task import Task
from qurl.types import Batch, Graded, Trained


@dataclass(frozen=True)
class Setup:
    """What the class of a part is built with."""

    config: Config
    task: Task
    vocabulary: int
    """Number of tokens that the policy knows."""


Budget = Callable[[Sequence[int], History, int], Sequence[int]]
"""`budget(indices, history, group_size)`: completions for each of these problems."""

Thermostat = Callable[[int, float], float]
"""`thermostat(step, temperature)`: the temperature of a step; the recipe's is given."""

SubSelect = Callable[[Batch, Tensor, int], Tensor | tuple[Tensor, Tensor]]
"""`subselect(batch, advantages, seed)`: the rows of the batch to train on; they may repeat.

`advantages` [B] are those within the whole groups. For the rows alone, advantages are computed anew
among them; for (rows, advantages[rows]), those count. In rows of the shape [n, k], the k of a
line stay in one mini-batch.
"""


class Replay(Protocol):
    """Mixes groups of earlier steps into the new ones."""

    def num_fresh(self, num_groups: int) -> int:
        """How many of a step's groups are to be sampled."""
        ...

    def merge(self, fresh: Sequence[Graded], num_groups: int, seed: int) -> list[Graded]:
        """The groups of a step: the fresh ones, then the replayed ones."""
        ...


def uniform(indices: Sequence[int], history: History, group_size: int) -> list[int]:
    """The same for all."""
    return [group_size] * len(indices)


def constant(step: int, temperature: float) -> float:
    """The recipe's own."""
    return temperature


class NoReplay:
    """All groups are fresh."""

    def num_fresh(self, num_groups: int) -> int:
        return num_groups

    def merge(self, fresh: Sequence[Graded], num_groups: int, seed: int) -> list[Graded]:
        return list(fresh)


@dataclass(frozen=True)
class Hooks:
    """The parts of a run on these plug points; by default, those that change nothing."""

    select: Selector = shuffle
    budget: Budget = uniform
    thermostat: Thermostat = constant
    replay: Replay = field(default_factory=NoReplay)
    subselect: SubSelect | None = None
    """None trains on all completions."""

    def num_fresh(self, num_groups: int) -> int:
        """How many of a step's groups are to be sampled."""
        with naming_failures("sampling.replay"):
            num_fresh = int(self.replay.num_fresh(num_groups))
        if num_fresh < 1:
            raise ConfigError(
                f"sampling.replay: num_fresh returned {num_fresh}; every step samples 1 or more"
            )
        return num_fresh

    def merge(self, fresh: Sequence[Graded], num_groups: int, seed: int) -> list[Graded]:
        """The groups that a step trains on."""
        with naming_failures("sampling.replay"):
            graded = list(self.replay.merge(fresh, num_groups, seed))
        if not graded or not all(isinstance(group, Graded) for group in graded):
            raise ConfigError(
                f"sampling.replay: merge returned {str(graded)[:200]}; it must return the groups "
                "of a step, 1 or more"
            )
        return graded

    def observe(self, step: int, graded: Sequence[Graded], metrics: Mapping[str, float]) -> None:
        """Tell the parts that want to know what a step sampled and measured."""
        for name, part in self._with("observe").items():
            with naming_failures(f"{_key(name)}: observe"):
                part.observe(step, graded, metrics)

    def metrics(self, get_trained: Callable[[], Trained]) -> dict[str, float]:
        """The numbers of the parts. A batch on several ranks is gathered for those that read it."""
        parts = self._with("metrics")
        readers = [part for part in parts.values() if getattr(part, "reads_batch", True)]
        trained: Any = get_trained() if readers else None
        found: dict[str, float] = {}
        for name, part in parts.items():
            with naming_failures(f"{_key(name)}: metrics"):
                found |= {name: float(value) for name, value in part.metrics(trained).items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in self._with("state_dict").items():
            with naming_failures(f"{_key(name)}: state_dict"):
                found[_label(name, part)] = part.state_dict()
        return found

    def check_state(self) -> None:
        """Refuse a part whose state no checkpoint could hold, before there is something to save."""
        for label, state in self.state_dict().items():
            try:
                torch.save(state, file := io.BytesIO())
                torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            except Exception as error:  # pickle raises many kinds
                raise ConfigError(
                    f"state_dict of {label} cannot be saved; it may hold only numbers, text, plain "
                    f"containers and tensors: {first_line(error)}"
                ) from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each part its saved state; one that was not there before starts afresh."""
        for name, part in self._with("load_state_dict").items():
            if (label := _label(name, part)) in state:
                with naming_failures(f"{_key(name)}: load_state_dict"):
                    part.load_state_dict(state[label])

    def _with(self, method: str) -> dict[str, Any]:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: part for name, part in parts.items() if hasattr(part, method)}


def _key(name: str) -> str:
    """Key of the recipe that names a part."""
    return "batch.subselect" if name == "subselect" else f"sampling.{name}"


def _label(name: str, part: Any) -> str:
    return f"{name}.{type(part).__qualname__}"


def build_part(key: str, part: Any, built_in: Mapping[str, Any], setup: Setup) -> Any:
    """A part by its name, its class, or as it is."""
    if isinstance(part, str):
        part = load_plugin(part, key) if is_users_own(part) else built_in[part]
    if isinstance(part, type):
        with naming_failures(key):
            part = part(setup)
    wanted = ("num_fresh", "merge") if key == "sampling.replay" else ("__call__",)
    if part is not None and (lacks := [name for name in wanted if not hasattr(part, name)]):
        raise ConfigError(f"{key}: {part!r} lacks {', '.join(lacks)} (qurl.sampling.parts)")
    return part
