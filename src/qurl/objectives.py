"""Facts about objectives and advantages: one table each, free of torch.

The recipe, its rules, the losses and the loop read these tables; nothing else tells one objective
from another. A part of your own carries its facts in the same form:

    @with_facts(Objective(is_weighted=True, is_truncated=True))
    def my_objective(tokens: TokenTerms) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar


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


OBJECTIVES: Mapping[str, Objective] = {
    "ppo_prox": Objective("1"),
    "ppo_behav": Objective("3", against="behav"),
    "decoupled": Objective("4", is_weighted=True),
    "tis": Objective("5", is_weighted=True, is_truncated=True),
    "acr": Objective("9", is_weighted=True, is_truncated=True, is_widened=True),
}

ADVANTAGES: Mapping[str, Advantage] = {
    "gae": Advantage(needs_critic=True),
    "grpo": Advantage(needs_group=True),
    "dr_grpo": Advantage(needs_group=True),
    "rloo": Advantage(needs_group=True),
    "reinforce_pp": Advantage(),
}

Function = TypeVar("Function", bound=Callable[..., Any])


def with_facts(facts: Objective | Advantage) -> Callable[[Function], Function]:
    """Attach facts to a function, as `function.facts`."""

    def attach(function: Function) -> Function:
        function.facts = facts  # type: ignore[attr-defined]
        return function

    return attach
