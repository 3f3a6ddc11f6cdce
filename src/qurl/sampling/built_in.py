"""The systems by name, for each plug point of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qurl.sampling.dots import Dots
from qurl.sampling.e3 import E3Budget, E3Thermostat
from qurl.sampling.greso import Greso
from qurl.sampling.parts import Hooks, NoReplay, Setup, build_part, constant, uniform
from qurl.sampling.pods import Pods
from qurl.sampling.replay import RecentReplay
from qurl.sampling.shuffle_r1 import ShuffleR1
from qurl.sampling.stream import shuffle

PARTS: Mapping[str, Mapping[str, Any]] = {
    "sampling.select": {"shuffle": shuffle, "greso": Greso, "dots": Dots},
    "sampling.budget": {"uniform": uniform, "e3": E3Budget},
    "sampling.thermostat": {"off": constant, "e3": E3Thermostat},
    "sampling.replay": {"off": NoReplay(), "recent": RecentReplay},
    "batch.subselect": {"all": None, "shuffle-r1": ShuffleR1, "pods": Pods},
}


def build_hooks(setup: Setup, chosen: Mapping[str, Any]) -> Hooks:
    """The parts of a run; `chosen` has a name, a class or an object for each key of `PARTS`."""
    built = {
        key.partition(".")[2]: build_part(key, chosen[key], built_in, setup)
        for key, built_in in PARTS.items()
    }
    hooks = Hooks(**built)
    hooks.check_state()
    return hooks
