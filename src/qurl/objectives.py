"""Facts about objectives, advantages and rejection rules: one table each, importable without torch.

The recipe, its rules, the losses and the loop read these tables; nothing else tells one objective
from another. A part of your own carries its facts in the same form:

    @with_facts(Objective(is_weighted=True, is_truncated=True))
    def my_objective(tokens: TokenTerms) -> Tensor: ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from qurl.errors import ConfigError


@dataclass(frozen=True)
class Objective:
    """What the loop must know about an objective. Its function is in `qurl.losses`."""

    equation: str = ""
    """Number in the paper."""
    against: Literal["prox", "behav"] = "prox"
    """The policy in the denominator of the ratio: full-precision or quantized old actor."""
    is_weighted: bool = False
    """The surrogate is multiplied by the importance weight."""
    is_truncated: bool = False
    """That weight is capped at C."""
    is_widened: bool = False
    """The upper clip bound is divided by r where the weight was truncated."""

    def __post_init__(self) -> None:
        _check_one_of("against", self.against, "prox", "behav")

    def cap(self, cap: float | None) -> float | None:
        """C as this objective applies it: a weighted objective without truncation has none.

        An objective without weights ignores C; its metrics then say what truncation would do.
        """
        return None if self.is_weighted and not self.is_truncated else cap


@dataclass(frozen=True)
class Advantage:
    """What the loop must know about an advantage. Its function is in `qurl.advantages`."""

    needs_critic: bool = False
    """It reads the critic's values, so a critic is trained."""
    needs_group: bool = False
    """It compares completions of one problem, so a group has at least two."""
    needs_prox: bool = True
    """It reads `logp_prox` or what follows from it, so all rows need a prox before the update."""
    reads: Literal["batch", "rows", "outcomes"] = "batch"
    """What the advantage of a token depends on: the whole batch, the row of the token, or rewards,
    accuracies and groups, which give all trained tokens of a row the same one. With several
    trainers, a whole batch passes through the driver."""

    def __post_init__(self) -> None:
        _check_one_of("reads", self.reads, "batch", "rows", "outcomes")


def _check_one_of(fact: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{fact} = {value!r} is not one of {', '.join(allowed)}")


OBJECTIVES: Mapping[str, Objective] = {
    "ppo_prox": Objective("1"),
    "ppo_behav": Objective("3", against="behav"),
    "decoupled": Objective("4", is_weighted=True),
    "tis": Objective("5", is_weighted=True, is_truncated=True),
    "acr": Objective("9", is_weighted=True, is_truncated=True, is_widened=True),
}

ADVANTAGES: Mapping[str, Advantage] = {
    # With algo.kl_in_reward it needs prox.
    "gae": Advantage(needs_critic=True, needs_prox=False, reads="rows"),
    "grpo": Advantage(needs_group=True, needs_prox=False, reads="outcomes"),
    "dr_grpo": Advantage(needs_group=True, needs_prox=False, reads="outcomes"),
    "rloo": Advantage(needs_group=True, needs_prox=False, reads="outcomes"),
    "reinforce_pp": Advantage(needs_prox=False, reads="outcomes"),
}

_DIVERGENCES = ("k1", "k2", "k3")
REJECTIONS = (
    *(f"token_{k}" for k in _DIVERGENCES),
    *(f"seq_{how}_{k}" for how in ("sum", "mean", "max") for k in _DIVERGENCES),
)
"""Names of rejection rules: a divergence per token, or its sum, mean or maximum per sequence."""

Function = TypeVar("Function", bound=Callable[..., Any])


def with_facts(facts: Objective | Advantage) -> Callable[[Function], Function]:
    """Attach facts to a function, as `function.facts`."""

    def attach(function: Function) -> Function:
        function.facts = facts
        return function

    return attach


def parse_rejection(rule: str) -> tuple[str, float | None, float]:
    """ "seq_mean_k1:0.999_1.001" -> (name, low, high); "token_k3:0.01" -> (name, None, high)."""
    name, _, bounds = rule.partition(":")
    if name not in REJECTIONS:
        raise ValueError(f"{rule!r} does not start with one of {', '.join(REJECTIONS)}")
    try:
        numbers = [float(x) for x in bounds.split("_")]
    except ValueError:
        numbers = []
    has_band = name.endswith("k1")
    if len(numbers) != (2 if has_band else 1):
        wanted = "a band, like 0.999_1.001" if has_band else "one upper bound, like 0.01"
        raise ValueError(f"{rule!r} needs {wanted} after the colon")
    if has_band and not 0 < numbers[0] < numbers[1] < math.inf:
        raise ValueError(f"{rule!r} needs 0 < low < high")
    if has_band and not numbers[0] <= 1 <= numbers[1]:
        raise ValueError(
            f"{rule!r} needs a band with 1 in it, where trainer and sampler agree: as it is, "
            "nearly every token would be rejected"
        )
    if not has_band and not 0 < numbers[0] < math.inf:
        raise ValueError(f"{rule!r} needs a bound above 0 and below infinity, like 0.01")
    return (name, numbers[0], numbers[1]) if has_band else (name, None, numbers[0])
