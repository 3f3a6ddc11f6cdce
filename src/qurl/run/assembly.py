"""From a recipe to live parts: policy, learner, engines, task and grader, fresh or resumed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qurl.advantages import Estimator, critic_advantages
from qurl.config import AlgoConfig, Config
from qurl.config.rules import find_warnings
from qurl.errors import ConfigError
from qurl.losses import Surrogate
from qurl.objectives import ADVANTAGES, Advantage, with_facts
from qurl.ops.device import default_dtype, pick_device
from qurl.plugins import is_users_own, naming_failures
from qurl.quant import rescale_, unscale_
from qurl.quant.linear import frozen_scales, projections
from qurl.quant.scaling import uaq_scale
from qurl.quant.tracking import UpdateTracker
from qurl.rewards import GradingPool, GradingPools, Pool, Reward
from qurl.rollout import Engine
from qurl.rollout.engine import close
from qurl.run.checkpoint import (
    AnyLearner,
    check_untrained,
    load_checkpoint,
    load_saved_adapters,
    load_saved_policy,
    naming_unreadable,
    newest_sound,
    save_checkpoint,
    save_folder,
    set_aside,
)
from qurl.run.choices import Choices
from qurl.run.directory import INITIAL, Run
from qurl.run.engines import LOGS, build_actor, open_place
from qurl.run.inputs import lacks_answers
from qurl.run.machine import describe_machine
from qurl.run.rehearsal import compare_splits, rehearse
from qurl.run.splits import held_out_problems, load_split
from qurl.run.trial import try_advantage
from qurl.sampling import Hooks, ProblemStream, Sampled, Sampler, Setup
from qurl.sampling.histopipe import check_repeats
from qurl.seeds import derive_seed
from qurl.tasks import GeneratedTask, Task
from qurl.tasks.joined import rewards_of
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.dither import dither_
from qurl.trainer.learner import Learner
from qurl.trainer.parallel.group import GroupTracker, LearnerGroup
from qurl.trainer.parallel.processes import follow, is_follower, lead, num_launched
from qurl.trainer.parallel.ray import start_by_ray
from qurl.trainer.parallel.replicas import ReplicaGroup
from qurl.trainer.policy import Policy, Untrained, load_policy
from qurl.trainer.scratch import Example, build_tiny_llama, warm_start_
from qurl.types import Problem

AnyTracker = UpdateTracker | GroupTracker
IN_TURNS = (
    "rollout.ahead = 1 saves no time here: the engine is in the trainer's process, so they take "
    "turns, and rollouts are one update old all the same"
)


@dataclass
class Parts:
    """What the loop works with."""

    learner: AnyLearner
    advantage: Estimator
    engine: Engine
    full_engine: Engine
    """The engine of full-precision evaluations; the quantized actor if those need no other."""
    stream: ProblemStream
    hooks: Hooks
    held_out: list[Problem]
    pool: Pool
    tracker: AnyTracker | None
    first_step: int
    build_engine: Callable[[], Engine]
    fingerprints: Mapping[str, str]
    """Fingerprints of the data files, by split."""
    pending: Sampled | None = None
    """With `rollout.ahead`, the next step's rollouts; complete whenever a step has ended."""
    scales: Mapping[str, Tensor] | None = None
    """Scales of the untrained weights, if quant.scales is "frozen"."""
    is_full: bool = False
    """Whether rollouts have fallen back to full precision."""

    @property
    def actor(self) -> Engine:
        """The engine that samples rollouts."""
        return self.full_engine if self.is_full else self.engine

    def sampler(self, config: Config, step: int) -> Sampler:
        """Samples the rollouts of a step with the actor's present weights."""
        return Sampler(config, self.stream, self.actor, self.pool, step, self.hooks)

    def driver_bytes(self) -> dict[str, float]:
        """What passed through this process since the last time, if there are others."""
        places: tuple[Any, ...] = (self.learner, self.engine, self.full_engine)
        # An engine that is named twice has nothing left the second time.
        counts = [place.traffic.take() for place in places if hasattr(place, "traffic")]
        return {"parallel/driver_bytes": float(sum(counts))} if counts else {}

    def renew_engine(self) -> None:
        """Build the engine again: new buffers, codes, scales and CUDA graphs."""
        is_only = self.full_engine is self.engine
        old, self.engine = self.engine, self.build_engine()
        close(old)
        if is_only:
            self.full_engine = self.engine

    def close(self) -> None:
        close(self.engine)
        close(self.full_engine)

    def state(self) -> dict:
        """What a checkpoint holds beside weights and optimizers."""
        tracker = self.tracker.state_dict() if self.tracker is not None else None
        num_problems = len(self.stream.task)
        sizes = {"problems": num_problems, "fingerprints": dict(self.fingerprints)}
        parts = {"tracker": tracker, "pending": self.pending, "hooks": self.hooks.state_dict()}
        if self.scales is not None:
            parts["scales"] = dict(self.scales)
        return {**self.stream.state_dict(), **sizes, **parts}

    def save(self, config: Config, run: Run, step: int, state: dict | None = None) -> None:
        """Write a checkpoint of `step`; `state` replaces one that has moved on already."""
        folder, state = run.path / "checkpoints", state or self.state()
        if self.tracker is not None:
            state = {**state, "tracker": self.tracker.collect(state["tracker"])}
        pending: Sampled | None = state["pending"]
        state = {**state, "pending": pending.state_dict() if pending else {}}
        path = save_checkpoint(folder, step, self.learner, state, keep=config.save.keep)
        run.event("checkpoint", f"saved {path.name}", step=step)


@contextmanager
def assemble(config: Config, run: Run, choices: Choices) -> Iterator[Parts]:
    """Load or make everything, and resume from the newest checkpoint if there is one."""
    objective, advantage = choices.facts
    for warning in find_warnings(config, objective, advantage):
        run.warn(warning)
    device = prepare_torch(config)
    _announce(config, run, device)
    initial = initial_model(config, run.path, device)
    checkpoint, damaged = newest_sound(run.path / "checkpoints")
    made_of = (config, initial, checkpoint, choices.objective, advantage)
    make = functools.partial(make_learner, *made_of)
    with ExitStack() as stack:
        learner = stack.enter_context(_open_learner(config, run, device, make))
        policy = learner.policy
        task, data, held_out = _load_data(config, policy, choices, run)
        try_advantage(choices.advantage, config, task)
        prints = {split: getattr(part, "fingerprint", "") for split, part in data.items()}
        for note in (*policy.notes, *task.notes):
            run.warn(note)
        vocabulary = policy.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        hooks = choices.build_hooks(Setup(config, task, vocabulary))
        keeps = config.sampling.keep_responses
        stream = ProblemStream(task, config.seed, hooks.select, keeps_responses=keeps)
        state = load_checkpoint(checkpoint, learner) if checkpoint else {}
        scales = _frozen_scales(config, learner, state)
        tracker = _build_tracker(config, learner, run, scales)
        if checkpoint:
            _resume(checkpoint, state, prints, stream, hooks, tracker, run)
        graded = () if choices.reward else data.values()
        pool = stack.enter_context(build_pool(config, choices.reward or task.reward, *graded))
        if not state.get("step") and choices.reward is None:
            _try_grader(config, task, pool, run)
        has_episode = bool(choices.episode or config.rollout.episode)
        place = stack.enter_context(open_place(config, learner, run, has_episode=has_episode))
        actor_of = (config, policy, config.quant.format, choices, place, scales)
        build = functools.partial(build_actor, *actor_of)
        engine = full_engine = build()
        if config.has_full_engine:
            full_engine = build_actor(config, policy, "none", choices, place)
        parts = Parts(
            learner=learner,
            advantage=_configured(choices.advantage, config.algo),
            engine=engine,
            full_engine=full_engine,
            stream=stream,
            hooks=hooks,
            held_out=held_out,
            pool=pool,
            tracker=tracker,
            first_step=state.get("step", 0),
            build_engine=build,
            fingerprints=prints,
            pending=Sampled.load(state["pending"]) if state.get("pending") else None,
            scales=scales,
        )
        stack.callback(parts.close)
        if config.rollout.ahead and not getattr(parts.actor, "works_elsewhere", False):
            run.warn(IN_TURNS)
        _set_aside(damaged, parts.first_step, run)
        run.rewind(parts.first_step)  # last: if anything above fails, nothing logged is touched
        if parts.first_step >= config.steps:
            run.progress.print(
                f"all {config.steps} steps are done; raise steps to go on, or choose another "
                "run_dir to start again"
            )
        yield parts


def _frozen_scales(
    config: Config, learner: AnyLearner, state: Mapping[str, Any]
) -> Mapping[str, Tensor] | None:
    """The scales of the untrained weights if `quant.scales` keeps them, else None."""
    if config.quant.scales != "frozen":
        return None
    of_weights = (learner.whole_model(), config.quant.format, learner.policy.compute_dtype)
    return state.get("scales") or frozen_scales(*of_weights)


def _announce(config: Config, run: Run, device: torch.device) -> None:
    """Say what the run is on, and what takes long before its first step."""
    machine = describe_machine(device)
    run.event("start", f"on {machine['device']}", machine=machine)
    if config.model.path == "scratch" and not (run.path / INITIAL).exists():
        num_steps = config.model.scratch.warm_start_steps
        run.progress.print(f"making a model from scratch: {num_steps} supervised steps")


def make_learner(
    config: Config,
    initial: str | Path,
    checkpoint: Path | None,
    objective: Surrogate,
    advantage: Advantage,
) -> Learner:
    """The models and optimizers of a run, untrained or as saved; `load_checkpoint` comes after."""
    policy, reference = _load_policies(config, initial, checkpoint, pick_device(config.device))
    parts = {"objective": objective, "advantage": advantage}
    learner = Learner(policy, config, reference=reference, **parts)
    if checkpoint is None:
        _prepare_masters(config, learner)
    learner.narrow_masters_()
    return learner


@contextmanager
def _open_learner(
    config: Config, run: Run, device: torch.device, make: Callable[[], Learner]
) -> Iterator[AnyLearner]:
    """A learner in this process, or on as many ranks as the recipe asks for.

    The other ranks wait while it is loaded, or load their own.
    """
    parallel, start = config.parallel, None
    if parallel.trainers == 1:
        yield make()
        return
    if parallel.address:
        where = (parallel.address, run.path / LOGS, parallel.timeout)
        start = functools.partial(start_by_ray, *where)
    with lead(parallel.trainers, device.type, config.threads, start) as workers:
        is_sharded = parallel.is_sharded
        yield LearnerGroup(workers, make()) if is_sharded else ReplicaGroup(workers, make)


def follow_driver(config: Config) -> bool:
    """Serve the driver of this run, if torchrun started this process for that; else False."""
    size, trainers = num_launched(), config.parallel.trainers
    if size not in (None, trainers):
        raise ConfigError(
            f"parallel.trainers = {trainers}, but torchrun started {size} processes; use the same "
            "number"
        )
    if not is_follower():
        return False
    follow(prepare_torch(config).type, config.threads)
    return True


def _load_data(
    config: Config, policy: Policy, choices: Choices, run: Run
) -> tuple[Task, dict[str, Task], list[Problem]]:
    """The training task, all splits by name, and the held-out problems."""
    prompts = (policy.tokenizer, policy.model.config, choices.task)
    task = load_split(config, "train", *prompts)
    check_repeats(config, len(task))
    held_out, data = [], {"train": task}
    if config.eval.every:
        data["eval"] = load_split(config, "eval", *prompts)
        held_out = held_out_problems(config, data["eval"])
        if note := compare_splits(task, data["eval"]):
            run.warn(note)
    return task, data, held_out


def _try_grader(config: Config, task: Task, pool: Pool, run: Run) -> None:
    """Your own reward may cost money, or want whole groups: `qurl validate` tries it."""
    if is_users_own(task.reward):
        return
    if note := rehearse(task, pool).check(config.task.grade_timeout):
        run.warn(note)


def _set_aside(damaged: Mapping[Path, str], first_step: int, run: Run) -> None:
    """Put damaged checkpoints out of the way, aloud."""
    for path, damage in damaged.items():
        kept = set_aside(path).name
        run.warn(f"{path.name} is damaged ({damage}), kept as {kept}: resumed at {first_step}")


def _load_policies(
    config: Config, initial: str | Path, checkpoint: Path | None, device: torch.device
) -> tuple[Policy, Policy | Untrained | None]:
    """The policy, untrained or as saved, and the reference if the recipe needs one."""
    precision = (config.model, device, config.quant)
    has_reference = config.algo.kl_coef > 0
    if config.model.lora_rank:
        policy = load_policy(initial, *precision).adapt_(config.model, config.seed)
        if checkpoint:
            load_saved_adapters(checkpoint, policy)
        return policy, Untrained(policy) if has_reference else None
    options = {"is_sharded": config.parallel.is_sharded}
    untrained = functools.partial(load_policy, initial, *precision, **options)
    policy = load_saved_policy(checkpoint, *precision, **options) if checkpoint else untrained()
    return policy, untrained().freeze_() if has_reference else None


def _configured(advantage: Estimator, algo: AlgoConfig) -> Estimator:
    """GAE with the recipe's settings; other advantages have none."""
    if is_users_own(algo.advantage):
        return naming_failures("algo.advantage")(advantage)
    if advantage is not critic_advantages:
        return advantage
    kl_coef = algo.kl_coef if algo.kl_in_reward else 0.0
    lambdas = {"lam": algo.lam, "critic_lam": algo.critic_lam, "lam_alpha": algo.lam_alpha}
    configured = functools.partial(critic_advantages, gamma=algo.gamma, kl_coef=kl_coef, **lambdas)
    return with_facts(ADVANTAGES["gae"])(configured)


def _resume(
    checkpoint: Path,
    state: dict,
    prints: Mapping[str, str],
    stream: ProblemStream,
    hooks: Hooks,
    tracker: AnyTracker | None,
    run: Run,
) -> None:
    """Take over the state of a checkpoint, and say what has changed since."""
    effects = {
        "train": "the training data has changed since the run was saved: the run goes on with "
        "other problems",
        "eval": "the held-out data has changed since the run was saved: accuracies do not compare "
        "with those before",
    }
    for split, saved in state.get("fingerprints", {}).items():
        if saved and prints.get(split, saved) != saved:
            run.warn(effects[split])
    hooks.load_state_dict(state.get("hooks", {}))
    with naming_unreadable(checkpoint):
        stream.load_state_dict(state)
        if tracker is not None:
            tracker.load_state_dict(state["tracker"])
    num_problems = len(stream.task)
    if (num_saved := state.get("problems", num_problems)) != num_problems:
        run.warn(
            f"the task had {num_saved} problems when the run was saved and has {num_problems} now: "
            "their order has changed, so some come twice in this epoch"
        )


def prepare_torch(config: Config) -> torch.device:
    """Set threads and seed, and choose the device."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.model.deterministic:
        # Read by cuBLAS at its first product; torch's deterministic mode asks for it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return pick_device(config.device)


def initial_model(config: Config, run_path: Path, device: torch.device) -> str | Path:
    """Where the untrained weights are; a scratch model is made once and kept with the run."""
    if config.model.path != "scratch":
        return config.model.path
    if (run_path / INITIAL).exists():
        check_untrained(run_path / INITIAL)
        return run_path / INITIAL
    from transformers.utils.logging import disable_progress_bar

    tokenizer = build_tokenizer()
    task = load_split(config, "train", tokenizer)
    if not isinstance(task, GeneratedTask):
        raise lacks_answers(task.name)

    def example(row: int) -> Example:
        problem, end = task[row], cast(int, tokenizer.eos_token_id)
        answer = tokenizer.encode(task.worked_answer(problem), add_special_tokens=False)
        return list(problem.prompt_ids), [*answer, end]

    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.seed, "scratch"))
        model = build_tiny_llama(config.model.scratch, tokenizer).to(device)
    warm_start_(model, example, len(task), config.model.scratch, config.seed)
    disable_progress_bar()  # it would garble the run's own lines
    return save_folder(run_path / INITIAL, model, tokenizer, has_checksums=True)


def build_pool(config: Config, reward: Reward | str, *tasks: Task) -> Pool:
    """The grading processes of a reward, and of those that rows of the tasks name."""
    task = config.task
    limits = {"timeout": task.grade_timeout, "timeout_score": task.timeout_score}
    options = {"workers": task.grade_workers, "memory": task.grade_memory, **limits}
    others = frozenset().union(*map(rewards_of, tasks)) - {reward}
    if not others:
        return GradingPool(reward, **options)
    return GradingPools(reward, sorted(others), **options)


def _build_tracker(
    config: Config, learner: AnyLearner, run: Run, scales: Mapping[str, Tensor] | None
) -> AnyTracker | None:
    policy = learner.policy
    if config.quant.track_rows == 0:
        return None
    if not any(projections(policy.model)):
        kind = type(policy.model).__name__
        run.warn(f"{kind} has no layer named like q_proj: updates are not tracked")
        return None
    dtype = policy.compute_dtype  # weights are rounded to it before they are quantized
    if config.quant.format == "none":  # hf samples from the masters themselves
        dtype = None if config.rollout.engine == "hf" else default_dtype(learner.device)
    quant, format = config.quant, config.quant.format
    if config.model.has_coded_base:  # the actor's adapters are the trainer's
        dtype, format = None, "none"
    options = (quant.track_rows, dtype, quant.full_layers, scales)
    return learner.watch(UpdateTracker(format, *options))


def _prepare_masters(config: Config, learner: Learner) -> None:
    """Change weights once, before training: UAQ and dither. Outputs stay, up to rounding."""
    quant, options, policy = config.quant, config.experimental, learner.policy
    if (carried := uaq_scale(policy.model)) != 1:
        unscale_(policy.model)
        policy.notes += (
            f"model.path = {config.model.path!r} carried UAQ with s = {carried:g} from an earlier "
            f"run; it was folded back, and quant.update_scale = {quant.update_scale:g} counts",
        )
    if quant.update_scale > 1:
        also = {"o_proj": options.scale_o_proj, "down_proj": options.scale_down_proj}
        rescale_(policy.model, quant.update_scale, **also)
    if not options.dither:
        return
    if policy.compute_dtype != torch.bfloat16:
        raise ConfigError(
            f"experimental.dither = true, but the trainer computes in {policy.compute_dtype}, "
            'which sees every update; leave it off, or set model.compute_dtype = "bfloat16"'
        )
    if kept := dither_(policy.model, config.seed):
        policy.notes += (f"experimental.dither left on their grid: {', '.join(kept)}",)
    if learner.critic is not None:
        dither_(learner.critic.backbone, config.seed)
