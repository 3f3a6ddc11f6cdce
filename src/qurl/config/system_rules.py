"""Which of the related systems go together, with each other and with the rest of a recipe.

`docs/write_systems_table.py` tries all pairs against these rules and writes what it finds into
docs/systems.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from qurl.config.schema import Config
from qurl.objectives import Advantage, Objective


def find_system_mistakes(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    """Combinations that cannot work."""
    yield from _subselect_mistakes(config, advantage)
    yield from _budget_mistakes(config, advantage)
    yield from _draft_mistakes(config)
    yield from _deal_mistakes(config)
    yield from _noise_mistakes(config)
    yield from _scales_mistakes(config)
    yield from _replay_mistakes(config, objective)
    yield from _thermostat_mistakes(config)
    yield from _dots_mistakes(config)


def _subselect_mistakes(config: Config, advantage: Advantage | None) -> Iterator[str]:
    """`batch.subselect` comes before every forward of the trainer."""
    kind, size = config.batch.subselect, config.sampling.group_size
    if kind == "all":
        return
    if advantage and advantage.needs_critic:
        name = f"algo.advantage = {config.algo.advantage!r}"
        yield f"batch.subselect = {kind!r} compares rewards, and {name} values; use 'grpo'"
    elif advantage and advantage.needs_prox:
        name = f"algo.advantage = {config.algo.advantage!r} reads the prox of all completions"
        yield f"batch.subselect = {kind!r} comes before the prox forward, and {name}"
    if kind == "shuffle-r1" and size % 2:
        yield f"sampling.group_size = {size} is odd: batch.subselect = 'shuffle-r1' makes pairs"
    if kind == "shuffle-r1" and config.sampling.budget != "uniform":
        budget = f"sampling.budget = {config.sampling.budget!r} makes groups of odd size"
        yield f"batch.subselect = 'shuffle-r1' pairs completions, and {budget}; use 'pods'"
    keep = config.systems.pods.keep
    if kind == "pods" and keep < 2 and config.systems.pods.statistics == "kept":
        yield f"systems.pods.keep = {keep} leaves nothing to compare; keep 2 or more"
    num_pairs = max(1, int(config.systems.shuffle_r1.keep * (size // 2)))
    kept = {"shuffle-r1": ("pairs", num_pairs), "pods": ("completions", min(keep, size))}
    unit, per_group = kept.get(kind, ("", math.inf))
    if (updates := config.batch.minibatches) > (left := config.batch.problems * per_group):
        yield f"batch.minibatches = {updates}: batch.subselect = {kind!r} keeps only {left} {unit}"


def _budget_mistakes(config: Config, advantage: Advantage | None) -> Iterator[str]:
    size, spread = config.sampling.group_size, config.systems.e3.spread
    if config.sampling.budget != "e3":
        return
    is_compared = config.algo.dynamic_sampling or (advantage and advantage.needs_group)
    if is_compared and round(size * (1 - spread)) < 2:
        few = f"sampling.group_size = {size} with systems.e3.spread = {spread:g} makes groups of 1"
        yield f"{few}; raise group_size, or lower the spread"


def _draft_mistakes(config: Config) -> Iterator[str]:
    rollout, chosen = config.rollout, f"rollout.drafts = {config.rollout.drafts!r}"
    if rollout.drafts == "off":
        return
    if rollout.engine in ("hf", "vllm"):
        yield f"{chosen} needs rollout.engine = 'local', not {rollout.engine!r}"
    if not config.sampling.keep_responses:
        yield f"{chosen} drafts from earlier responses; set sampling.keep_responses = true"
    if rollout.episode:
        turns = f"rollout.episode = {rollout.episode!r} has tokens of tools in its responses"
        yield f"{chosen}: {turns}; leave one of them off"
    if (step_tokens := config.systems.histospec.step_tokens) < 3:
        few = f"systems.histospec.step_tokens = {step_tokens}"
        yield f"{few} has no room for a draft; use 3 or more"


def _deal_mistakes(config: Config) -> Iterator[str]:
    parallel, chosen = config.parallel, f"parallel.deal = {config.parallel.deal!r}"
    if parallel.deal == "free":
        return
    if parallel.engines < 2:
        engines = f"parallel.engines = {parallel.engines} leaves nothing to deal"
        yield f"{chosen}: {engines}; use 2 or more engines, or 'free'"
    if config.rollout.episode:
        turns = f"rollout.episode = {config.rollout.episode!r} asks turn by turn"
        yield f"{chosen} deals whole answers, and {turns}; use 'free'"


def _noise_mistakes(config: Config) -> Iterator[str]:
    chosen, engine = f"quant.noise = {config.quant.noise!r}", config.rollout.engine
    if config.quant.noise == "off":
        return
    if engine != "local":
        yield f"{chosen} needs rollout.engine = 'local', not {engine!r}"
    if config.quant.unified:
        yield f"{chosen}: quant.unified = true makes trainer and actor one function; drop one"
    if config.rollout.ahead:
        yield f"{chosen} is not built for rollout.ahead = 1; drop one"
    if config.systems.aqn.start < (end := config.systems.aqn.end):
        start = f"systems.aqn.start = {config.systems.aqn.start:g}"
        yield f"{start} must not lie below systems.aqn.end = {end:g}"


def _scales_mistakes(config: Config) -> Iterator[str]:
    chosen, quant = f"quant.scales = {config.quant.scales!r}", config.quant
    if quant.scales == "dynamic":
        return
    if quant.format != "int8":
        yield f"{chosen} is for quant.format = 'int8', not {quant.format!r}"
    if config.rollout.engine != "local":
        yield f"{chosen} needs rollout.engine = 'local', not {config.rollout.engine!r}"
    if quant.unified:
        yield f"{chosen} is not built for quant.unified = true; use 'dynamic'"


def _replay_mistakes(config: Config, objective: Objective | None) -> Iterator[str]:
    if config.sampling.replay == "off" or objective is None:
        return
    if not objective.is_weighted and objective.against != "behav":
        name = f"algo.objective = {config.algo.objective!r}"
        remedy = "old groups need the weight of 'decoupled', 'tis' or 'acr'"
        yield f"sampling.replay = {config.sampling.replay!r}: {remedy}, not {name}"


def _thermostat_mistakes(config: Config) -> Iterator[str]:
    e3 = config.systems.e3
    if config.sampling.thermostat != "e3":
        return
    if e3.lowest >= e3.highest:
        yield f"systems.e3.lowest = {e3.lowest} must lie below systems.e3.highest = {e3.highest}"
    elif not e3.lowest <= (first := config.sampling.temperature) <= e3.highest:
        bounds = f"systems.e3.lowest = {e3.lowest} to systems.e3.highest = {e3.highest}"
        yield f"sampling.temperature = {first} must lie within {bounds}"


def _dots_mistakes(config: Config) -> Iterator[str]:
    dots = config.systems.dots
    if config.sampling.select != "dots":
        return
    if not (dots.references or dots.recent_epochs):
        yield (
            "systems.dots.references = 0 and systems.dots.recent_epochs = 0 leave nothing to "
            "predict from; set one of them"
        )
    if dots.predictor and not dots.encoder:
        yield (
            f"systems.dots.predictor = {dots.predictor!r} needs the model whose embeddings "
            "it was trained on; set systems.dots.encoder"
        )


def find_system_warnings(config: Config) -> Iterator[str]:
    """Combinations that work, but not as one may think."""
    sampling, batch, systems = config.sampling, config.batch, config.systems
    if batch.subselect == "pods" and systems.pods.keep >= sampling.group_size:
        size = f"sampling.group_size = {sampling.group_size}"
        yield f"PODS cannot act: systems.pods.keep = {systems.pods.keep} is not below {size}"
    if sampling.replay == "recent" and systems.replay.fresh == 1:
        yield "replay cannot act: systems.replay.fresh = 1 samples all groups"
    if sampling.replay == "recent" and config.correction.mode == "auto":
        yield (
            "correction.mode = 'auto' with sampling.replay: old groups are far from the policy, so "
            "the prox forward is made in most steps"
        )
    if config.parallel.deal == "histopipe":
        yield (
            "parallel.deal = 'histopipe': a step waits for the engine with the longest problems, "
            "which is slower than 'free' in our simulation (docs/systems.md)"
        )
    if sampling.budget == "e3" and config.algo.aggregation.startswith("seq-mean"):
        effect = "a problem counts by the number of its completions; use 'token-mean'"
        yield f"sampling.budget = 'e3', algo.aggregation = {config.algo.aggregation!r}: {effect}"
    if config.quant.noise != "off" and config.steps < systems.aqn.stages:
        stages = f"systems.aqn.stages = {systems.aqn.stages}"
        yield f"AQN skips stages: {stages} is more than steps = {config.steps}"


def unused_systems(config: Config) -> Iterator[tuple[str, str]]:
    """(section, why) of the systems that the recipe does not name."""
    names = {
        "systems.greso": ("sampling.select", "greso"),
        "systems.dots": ("sampling.select", "dots"),
        "systems.replay": ("sampling.replay", "recent"),
        "systems.shuffle_r1": ("batch.subselect", "shuffle-r1"),
        "systems.pods": ("batch.subselect", "pods"),
        "systems.aqn": ("quant.noise", "aqn"),
        "systems.histospec": ("rollout.drafts", "histospec"),
    }
    for section, (key, name) in names.items():
        if (value := attrgetter(key)(config)) != name:
            yield section, f"{key} = {value!r}"
    if "e3" not in (config.sampling.budget, config.sampling.thermostat):
        yield "systems.e3", "neither sampling.budget nor sampling.thermostat is 'e3'"
