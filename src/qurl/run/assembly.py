"""From a recipe to live parts: policy, learner, engines, task and grader, fresh or resumed."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any, cast

import torch

from qurl.advantages import ESTIMATORS, Estimator, critic_advantages
from qurl.config import AlgoConfig, Config, check_combinations
from qurl.config.rules import BUILT_IN, NEEDS_EVAL_PATH, find_warnings, named_part, needs_file
from qurl.errors import ConfigError
from qurl.losses import SURROGATES, Surrogate, facts_of
from qurl.objectives import Advantage, Objective
from qurl.ops.device import default_dtype, pick_device
from qurl.plugins import is_users_own, load_plugin, name_of
from qurl.quant import rescale_, unscale_
from qurl.quant.linear import projections
from qurl.quant.scaling import uaq_scale
from qurl.quant.tracking import UpdateTracker
from qurl.rewards import GradingPool, GradingPools, Pool, Reward
from qurl.rollout import Engine, build_engine
from qurl.rollout.engine import context_length
from qurl.rollout.episode import Episode, EpisodeEngine
from qurl.rollout.local import LocalEngine
from qurl.run.checkpoint import (
    load_checkpoint,
    load_saved_adapters,
    load_saved_policy,
    newest_sound,
    save_checkpoint,
    set_aside,
    staged_folder,
)
from qurl.run.directory import INITIAL, Run
from qurl.run.machine import describe_machine
from qurl.run.rehearsal import compare_splits, rehearse
from qurl.sampling import ProblemStream, Selector
from qurl.seeds import derive_seed
from qurl.tasks import Draw, GeneratedTask, JoinedTask, Task, load_task
from qurl.tasks.joined import rewards_of
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.dither import dither_
from qurl.trainer.learner import Learner
from qurl.trainer.policy import Policy, Untrained, load_policy
from qurl.trainer.scratch import Example, build_tiny_llama, warm_start_
from qurl.types import Problem

EngineFactory = Callable[..., Engine]
"""`factory(model, tokenizer, *, quant, compute_dtype)` makes an engine, as `build_engine` does."""

PARTS = ("objective", "advantage", "engine", "task", "reward", "select", "episode")
KEYS = {"task" if key == "task.name" else key.partition(".")[2]: key for key in BUILT_IN}
"""Key of the recipe that names each part of a run."""
NAMES: dict[Any, str] = {f: name for t in (SURROGATES, ESTIMATORS) for name, f in t.items()}


@dataclass(frozen=True)
class Choices:
    """The parts that make one run different from another, as objects or by name."""

    objective: Surrogate
    advantage: Estimator
    task: Task | Draw | str
    select: Selector | str
    engine: EngineFactory | None
    reward: Reward | None
    episode: Episode | None
    """None for the last three: as the recipe says."""

    @classmethod
    def of(cls, config: Config, *parts: Any) -> Choices:
        """Parts in the order of `train`; for None, what the recipe names. Refuses what clashes."""
        given: dict[str, Any] = dict(zip_longest(PARTS, parts))
        for part, value in given.items():
            if isinstance(value, str):
                remedy = f"a name belongs into the recipe, as {KEYS[part]}"
                raise ConfigError(f"train({part}={value!r}) takes the part itself; {remedy}")
        built_in = {"objective": SURROGATES, "advantage": ESTIMATORS, "engine": {}}
        for part, functions in built_in.items():
            name, key = named_part(config, KEYS[part]), KEYS[part]
            if given[part] is None:
                given[part] = load_plugin(name, key) if is_users_own(name) else functions.get(name)
        engine, methods = given["engine"], ("sync", "stream", "generate", "score")
        lacks = ", ".join(method for method in methods if not hasattr(engine, method))
        if isinstance(engine, type) and lacks:
            raise ConfigError(
                f"rollout.engine: {engine.__name__} lacks {lacks} (qurl.rollout.Engine)"
            )
        given["task"] = given["task"] or config.task.name
        given["select"] = given["select"] or config.sampling.select
        choices = cls(**given)
        if config.algo.kl_in_reward and choices.advantage is not critic_advantages:
            raise ConfigError("algo.kl_in_reward = true needs the built-in algo.advantage = 'gae'")
        check_combinations(config, "config", *choices.facts)
        return choices

    def record_in(self, config: Config) -> Config:
        """The config with the names of parts given as objects, as its run directory keeps it."""
        for part, key in KEYS.items():
            value, name = getattr(self, part), named_part(config, key)
            is_named = is_users_own(name) and callable(value) and load_plugin(name, key) is value
            if callable(value) and not is_named:
                spec = (
                    NAMES.get(value)
                    or name_of(value)
                    or f"__main__:{getattr(value, '__qualname__', 'part')}"
                )
                section, _, field = key.partition(".")
                changed = dataclasses.replace(getattr(config, section), **{field: spec})
                config = dataclasses.replace(config, **{section: changed})
        return config

    @property
    def facts(self) -> tuple[Objective, Advantage]:
        """Facts of the objective and of the advantage, which may carry none."""
        return facts_of(self.objective), getattr(self.advantage, "facts", Advantage())


@dataclass
class Parts:
    """What the loop works with."""

    learner: Learner
    advantage: Estimator
    engine: Engine
    full_engine: Engine
    """The engine of full-precision evaluations; the quantized actor if those need no other."""
    stream: ProblemStream
    held_out: list[Problem]
    pool: Pool
    tracker: UpdateTracker | None
    first_step: int
    build_engine: Callable[[], Engine]
    fingerprints: Mapping[str, str]
    """Of the data files, by the key that names them."""
    is_full: bool = False
    """Whether rollouts have fallen back to full precision."""

    @property
    def actor(self) -> Engine:
        """The engine that samples rollouts."""
        return self.full_engine if self.is_full else self.engine

    def renew_engine(self) -> None:
        """Build the engine again: new buffers, codes, scales and CUDA graphs."""
        is_only = self.full_engine is self.engine
        self.engine = self.build_engine()
        if is_only:
            self.full_engine = self.engine

    def state(self) -> dict:
        """What a checkpoint holds beside weights and optimizers."""
        tracker = self.tracker.state_dict() if self.tracker is not None else None
        num_problems = len(self.stream.task)
        sizes = {"problems": num_problems, "fingerprints": dict(self.fingerprints)}
        return {**self.stream.state_dict(), **sizes, "tracker": tracker}

    def save(self, config: Config, run: Run, step: int, state: dict | None = None) -> None:
        """Write a checkpoint of `step`; `state` replaces one that has moved on already."""
        folder, state = run.path / "checkpoints", state or self.state()
        path = save_checkpoint(folder, step, self.learner, state, keep=config.save.keep)
        run.event("checkpoint", f"saved {path.name}", step=step)


@contextmanager
def assemble(config: Config, run: Run, choices: Choices) -> Iterator[Parts]:
    """Load or make everything, and resume from the newest checkpoint if there is one."""
    objective, advantage = choices.facts
    for warning in find_warnings(config, objective, advantage):
        run.warn(warning)
    device = prepare_torch(config)
    machine = describe_machine(device)
    run.event("start", f"on {machine['device']}", machine=machine)
    if config.model.path == "scratch" and not (run.path / INITIAL).exists():
        num_steps = config.model.scratch.warm_start_steps
        run.progress.print(f"making a model from scratch: {num_steps} supervised steps")
    initial = initial_model(config, run.path, device)
    checkpoint, damaged = newest_sound(run.path / "checkpoints")
    policy, reference = _load_policies(config, initial, checkpoint, device)
    learner = Learner(
        policy,
        config,
        reference=reference,
        objective=choices.objective,
        advantage=advantage,
    )
    prompts = (policy.tokenizer, policy.model.config, choices.task)
    task = load_split(config, "train", *prompts)
    held_out, data = [], {"train": task}
    if config.eval.every:
        data["eval"] = load_split(config, "eval", *prompts)
        held_out = held_out_problems(config, data["eval"])
        if note := compare_splits(task, data["eval"]):
            run.warn(note)
    prints = {split: getattr(part, "fingerprint", "") for split, part in data.items()}
    for note in (*policy.notes, *task.notes):
        run.warn(note)
    stream = ProblemStream(task, config.seed, choices.select)
    tracker = _build_tracker(config, policy, run)
    first_step = 0
    if not checkpoint:
        _prepare_masters(config, learner, run)
    learner.narrow_masters_()
    if checkpoint:
        state = load_checkpoint(checkpoint, learner)
        _warn_of_changed_data(state, prints, run)
        first_step = _resume(state, stream, tracker, run)
    graded = () if choices.reward else data.values()
    with build_pool(config, choices.reward or task.reward, *graded) as pool:
        if first_step == 0 and choices.reward is None:
            _try_grader(config, task, pool, run)
        build = functools.partial(build_actor, config, policy, config.quant.format, choices)
        engine = full_engine = build()
        if config.has_full_engine:
            full_engine = build_actor(config, policy, "none", choices)
        parts = Parts(
            learner=learner,
            advantage=_configured(choices.advantage, config.algo),
            engine=engine,
            full_engine=full_engine,
            stream=stream,
            held_out=held_out,
            pool=pool,
            tracker=tracker,
            first_step=first_step,
            build_engine=build,
            fingerprints=prints,
        )
        _set_aside(damaged, first_step, run)
        run.rewind(first_step)  # last: if anything above fails, nothing logged is touched
        yield parts


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
    if checkpoint:
        policy = load_saved_policy(checkpoint, *precision)
    else:
        policy = load_policy(initial, *precision)
    return policy, load_policy(initial, *precision).freeze_() if has_reference else None


def _configured(advantage: Estimator, algo: AlgoConfig) -> Estimator:
    """GAE with the recipe's settings; other advantages have none."""
    if advantage is not critic_advantages:
        return advantage
    kl_coef = algo.kl_coef if algo.kl_in_reward else 0.0
    return functools.partial(critic_advantages, gamma=algo.gamma, lam=algo.lam, kl_coef=kl_coef)


def _resume(state: dict, stream: ProblemStream, tracker: UpdateTracker | None, run: Run) -> int:
    """Take over the state of a checkpoint; returns the step to go on with."""
    num_problems = len(stream.task)
    stream.load_state_dict(state)
    if (num_saved := state.get("problems", num_problems)) != num_problems:
        run.warn(
            f"the task had {num_saved} problems when the run was saved and has {num_problems} now: "
            "their order has changed, so some come twice in this epoch"
        )
    if tracker is not None:
        tracker.load_state_dict(state["tracker"])
    return state["step"]


def _warn_of_changed_data(state: Mapping[str, Any], prints: Mapping[str, str], run: Run) -> None:
    """Say which data files have other contents than when the checkpoint was saved."""
    effects = {
        "train": "the training data has changed since the run was saved: it goes on with others",
        "eval": "the held-out data has changed since the run was saved: accuracies do not compare "
        "with those before",
    }
    for split, saved in state.get("fingerprints", {}).items():
        if saved and prints.get(split, saved) != saved:
            run.warn(effects[split])


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
        return run_path / INITIAL
    from transformers.utils.logging import disable_progress_bar

    tokenizer = build_tokenizer()
    task = load_split(config, "train", tokenizer)
    if not isinstance(task, GeneratedTask):
        raise ConfigError(
            f"model.path = 'scratch' needs a generated task to learn from, not {task.name!r}; set "
            "model.path to a pretrained model, or task.name to arithmetic or countdown"
        )

    def example(row: int) -> Example:
        problem, end = task[row], cast(int, tokenizer.eos_token_id)
        answer = tokenizer.encode(task.worked_answer(problem), add_special_tokens=False)
        return list(problem.prompt_ids), [*answer, end]

    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.seed, "scratch"))
        model = build_tiny_llama(config.model.scratch, tokenizer).to(device)
    warm_start_(model, example, len(task), config.model.scratch, config.seed)
    disable_progress_bar()  # it would garble the run's own lines
    with staged_folder(run_path / INITIAL) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return run_path / INITIAL


def load_split(
    config: Config,
    split: str,
    tokenizer: Any = None,
    model_config: Any = None,
    task: Task | Draw | str = "",
) -> Task:
    """A split of the recipe's task, or of a given one, whose prompts leave room for completions."""
    options, is_eval = config.task, split == "eval"
    if not isinstance(task, str) and not callable(task):
        if not is_eval:
            return task
        task = "file"  # a `Task` object is its own training split only
    task = task or options.name
    several, one = ("eval_sets", "eval_path") if is_eval else ("mix", "path")
    key = several if getattr(options, several) else one
    if is_eval and isinstance(task, str) and needs_file(task) and not getattr(options, key):
        raise ConfigError(f"there are no held-out problems: {NEEDS_EVAL_PATH}")
    section = "eval" if is_eval and config.eval.max_tokens else "sampling"
    same = ("difficulty", "instruction", "skip_long_prompts", "reward", "rewards", "system")
    same += ("chat_template_kwargs",)
    load = functools.partial(
        load_task,
        task,
        path_key=f"task.{key}",
        split=split,
        tokenizer=tokenizer,
        seed=config.seed,
        **{key: getattr(options, key) for key in same},
        **_prompt_limit(config, section, model_config),
    )
    if key == one:
        return load(path=getattr(options, one))
    if is_eval:
        sets = options.held_out_files.items()
        return JoinedTask({name: load(path=path) for name, path in sets}, [1.0] * len(sets))
    shares = options.training_files
    return JoinedTask({path: load(path=path) for path in shares}, [*shares.values()])


def held_out_problems(config: Config, task: Task) -> list[Problem]:
    """The first problems of the held-out split, as many as are evaluated; so many of each set."""
    starts = [0, *accumulate(task.sizes)] if isinstance(task, JoinedTask) else [0, len(task)]
    num = config.eval.problems
    return [task[i] for a, b in pairwise(starts) for i in range(a, min(a + num, b))]


def _prompt_limit(config: Config, section: str, model_config: Any) -> dict[str, Any]:
    """Room for completions in the model's context: too long a prompt is found before training."""
    max_tokens = getattr(config, section).max_tokens
    context = context_length(model_config) if model_config is not None else None
    stated = config.task.max_prompt_tokens
    if context is None or context - max_tokens >= stated:
        return {"max_prompt_tokens": stated}
    if max_tokens >= context:
        raise ConfigError(
            f"{section}.max_tokens = {max_tokens} leaves no room for a prompt: the model's "
            f"max_position_embeddings is {context}; lower {section}.max_tokens"
        )
    limited_by = f"max_position_embeddings - {section}.max_tokens = {context} - {max_tokens}"
    return {"max_prompt_tokens": context - max_tokens, "limited_by": limited_by}


def build_pool(config: Config, reward: Reward | str, *tasks: Task) -> Pool:
    """The grading processes of a reward, and of those that rows of the tasks name."""
    task = config.task
    limits = {"timeout": task.grade_timeout, "timeout_score": task.timeout_score}
    options = {"workers": task.grade_workers, "memory": task.grade_memory, **limits}
    others = frozenset().union(*map(rewards_of, tasks)) - {reward}
    if not others:
        return GradingPool(reward, **options)
    return GradingPools(reward, sorted(others), **options)


def build_actor(
    config: Config, policy: Policy, quant: str, choices: Choices | None = None
) -> Engine:
    """The chosen engine or the recipe's; `quant.kv` applies in the recipe's own format only.

    An engine of another format gives its cache back: two would leave the trainer too little memory.
    """
    rollout, engine = config.rollout, choices.engine if choices else None
    options: dict[str, Any] = {"compute_dtype": policy.compute_dtype}
    if engine is None and is_users_own(rollout.engine):
        engine = load_plugin(rollout.engine, "rollout.engine")
    if engine is None:
        options["full_layers"] = config.quant.full_layers
    if engine is None and rollout.engine == "local":
        options |= {k: v for k, v in vars(rollout).items() if k not in ("engine", "episode")}
        is_main = quant == config.quant.format
        options["release_kv"] = rollout.release_kv or not is_main
        options["kv"] = config.quant.kv if is_main else "none"
        options["unified"] = config.quant.unified and is_main
    factory = engine or functools.partial(build_engine, rollout.engine)
    actor = factory(policy.model, policy.tokenizer, quant=quant, **options)
    if config.quant.unified and quant == config.quant.format and isinstance(actor, LocalEngine):
        policy.adopt_codes_([layer.codes() for layer in actor.weights.layers])
    turns = (choices.episode if choices else None) or rollout.episode
    return EpisodeEngine(actor, turns, policy.tokenizer) if turns else actor


def _build_tracker(config: Config, policy: Policy, run: Run) -> UpdateTracker | None:
    if config.quant.track_rows == 0:
        return None
    if not any(projections(policy.model)):
        kind = type(policy.model).__name__
        run.warn(f"{kind} has no layer named like q_proj: updates are not tracked")
        return None
    dtype = policy.compute_dtype  # weights are rounded to it before they are quantized
    if config.quant.format == "none":  # hf samples from the masters themselves
        dtype = None if config.rollout.engine == "hf" else default_dtype(policy.device)
    quant = config.quant
    return UpdateTracker(quant.format, quant.track_rows, dtype, quant.full_layers)


def _prepare_masters(config: Config, learner: Learner, run: Run) -> None:
    """Change weights once, before training: UAQ and dither. Outputs stay, up to rounding."""
    quant, options, policy = config.quant, config.experimental, learner.policy
    if (carried := uaq_scale(policy.model)) != 1:
        unscale_(policy.model)
        run.warn(
            f"model.path = {config.model.path!r} carried UAQ with s = {carried:g} from an earlier "
            f"run; it was folded back, and quant.update_scale = {quant.update_scale:g} counts"
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
        run.warn(f"experimental.dither left on their grid: {', '.join(kept)}")
    if learner.critic is not None:
        dither_(learner.critic.backbone, config.seed)
