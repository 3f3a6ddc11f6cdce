"""Which settings go together: what is refused at start-up, and what only gets a warning.

Rules read facts about objectives and advantages (`qurl.objectives`), never their names. Facts of
your own parts are known once those are loaded; without them, the rules that need them are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from qurl.config.schema import Config
from qurl.config.system_rules import find_system_mistakes, find_system_warnings, unused_systems
from qurl.errors import ConfigError
from qurl.objectives import ADVANTAGES, OBJECTIVES, Advantage, Objective, parse_rejection
from qurl.plugins import check_plugin, is_users_own

GENERATED = ("arithmetic", "countdown")
BUILT_IN: Mapping[str, Sequence[str]] = {
    "algo.objective": tuple(OBJECTIVES),
    "algo.advantage": tuple(ADVANTAGES),
    "rollout.engine": ("local", "hf", "vllm"),
    "rollout.episode": ("",),
    "sampling.select": ("shuffle", "greso", "dots"),
    "sampling.budget": ("uniform", "e3"),
    "sampling.thermostat": ("off", "e3"),
    "sampling.replay": ("off", "recent"),
    "batch.subselect": ("all", "shuffle-r1", "pods"),
    "task.name": (*GENERATED, "gsm8k", "math", "code", "file", "gym:<name>", "<path>.jsonl"),
    "task.reward": ("auto", "math", "exact", "countdown", "code", "gym:<name>"),
}
"""Keys that name a part, and their built-in parts; `module:name` is one of your own."""

ROW_REWARDS = ("math", "exact", "countdown", "code")
"""Rewards that a row of a file may name by itself."""
NEEDS_EVAL_PATH = "set task.eval_path, because a file has no held-out problems of its own"
_LARGEST_STEP = 2**20


def find_unusable(tree: Any, key: str = "") -> Iterator[str]:
    """Values that have the right type, and that no file name, tensor or tokenizer can take."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from find_unusable(value, f"{key}.{name}".lstrip("."))
            yield from find_unusable(name, f"a name in {key or 'the recipe'}")
    elif isinstance(tree, tuple):
        for value in tree:
            yield from find_unusable(value, key)
    elif isinstance(tree, str) and "\0" in tree:
        yield f"{key} = {shorten(tree)} holds a NUL character; remove it"
    elif isinstance(tree, int) and abs(tree) >= (limit := 2 ** (63 if key == "seed" else 31)):
        yield f"{key} = {shorten(tree)} is too large; it must be below {limit}"


def shorten(value: Any) -> str:
    """A value for a message: its repr, of a screen line or two at most."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses very long decimals
        return f"an integer of {value.bit_length()} bits"
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # such an integer inside of a list, or a deep list
        return f"a {type(value).__name__}"
    return shown if len(shown) <= 200 else f"{shown[:150]}... ({len(shown)} characters)"


def find_mistakes(
    config: Config, objective: Objective | None = None, advantage: Advantage | None = None
) -> list[str]:
    """Combinations that cannot work, each with what to do about it."""
    objective = objective or OBJECTIVES.get(config.algo.objective)
    advantage = advantage or ADVANTAGES.get(config.algo.advantage)
    return [
        *_part_mistakes(config),
        *_algorithm_mistakes(config, objective, advantage),
        *_correction_mistakes(config, objective, advantage),
        *_precision_mistakes(config),
        *_vllm_mistakes(config),
        *_lora_mistakes(config, advantage),
        *_optimizer_mistakes(config),
        *_parallel_mistakes(config),
        *_data_mistakes(config),
        *find_system_mistakes(config, objective, advantage),
        *_other_mistakes(config),
    ]


def needs_file(task: str) -> bool:
    """Does a built-in task read its problems from a file?"""
    return not _is_generated(task) and not is_users_own(task)


def _is_generated(task: str) -> bool:
    return task in GENERATED or task.startswith("gym:")


def _part_mistakes(config: Config) -> Iterator[str]:
    named = [(key, attrgetter(key)(config), names) for key, names in BUILT_IN.items()]
    for label, value in config.task.rewards:
        named.append((f"task.rewards.{label}", value, ROW_REWARDS))
    for key, value, names in named:
        is_gym = value.startswith("gym:") and "gym:<name>" in names
        is_file = key == "task.name" and "." in value
        if is_users_own(value):
            try:
                check_plugin(value, key)
            except ConfigError as error:
                yield str(error)
        elif value not in names and not is_gym and not is_file:
            known = f"one of {', '.join(names)}" if any(names) else "empty"
            yield f"{key} = {value!r} is not {known}, nor module:name"


def _algorithm_mistakes(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    algo, size = config.algo, config.sampling.group_size
    if size < 2 and advantage and advantage.needs_group:
        reason = f"algo.advantage = {algo.advantage!r} compares completions of one problem"
        yield f"sampling.group_size = {size}: {reason} and needs at least 2"
    if size < 2 and algo.dynamic_sampling:
        yield f"sampling.group_size = {size}: algo.dynamic_sampling needs at least 2"
    if (updates := config.batch.minibatches) > (sequences := config.sequences_per_step):
        yield f"batch.minibatches = {updates} is more than the {sequences} sequences of a step"
    if algo.name in ("ppo", "vapo") and advantage and not advantage.needs_critic:
        critics = " or ".join(repr(name) for name, a in ADVANTAGES.items() if a.needs_critic)
        yield f"algo.advantage = {algo.advantage!r}: algo.name = {algo.name!r} means {critics}"
    if algo.kl_in_reward and algo.advantage != "gae":
        yield "algo.kl_in_reward = true needs algo.advantage = 'gae'; use the loss term instead"
    if config.experimental.weighted_kl and objective and not objective.is_weighted:
        yield f"experimental.weighted_kl = true: {algo.objective!r} has no importance weight"


def prox_readers(config: Config, advantage: Advantage | None) -> list[str]:
    """Settings that read the prox of all tokens before the first update.

    With one of them, no prox can be left to the training forwards.
    """
    algo, correction = config.algo, config.correction
    is_set = {
        "correction.reject": bool(correction.reject),
        "correction.veto": correction.veto is not None,
        "correction.batch_normalize": correction.batch_normalize,
        "algo.kl_in_reward": algo.kl_in_reward,
        f"algo.advantage = {algo.advantage!r}": advantage is not None and advantage.needs_prox,
    }
    return _chosen(is_set)


def _chosen(is_set: Mapping[str, bool]) -> list[str]:
    return [setting for setting, is_chosen in is_set.items() if is_chosen]


def _correction_mistakes(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    correction, name = config.correction, config.algo.objective
    low, high = correction.icepop_low, correction.icepop_high
    if correction.mode == "bypass":
        if objective and objective.against != "behav":
            yield f"correction.mode = 'bypass' needs algo.objective = 'ppo_behav', not {name!r}"
        if correction.reject or correction.veto is not None:
            yield "correction.reject and correction.veto need correction.mode = 'decoupled'"
    if correction.mode == "auto" and (readers := prox_readers(config, advantage)):
        remedy = "they read the prox of all tokens before the first update; use 'decoupled'"
        yield f"correction.mode = 'auto' does not go with {', '.join(readers)}: {remedy}"
    if correction.mode == "auto" and config.rollout.ahead:
        age = "rollout.ahead = 1 makes behav an update older than that"
        yield f"correction.mode = 'auto' takes behav for prox, and {age}; use 'decoupled'"
    if correction.kind == "icepop" and objective and not objective.is_truncated:
        truncated = " or ".join(repr(n) for n, o in OBJECTIVES.items() if o.is_truncated)
        yield f"correction.kind = 'icepop' needs algo.objective = {truncated}, not {name!r}"
    if low >= high:
        yield f"correction.icepop_low = {low} must lie below correction.icepop_high = {high}"
    elif not low <= 1 <= high:
        band = f"correction.icepop_low = {low} and correction.icepop_high = {high}"
        yield f"{band} must have 1 between them: as they are, nearly every weight would be 0"
    for rule in correction.reject:
        try:
            parse_rejection(rule)
        except ValueError as error:
            yield f"correction.reject: {error}"


def _precision_mistakes(config: Config) -> Iterator[str]:
    quant = config.quant
    if quant.kv != "none" and config.rollout.engine in ("hf", "vllm"):
        yield f"quant.kv = {quant.kv!r} needs rollout.engine = 'local'"
    if quant.full_layers and quant.format == "none":
        yield f"quant.full_layers = {quant.full_layers} needs a quant.format other than 'none'"
    if quant.full_layers and is_users_own(config.rollout.engine):
        yield f"quant.full_layers = {quant.full_layers} needs rollout.engine = 'local' or 'hf'"
    if not quant.unified:
        if quant.backward != "bf16":
            yield f"quant.backward = {quant.backward!r} needs quant.unified = true"
        return
    if quant.format in ("none", "nvfp4"):
        yield "quant.unified = true needs quant.format = 'int8', 'fp8' or 'fp8-block'"
    if config.model.compile:
        yield "quant.unified = true cannot be compiled; set model.compile = false"
    for name in config.alarms.falling_back:
        remedy = "a trainer in 8 bits needs a sampler in 8 bits; use 'warn' or 'stop'"
        yield f"alarms.{name} = 'full' does not go with quant.unified = true: {remedy}"


def _vllm_mistakes(config: Config) -> Iterator[str]:
    rollout, quant = config.rollout, config.quant
    options = rollout.vllm
    if rollout.engine != "vllm":
        if options.tensor_parallel > 1:
            parallel = f"rollout.vllm.tensor_parallel = {options.tensor_parallel}"
            yield f"{parallel} needs rollout.engine = 'vllm', not {rollout.engine!r}"
        return
    if quant.format not in ("none", "int8", "fp8"):
        yield f"quant.format = {quant.format!r}: rollout.engine = 'vllm' has none, int8 and fp8"
    if options.online and quant.format != "int8":
        yield f"rollout.vllm.online = true needs quant.format = 'int8', not {quant.format!r}"
    is_set = {
        "quant.full_layers": quant.full_layers > 0,
        "quant.unified": quant.unified,
        "rollout.deterministic": rollout.deterministic,
    }
    for key in _chosen(is_set):
        yield f"{key} does not go with rollout.engine = 'vllm'; use 'local'"


def _base_mistakes(config: Config) -> Iterator[str]:
    """A frozen base in codes (QeRL) needs these settings."""
    model, quant, engine = config.model, config.quant, config.rollout.engine
    if not model.has_coded_base:
        return
    chosen = f"model.base = {model.base!r}"
    if not model.lora_rank:
        yield f"{chosen} is frozen; set model.lora_rank to train adapters beside it"
    if quant.format != model.base:
        needed = f"quant.format = {model.base!r}, not {quant.format!r}"
        yield f"{chosen} needs {needed}: trainer and actor compute with the same codes"
    if engine not in ("local", "hf"):
        yield f"{chosen} needs rollout.engine = 'local' or 'hf', not {engine!r}"
    if quant.full_layers:
        yield f"{chosen} codes all layers; set quant.full_layers = 0"
    for name in config.alarms.falling_back:
        yield f"alarms.{name} = 'full': {chosen} leaves no full precision to fall back to"


def _lora_mistakes(config: Config, advantage: Advantage | None) -> Iterator[str]:
    rank, options, quant = config.model.lora_rank, config.experimental, config.quant
    yield from _base_mistakes(config)
    if not rank:
        return
    if advantage and advantage.needs_critic:
        critic = f"algo.advantage = {config.algo.advantage!r} trains a whole critic"
        yield f"model.lora_rank = {rank}: {critic}; use 'grpo', or model.lora_rank = 0"
    if quant.update_scale > 1:
        remedy = "UAQ would only scale the adapters; raise model.lora_alpha instead"
        yield f"model.lora_rank = {rank}, quant.update_scale = {quant.update_scale:g}: {remedy}"
    if options.norm_fed_lr_scale != 1 or options.dither:
        changed = "what experimental.norm_fed_lr_scale and experimental.dither change"
        yield f"model.lora_rank = {rank} freezes {changed}; leave them off"
    if config.model.compile:
        yield f"model.lora_rank = {rank} cannot be compiled; set model.compile = false"


def _optimizer_mistakes(config: Config) -> Iterator[str]:
    optim, model = config.optim, config.model
    chosen = f"optim.name = {optim.name!r}, optim.moments = {optim.moments!r}"
    if (optim.name, optim.moments) == ("adamw", "fp16"):
        yield f"{chosen}: FP16 cannot hold squares of gradients; use 'hadam', which keeps none"
    if (optim.name, optim.moments) == ("hadam", "8bit"):
        yield f"{chosen}: 8-bit codes are made for adamw; use 'adamw', or moments = 'fp16'"
    if optim.masters == "bf16":
        is_set = {
            f"model.lora_rank = {model.lora_rank}: adapters are small": model.lora_rank > 0,
            "model.compile = true: compiled layers are not tried with it": model.compile,
            "model.compute_dtype = 'float32': the trainer would see rounded weights": (
                model.compute_dtype == "float32"
            ),
            "experimental.dither = true: it moves FP32 masters": config.experimental.dither,
        }
        for clash in _chosen(is_set):
            yield f"optim.masters = 'bf16' does not go with {clash}; use 'fp32'"


def _parallel_mistakes(config: Config) -> Iterator[str]:
    """What is not built for engines elsewhere, and for sharded models."""
    parallel, engine = config.parallel, config.rollout.engine
    if parallel.engines and engine not in ("local", "vllm"):
        yield f"parallel.engines = {parallel.engines} needs rollout.engine = 'local' or 'vllm'"
    if parallel.engines and parallel.address and config.rollout.vllm.tensor_parallel > 1:
        shared = f"rollout.vllm.tensor_parallel = {config.rollout.vllm.tensor_parallel}"
        yield f"{shared} is not built for engines of a cluster, which get one GPU each"
    if parallel.engines or parallel.trainers > 1:
        yield from _shipping_mistakes(config)
    if parallel.engines and parallel.min_engines > parallel.engines:
        yield (
            f"parallel.min_engines = {parallel.min_engines} exceeds parallel.engines = "
            f"{parallel.engines}"
        )
    if (trainers := parallel.trainers) == 1:
        return
    if parallel.address.startswith("ray://"):
        yield (
            f"parallel.address = {parallel.address!r} with parallel.trainers = {trainers}: the "
            "first trainer is the driver and must be on a machine of the cluster; run qurl there, "
            "with HOST:PORT of its head or 'auto'"
        )
    for setting in find_unsharded(config) if parallel.is_sharded else ():
        remedy = "set parallel.shard = false, or use one trainer"
        yield f"{setting} is not built for the shards of parallel.trainers = {trainers}; {remedy}"


def find_unsharded(config: Config) -> list[str]:
    """Settings that shards do not go with."""
    is_set = {
        "model.compile = true": config.model.compile,
        f"model.lora_rank = {config.model.lora_rank}": config.model.lora_rank > 0,
        f"optim.moments = {config.optim.moments!r}": config.optim.moments == "fp16",
        f"optim.masters = {config.optim.masters!r}": config.optim.masters != "fp32",
        f"optim.name = {config.optim.name!r}": config.optim.name != "adamw",
    }
    return _chosen(is_set)


def _shipping_mistakes(config: Config) -> Iterator[str]:
    """What engines of several ranks or processes are not sent."""
    quant, rollout = config.quant, config.rollout
    is_set = {
        f"rollout.drafts = {rollout.drafts!r}": rollout.drafts != "off",
        "quant.format = 'nvfp4'": quant.format == "nvfp4",
        f"quant.scales = {quant.scales!r}": quant.scales != "dynamic",
        f"quant.noise = {quant.noise!r}": quant.noise != "off",
    }
    for setting in _chosen(is_set):
        yield (
            f"{setting} is built for one engine in the trainer's process; leave parallel.engines "
            "at 0 and parallel.trainers at 1"
        )


def _data_mistakes(config: Config) -> Iterator[str]:
    task = config.task
    files = {key: getattr(task, key) for key in ("path", "mix", "eval_path", "eval_sets")}
    if task.name == "file" and not any(files.values()):
        yield "task.name = 'file' needs task.path"
    for key, value in (files | {"rewards": task.rewards}).items():
        if value and _is_generated(task.name):
            drawn = f"task.name = {task.name!r} draws its problems"
            shown = dict(value) if isinstance(value, tuple) else value
            yield f"task.{key} = {shown!r}, but {drawn}; set it to 'file', 'gsm8k' or 'math'"
    if "." in task.name and task.path:
        yield f"task.name = {task.name!r} and task.path = {task.path!r} both name a file; keep one"
    for key in ("mix", "eval_sets"):
        if "" in (*dict(files[key]), *dict(files[key]).values()):
            yield f"task.{key} has an empty name; give each file one"
    for one, several in (("path", "mix"), ("eval_path", "eval_sets")):
        if files[one] and files[several]:
            yield f"task.{one} = {files[one]!r} and task.{several} exclude each other; keep one"
    for key in ("mix", "eval_sets", "rewards"):
        names = [name for name, _ in getattr(task, key)]
        if twice := {name for name in names if names.count(name) > 1}:
            yield f"task.{key} names {min(twice)!r} twice"
    for name, _ in task.eval_sets:
        if not re.fullmatch(r"[\w.-]+", name):
            yield f"task.eval_sets.{name!r}: a name has letters, digits, '_', '-' and '.' only"
    if task.mix and config.sampling.select != "shuffle":
        chosen = f"sampling.select = {config.sampling.select!r} chooses the problems itself"
        yield f"{chosen}, so that the shares of task.mix cannot count; use 'shuffle'"
    if config.eval.every and needs_file(task.name) and not (task.eval_path or task.eval_sets):
        yield f"eval.every = {config.eval.every}: {NEEDS_EVAL_PATH}"


def _other_mistakes(config: Config) -> Iterator[str]:
    scratch, save = config.model.scratch, config.save
    sizes = {
        "batch.problems x sampling.group_size": config.sequences_per_step,
        "eval.samples": config.eval.samples,
        "sampling.max_tokens": config.sampling.max_tokens,
        "eval.max_tokens": config.eval.max_tokens,
        "rollout.max_batch": config.rollout.max_batch,
        "model.lora_rank": config.model.lora_rank,
        "model.scratch.warm_start_batch": scratch.warm_start_batch,
    }
    for name, size in sizes.items():
        if size > _LARGEST_STEP:
            yield f"{name} = {size} is too large; it must be at most {_LARGEST_STEP}"
    if "" in config.sampling.stop:
        yield "sampling.stop holds an empty string, which every completion contains; remove it"
    if config.model.path == "scratch" and scratch.hidden_size % (2 * scratch.heads) != 0:
        unit = f"2 x model.scratch.heads = {2 * scratch.heads}"
        yield f"model.scratch.hidden_size = {scratch.hidden_size} must be a multiple of {unit}"
    if save.every > 0 and save.keep == 0:
        yield f"save.every = {save.every} asks for checkpoints, save.keep = 0 for none"


def _unused(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[tuple[str, str]]:
    """(key or section, why) of all that other settings make irrelevant."""
    algo, rollout = config.algo, config.rollout
    if advantage and not advantage.needs_critic:
        for key in ("critic", "algo.gamma", "algo.lam", "algo.critic_lam", "algo.lam_alpha"):
            yield key, f"algo.advantage = {algo.advantage!r} trains no critic"
    if algo.kl_coef == 0:
        for key in ("algo.kl_estimator", "algo.kl_in_reward", "experimental.weighted_kl"):
            yield key, "algo.kl_coef = 0 turns the KL off"
    if not algo.dynamic_sampling:
        for key in ("algo.max_gen_rounds", "algo.gen_multiple"):
            yield key, "algo.dynamic_sampling = false"
    yield from unused_systems(config)
    if config.correction.kind != "icepop":
        for key in ("correction.icepop_low", "correction.icepop_high"):
            yield key, f"correction.kind = {config.correction.kind!r}"
    if algo.symmetric == "off":
        for key in ("algo.symmetric_alpha", "algo.symmetric_beta"):
            yield key, "algo.symmetric = 'off'"
    if objective and not objective.is_truncated:
        yield "algo.cap", f"algo.objective = {algo.objective!r} truncates nothing"
    if objective and not objective.is_widened:
        yield "experimental.acr_max_bound", f"algo.objective = {algo.objective!r} widens nothing"
    if not config.model.lora_rank:
        yield "model.lora_alpha", "model.lora_rank = 0"
    if config.model.path != "scratch":
        yield "model.scratch", f"model.path = {config.model.path!r} is trained"
    if config.quant.update_scale == 1:
        for key in ("experimental.scale_o_proj", "experimental.scale_down_proj"):
            yield key, "quant.update_scale = 1 turns UAQ off"
    if needs_file(config.task.name):
        yield "task.difficulty", "the problems come from a file"
    if rollout.engine == "hf":
        for key in ("max_batch", "kv_tokens", "kv_memory_frac", "release_kv", "deterministic"):
            yield f"rollout.{key}", "rollout.engine = 'hf' has no cache of its own"
    if rollout.engine == "vllm":
        for key in ("kv_tokens", "release_kv"):
            yield f"rollout.{key}", "rollout.engine = 'vllm' keeps a cache that it sizes itself"
    else:
        yield "rollout.vllm", f"rollout.engine = {rollout.engine!r}"
    if config.parallel.trainers == 1:
        yield "parallel.shard", "parallel.trainers = 1"
    if not config.eval.samples:
        for key in ("eval.temperature", "eval.top_p"):
            yield key, "eval.samples = 0: only greedy completions are evaluated"


def find_unused(
    config: Config, objective: Objective | None, advantage: Advantage | None
) -> Iterator[str]:
    """Keys that were changed and that nothing reads."""
    default = Config()
    for path, reason in _unused(config, objective, advantage):
        ours, theirs = map(attrgetter(path), (config, default))
        if ours == theirs:
            continue
        if isinstance(ours, str | int | float | None):
            yield f"{path} = {shorten(ours)} is not used: {reason}"
        else:
            changed = [k for k, v in vars(ours).items() if v != getattr(theirs, k)]
            yield f"{path}.{f', {path}.'.join(changed)} is not used: {reason}"


def _acr_warnings(config: Config) -> Iterator[str]:
    if config.updates_per_step == 1:
        remedy = "acr equals tis; raise batch.minibatches or batch.epochs"
        yield f"ACR cannot act: with one update per rollout batch all ratios are 1 and {remedy}"
    if config.algo.cap is None:
        yield "ACR cannot act: algo.cap = none truncates nothing, so acr equals decoupled"
    if config.correction.kind == "icepop":
        yield "ACR cannot act: correction.kind = 'icepop' truncates nothing; acr equals tis"


def _symmetric_warnings(config: Config) -> Iterator[str]:
    algo = config.algo
    if algo.symmetric == "sppo" and not (algo.kl_coef or algo.entropy_coef):
        total = f"symmetric_alpha + symmetric_beta = {algo.symmetric_alpha + algo.symmetric_beta:g}"
        yield (
            f"algo.symmetric = 'sppo' only multiplies PPO's gradient by {total}, which AdamW "
            "divides out again; only optim.grad_clip and optim.eps see it. 'sa2c' does change it"
        )
    if algo.symmetric == "sa2c" and config.updates_per_step > 1:
        updates = f"algo.symmetric = 'sa2c' with {config.updates_per_step} updates per step"
        yield f"{updates}: the ratio only clips; updates after the first are not weighted by it"
    if algo.symmetric != "off" and is_users_own(algo.objective):
        own = f"algo.objective = {algo.objective!r} calls tokens.clipped()"
        yield f"algo.symmetric = {algo.symmetric!r} acts only if {own}"


def _mismatch_warnings(config: Config, objective: Objective | None) -> Iterator[str]:
    """Differences between trainer and sampler that nothing corrects."""
    algo, quant = config.algo, config.quant
    is_shared = quant.unified or config.model.has_coded_base
    has_mismatch = quant.format != "none" and not is_shared
    has_mismatch |= quant.noise != "off" or (quant.kv != "none" and not quant.unified)
    is_late = config.rollout.ahead > 0
    if objective and not objective.is_weighted and has_mismatch:
        uncorrected = f"algo.objective = {algo.objective!r} does not correct the mismatch"
        yield f"{uncorrected} of quantized rollouts; use 'acr' or 'tis' unless you compare them"
    elif objective and objective.against == "prox" and not objective.is_weighted and is_late:
        uncorrected = f"algo.objective = {algo.objective!r} does not correct the age"
        yield f"{uncorrected} of rollouts that rollout.ahead = 1 samples; use 'acr' or 'tis'"
    if config.correction.mode == "auto" and has_mismatch:
        risk = "a mismatch of quantized rollouts without a tail goes uncorrected"
        yield f"correction.mode = 'auto': {risk}; use 'decoupled', or one precision for both sides"


def _precision_warnings(config: Config) -> Iterator[str]:
    quant, optim = config.quant, config.optim
    if quant.unified and is_users_own(config.rollout.engine):
        engine = f"rollout.engine = {config.rollout.engine!r}"
        yield f"quant.unified: {engine} must quantize as qurl.quant does, or a mismatch remains"
    if config.rollout.engine == "vllm" and config.has_full_engine:
        remedy = "set eval.precision = 'quantized' if there is no room for it"
        yield f"evaluations in full precision start a second vLLM; {remedy}"
    if quant.format == "none" and quant.update_scale > 1:
        yield "UAQ without quantization only changes the learning rate of the scaled layers"
    if quant.update_scale > 1 and optim.lr >= 1e-5:
        yield f"UAQ with optim.lr = {optim.lr}: the paper turns it off from 1e-5 up"
    if quant.format == "none" and quant.kv != "none" and config.eval.every:
        yield f"evaluations named full answer with quant.kv = {quant.kv!r}, as the actor does"
    if quant.format == "nvfp4" and config.model.lora_rank and not config.model.has_coded_base:
        remedy = "set model.base = 'nvfp4' to keep adapters beside the codes"
        yield f"quant.format = 'nvfp4' rounds merged adapters away below a step of 4 bits; {remedy}"
    if config.model.lora_rank and optim.lr < 1e-5:
        yield f"LoRA with optim.lr = {optim.lr}: adapters want about 10 times the usual rate"
    if quant.format == "none" and config.alarms.falling_back:
        yield "alarms with the action 'full' only warn: quant.format is 'none' already"


def find_warnings(
    config: Config, objective: Objective | None = None, advantage: Advantage | None = None
) -> Iterator[str]:
    """Choices that work but are probably not what was meant."""
    objective = objective or OBJECTIVES.get(config.algo.objective)
    advantage = advantage or ADVANTAGES.get(config.algo.advantage)
    optim = config.optim
    yield from find_unused(config, objective, advantage)
    yield from find_system_warnings(config)
    for key in ("eval_path", "eval_sets"):
        if getattr(config.task, key) and not config.eval.every:
            yield f"task.{key} is set, but eval.every = 0: training does not evaluate"
    if objective and objective.is_widened:
        yield from _acr_warnings(config)
    yield from _symmetric_warnings(config)
    yield from _mismatch_warnings(config, objective)
    if advantage and advantage.needs_critic and config.critic.pretrain_steps >= config.steps:
        pretrained = f"critic.pretrain_steps = {config.critic.pretrain_steps}"
        yield f"{pretrained} of steps = {config.steps}: the policy is never trained"
    yield from _precision_warnings(config)
    if config.task.path and not config.eval.every:
        remedy = "set task.eval_path and eval.every, or a failure may show in the rewards only"
        yield f"no held-out problems are evaluated: {remedy}"
    if optim.warmup_steps > config.steps:
        warmup = f"optim.warmup_steps = {optim.warmup_steps} is more than steps = {config.steps}"
        yield f"{warmup}: the learning rate never reaches optim.lr"
