"""Which parts a run is made of: those of its recipe, or objects given to `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from qurl.advantages import ESTIMATORS, Estimator, critic_advantages
from qurl.config import Config, check_combinations
from qurl.config.rules import BUILT_IN
from qurl.errors import ConfigError
from qurl.losses import SURROGATES, Surrogate, facts_of
from qurl.objectives import Advantage, Objective
from qurl.plugins import check_call, is_users_own, load_plugin, name_of
from qurl.rewards import Reward
from qurl.rollout import Engine
from qurl.rollout.episode import Episode
from qurl.run.trial import SIGNATURES, check_signature, try_objective
from qurl.sampling import Hooks, Selector, Setup, build_hooks
from qurl.sampling.built_in import PARTS as SAMPLING_PARTS
from qurl.sampling.parts import Budget, Replay, SubSelect, Thermostat
from qurl.tasks import Draw, Task

EngineFactory = Callable[..., Engine]
"""`factory(model, tokenizer, *, quant, compute_dtype)` makes an engine, as `build_engine` does."""

KEYS = {"task" if key == "task.name" else key.partition(".")[2]: key for key in BUILT_IN}
"""Key of the recipe that names each part of a run."""
NAMES: dict[Any, str] = {
    part: name
    for table in (SURROGATES, ESTIMATORS, *SAMPLING_PARTS.values())
    for name, part in table.items()
}


@dataclass(frozen=True)
class Choices:
    """The parts that make one run different from another, in the order of `train`.

    None: as the recipe says. Names are as in the recipe.
    """

    objective: Surrogate
    advantage: Estimator
    engine: EngineFactory | None
    task: Task | Draw | str
    reward: Reward | None
    select: Selector | type | str
    episode: Episode | None
    budget: Budget | type | str
    thermostat: Thermostat | type | str
    replay: Replay | type | str
    subselect: SubSelect | type | str

    @classmethod
    def of(cls, config: Config, *parts: Any) -> Choices:
        """The given parts; for None, what the recipe names. Refuses what clashes."""
        names = (field.name for field in dataclasses.fields(cls))
        given: dict[str, Any] = dict(zip_longest(names, parts))
        for part, value in given.items():
            if isinstance(value, str):
                remedy = f"a name belongs into the recipe, as {KEYS[part]}"
                raise ConfigError(f"train({part}={value!r}) takes the part itself; {remedy}")
        built_in = {"objective": SURROGATES, "advantage": ESTIMATORS, "engine": {}}
        for part in [part for part, value in given.items() if value is None]:
            key, name = KEYS[part], attrgetter(KEYS[part])(config)
            if part in built_in and is_users_own(name):
                given[part] = load_plugin(name, key)
            elif part in built_in:
                given[part] = built_in[part].get(name)
            elif part == "task" or key in SAMPLING_PARTS:
                given[part] = name
        engine, options = given["engine"], ("quant", "compute_dtype")
        if isinstance(engine, type):
            check_engine(engine)
        if engine is not None:
            check_call(engine, "rollout.engine", "model", "tokenizer", keywords=options)
        for part, key in KEYS.items():
            value = attrgetter(key)(config) if given[part] is None else given[part]
            if key in SIGNATURES and isinstance(value, str) and is_users_own(value):
                value = load_plugin(value, key)
            check_signature(value, key)
        choices = cls(**given)
        if config.algo.kl_in_reward and choices.advantage is not critic_advantages:
            raise ConfigError("algo.kl_in_reward = true needs the built-in algo.advantage = 'gae'")
        check_combinations(config, "config", *choices.facts)
        try_objective(choices.objective, config)
        return choices

    def record_in(self, config: Config) -> Config:
        """The config with the names of parts given as objects, as its run directory keeps it."""
        for part, key in KEYS.items():
            value, name = getattr(self, part), attrgetter(key)(config)
            is_object = callable(value) or hasattr(value, "merge")
            is_named = is_object and is_users_own(name) and load_plugin(name, key) is value
            if is_object and not is_named:
                spec = (
                    NAMES.get(value)
                    or name_of(value)
                    or f"__main__:{getattr(value, '__qualname__', 'part')}"
                )
                section, _, field = key.partition(".")
                changed = dataclasses.replace(getattr(config, section), **{field: spec})
                config = dataclasses.replace(config, **{section: changed})
        return config

    def build_hooks(self, setup: Setup) -> Hooks:
        """The parts of sampling."""
        chosen = {key: getattr(self, key.partition(".")[2]) for key in SAMPLING_PARTS}
        return build_hooks(setup, chosen)

    @property
    def facts(self) -> tuple[Objective, Advantage]:
        """Facts of the objective and of the advantage, which may carry none."""
        return facts_of(self.objective), getattr(self.advantage, "facts", Advantage())


def check_engine(engine: Any) -> None:
    """Refuse an engine, or the class of one, that lacks a method."""
    methods = ("sync", "stream", "generate", "score")
    if lacks := ", ".join(method for method in methods if not hasattr(engine, method)):
        name = getattr(engine, "__name__", repr(engine))
        raise ConfigError(f"rollout.engine: {name} lacks {lacks} (qurl.rollout.Engine)")
