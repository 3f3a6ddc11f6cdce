"""The engines of a run, and where they are: in this process, with each trainer, or on their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qurl.config import Config
from qurl.ops.device import pick_device
from qurl.ops.ray import HERE
from qurl.ops.shelf import Shelves
from qurl.plugins import is_users_own, load_plugin, naming_failures
from qurl.rollout import Engine, build_engine
from qurl.rollout.episode import EpisodeEngine
from qurl.rollout.group.engine import EngineGroup
from qurl.rollout.group.fleet import Fleet
from qurl.rollout.group.wire import Carrier
from qurl.rollout.group.worker import EngineSpec
from qurl.rollout.guard import GuardedEngine
from qurl.rollout.local import LocalEngine
from qurl.rollout.noise import noise_sigma
from qurl.run.checkpoint import AnyLearner
from qurl.run.choices import Choices, check_engine
from qurl.run.colocated import ColocatedEngines
from qurl.run.directory import Run
from qurl.seeds import derive_seed
from qurl.trainer.learner import Learner
from qurl.trainer.parallel.group import LearnerGroup
from qurl.trainer.parallel.processes import num_launched
from qurl.trainer.policy import Policy

Place = Callable[[Policy, str, Mapping[str, Any]], Engine]
"""Builds one of our engines for a policy, in a format and with options, wherever it is to be."""
LOGS = "workers"
"""Folder of a run with what its workers wrote to stderr."""


@contextmanager
def open_place(
    config: Config, learner: AnyLearner, run: Run, *, has_episode: bool
) -> Iterator[Place]:
    """Where the recipe wants its engines; processes that this starts end with it."""
    parallel, kind = config.parallel, config.rollout.engine
    # Turns of an episode are joined in this process.
    shelves = None if has_episode or isinstance(learner, Learner) else learner.shelves
    if parallel.engines:
        fleet = _open_fleet(config, run)
        try:
            yield functools.partial(_in_fleet, config, fleet, shelves)
        finally:
            fleet.close()
    elif isinstance(learner, LearnerGroup) and parallel.colocate and kind == "local":
        yield lambda policy, quant, options: ColocatedEngines(
            learner.workers, quant, options, shelves
        )
    elif parallel.is_sharded and kind in ("local", "vllm"):
        # The policy at hand is a copy in main memory, and weights come from the ranks.
        yield functools.partial(_here, kind, device=learner.device, is_empty=True)
    else:
        yield functools.partial(_here, kind)


def _here(kind: str, policy: Policy, quant: str, options: Mapping[str, Any], **more: Any) -> Engine:
    return build_engine(kind, policy.model, policy.tokenizer, quant=quant, **options, **more)


def _open_fleet(config: Config, run: Run) -> Fleet:
    from qurl.rollout.group.ray import starter

    parallel, gpus = config.parallel, _engine_gpus(config)
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    options = {"threads": config.threads, "gpus": gpus, "reserves": _reserves(config)}
    start = starter(parallel.address, run.path / LOGS, **options)
    return Fleet(
        parallel.engines,
        start,
        min_engines=parallel.min_engines,
        timeout=parallel.timeout,
        device=device,
        carrier=choose_carrier(config, len(gpus)),
        notify=run.warn,
    )


def choose_carrier(config: Config, num_gpus: int) -> Carrier:
    """How weights get to engines in other processes, which have so many GPUs of this machine."""
    if not num_gpus:
        return "gloo"
    # NCCL wants a GPU for each member, and the trainer is one of them.
    num_members = config.parallel.trainers + config.parallel.engines
    has_own = _reserves(config) or num_members <= torch.cuda.device_count()
    return "nccl" if has_own else "ipc"


def _reserves(config: Config) -> bool:
    """Whether engines ask Ray for GPUs: in a cluster, or where it has reserved the trainers'.

    Started here for engines alone, Ray does not know which GPUs the trainers use.
    """
    parallel = config.parallel
    has_trainers = parallel.trainers > 1 and num_launched() is None
    return bool(parallel.address) and (parallel.address not in HERE or has_trainers)


def _engine_gpus(config: Config) -> list[int]:
    """GPUs of this machine for engines: those that no trainer uses, or all if there are none."""
    if pick_device(config.device).type != "cuda":
        return []
    count, trainers = torch.cuda.device_count(), config.parallel.trainers
    return list(range(trainers, count)) or list(range(count))


def _in_fleet(
    config: Config,
    fleet: Fleet,
    shelves: Shelves | None,
    policy: Policy,
    quant: str,
    options: Mapping[str, Any],
) -> Engine:
    model: Any = policy.model
    spec = EngineSpec(
        kind=config.rollout.engine,
        model_config=model.config,
        generation_config=model.generation_config,
        tokenizer=policy.tokenizer,
        quant=quant,
        options=options,
        device=pick_device(config.device).type,
    )
    name = "actor" if quant == config.quant.format else "full"
    # One step ahead, the trainer's weights have moved on when rollouts are still sampled.
    can_resync = not config.rollout.ahead
    return EngineGroup(fleet, spec, name=name, can_resync=can_resync, shelves=shelves)


def build_actor(
    config: Config,
    policy: Policy,
    quant: str,
    choices: Choices | None = None,
    place: Place | None = None,
    scales: Mapping[str, Tensor] | None = None,
) -> Engine:
    """The chosen engine or the recipe's; `quant.kv` applies in the recipe's own format only.

    An engine of another format gives its cache back: two would leave the trainer too little memory.
    """
    rollout, engine = config.rollout, choices.engine if choices else None
    options: dict[str, Any] = {"compute_dtype": policy.compute_dtype}
    if engine is None and is_users_own(rollout.engine):
        engine = load_plugin(rollout.engine, "rollout.engine")
    if engine is not None:
        with naming_failures("rollout.engine"):
            actor = engine(policy.model, policy.tokenizer, quant=quant, **options)
        check_engine(actor)
        if not isinstance(actor, LocalEngine):
            vocabulary = policy.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
            actor = GuardedEngine(actor, vocabulary)
    else:
        place = place or functools.partial(_here, rollout.engine)
        actor = place(policy, quant, options | _engine_options(config, quant, scales))
    if config.quant.unified and quant == config.quant.format and isinstance(actor, LocalEngine):
        policy.adopt_codes_([layer.codes() for layer in actor.weights.layers])
    turns = (choices.episode if choices else None) or rollout.episode
    return EpisodeEngine(actor, turns, policy.tokenizer) if turns else actor


def _engine_options(
    config: Config, quant: str, scales: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Options of one of our engines."""
    rollout, is_main = config.rollout, quant == config.quant.format
    if rollout.engine == "vllm":
        sizes = {"max_batch": rollout.max_batch, "kv_memory_frac": rollout.kv_memory_frac}
        own = vars(rollout.vllm) | {"options": dict(rollout.vllm.options)}
        return {**sizes, **own, "online": rollout.vllm.online and quant == "int8"}
    options: dict[str, Any] = {"full_layers": config.quant.full_layers}
    if rollout.engine != "local":
        return options
    others = ("engine", "episode", "vllm", "ahead", "drafts")
    options |= {k: v for k, v in vars(rollout).items() if k not in others}
    if rollout.drafts == "histospec":
        histospec = config.systems.histospec
        options |= {"draft_tokens": histospec.step_tokens, "draft_window": histospec.window}
    options["release_kv"] = rollout.release_kv or not is_main
    options["kv"] = config.quant.kv if is_main else "none"
    options["scales"] = scales if is_main else None
    options["has_noise"] = config.quant.noise != "off"
    return options | {"unified": config.quant.unified and is_main}


def add_noise(config: Config, engine: Engine, step: int) -> dict[str, float]:
    """Disturb what samples the rollouts of a step, if the recipe asks for it (AQN)."""
    if config.quant.noise == "off":
        return {}
    actor = engine.engine if isinstance(engine, EpisodeEngine) else engine
    assert isinstance(actor, LocalEngine), "the rules ask for it"
    # UAQ makes the norms larger, and the same noise has to keep up with them.
    sigma = noise_sigma(step, config.steps, **vars(config.systems.aqn))
    sigma *= config.quant.update_scale
    if sigma:
        actor.add_noise_(sigma, derive_seed(config.seed, "aqn", step))
    return {"aqn/sigma": sigma}
