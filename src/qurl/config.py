"""The recipe: a tree of frozen dataclasses, read from TOML and overridden by flags.

Precedence: flags > recipe > preset of `algo.name` > defaults. Unknown keys are refused, and all
mistakes are reported at once. The docstring under each field feeds `--help` and the docs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from qurl.errors import ConfigError
from qurl.rules import find_mistakes

# Strict, or pydantic would take true for 1 and "no" for false.
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
NonNegative = Annotated[float, Field(ge=0, strict=True)]
Temperature = Annotated[float, Field(ge=1e-6, strict=True)]  # COLDEST of qurl.types
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]

AlgorithmName = Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo"]
Objective = Literal["ppo_prox", "ppo_behav", "decoupled", "tis", "acr"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
QuantFormat = Literal["none", "int8", "fp8", "fp8-block", "int6", "int4"]

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ppo": {"algo": {"advantage": "gae", "aggregation": "token-mean", "whiten": True}},
    "grpo": {
        "algo": {"advantage": "grpo", "aggregation": "seq-mean-token-mean", "kl_coef": 1e-3},
    },
    "dr_grpo": {"algo": {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm"}},
    "rloo": {"algo": {"advantage": "rloo", "aggregation": "token-mean"}},
    "reinforce_pp": {"algo": {"advantage": "reinforce_pp", "aggregation": "token-mean"}},
    "dapo": {
        "algo": {
            "advantage": "grpo",
            "aggregation": "token-mean",  # token-level loss
            "clip_high": 0.28,  # clip-higher
            "dynamic_sampling": True,
            "gen_multiple": 3,
            "overlong_frac": 0.2,  # soft overlong punishment over the last fifth
            "dual_clip": 10.0,
        },
        "optim": {"warmup_steps": 10, "weight_decay": 0.1},
    },
}
"""What `algo.name` sets; every part can be overridden in the recipe or by a flag."""


class _Section:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class ScratchConfig(_Section):
    """A tiny Llama made from scratch and warm-started on worked answers."""

    hidden_size: Count = 128
    """Width of the residual stream."""
    layers: Count = 2
    """Decoder layers."""
    heads: Count = 4
    """Attention heads; the same number of key-value heads."""
    warm_start_steps: CountOrZero = 300
    """Supervised steps on the task's own worked answers before RL."""
    warm_start_lr: Positive = 2e-3
    """Learning rate of the warm start."""
    warm_start_batch: Count = 128
    """Examples per supervised step."""


@dataclass(frozen=True)
class ModelConfig(_Section):
    """The policy."""

    path: str = "scratch"
    """Folder or hub name of a causal LM, or "scratch" for a tiny one made here."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    """Used when path is "scratch"."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass to save memory."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward and backward; masters stay FP32. auto: bfloat16 on GPU only."""
    compile: Flag = False
    """Compile the decoder layers (torch.compile) instead of using our fused ones; on a GPU it has
    not been timed against them yet."""
    deterministic: Flag = False
    """Gradients are added up in the same order each time, also on a GPU; slower. With
    rollout.deterministic, runs on a GPU are meant to repeat to the bit (tried: single updates)."""
    logits_chunk: Count = 1024
    """Positions whose logits are held at once; [B, T, V] never is."""


@dataclass(frozen=True)
class TaskConfig(_Section):
    """What is asked, and what an answer is worth."""

    name: str = "arithmetic"
    """arithmetic, countdown, gsm8k, math, file, or gym:<reasoning-gym task>."""
    path: str = ""
    """JSONL (also .gz) or parquet file of training problems."""
    eval_path: str = ""
    """File of held-out problems; generated tasks hold some out by themselves."""
    reward: str = "auto"
    """auto (the task's own), math, exact, countdown, gym:<name>, or module:function of your own."""
    instruction: str = "auto"
    """Text after each question of a file; auto asks for a \\boxed answer, "" for nothing. In a
    column `prompt` the question is taken to be complete, and auto adds nothing."""
    max_prompt_tokens: Count = 1024
    """A longer prompt is an error unless skip_long_prompts."""
    skip_long_prompts: Flag = False
    """Leave out prompts beyond max_prompt_tokens, and say how many."""
    difficulty: Count = 4
    """Generated tasks: terms of a sum (arithmetic) or numbers at hand (countdown)."""
    grade_workers: Count = 2
    """Processes that grade."""
    grade_timeout: Positive = 10.0
    """Seconds before a grader is killed; the completion then counts as a timeout."""
    timeout_score: Annotated[float, Field(lt=1, strict=True)] = 0.0
    """What such a completion is worth: the same as a wrong answer, by your reward."""


@dataclass(frozen=True)
class BatchConfig(_Section):
    """How much is sampled and how it is cut into updates."""

    problems: Count = 32
    """Problems per step."""
    minibatches: Count = 4
    """Optimizer updates per pass over the step's batch."""
    epochs: Count = 1
    """Passes over the step's batch."""
    microbatch_tokens: Count = 16384
    """Most tokens in one forward and backward; a longer sequence has one to itself."""


@dataclass(frozen=True)
class SamplingConfig(_Section):
    """How training rollouts are drawn."""

    max_tokens: Count = 256
    """Longest completion."""
    group_size: Count = 8
    """Completions per problem, G."""
    temperature: Temperature = 1.0
    """The trainer divides its logits by the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Must stay 1 in training: otherwise the mismatch measures the filter, not quantization."""
    top_k: Annotated[int, Field(ge=-1, strict=True)] = 0
    """Must stay 0 or -1 (all) in training, for the same reason."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""


@dataclass(frozen=True)
class AlgoConfig(_Section):
    """The objective and the advantage. `name` chooses a preset of the other fields."""

    name: AlgorithmName = "grpo"
    """ppo, grpo, dr_grpo, rloo, reinforce_pp or dapo."""
    objective: Objective = "acr"
    """ppo_prox Eq. (1), ppo_behav Eq. (3), decoupled Eq. (4), tis Eq. (5), acr Eq. (9)."""
    cap: Annotated[float, Field(ge=1, strict=True)] | None = 2.0
    """C: importance weights are truncated here; none = no truncation."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped above 1 + clip_high; acr widens this where the weight was truncated."""
    dual_clip: Annotated[float, Field(gt=1, strict=True)] | None = None
    """Bound of the loss for negative advantages (verl's clip_ratio_c)."""
    acr_max_bound: Annotated[float, Field(gt=1, strict=True)] | None = None
    """Largest upper bound that acr may widen to."""
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """Advantage estimator; gae needs the critic."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; the denominator is the global mini-batch."""
    gamma: Fraction = 1.0
    """Discount of gae."""
    lam: Fraction = 1.0
    """Lambda of gae."""
    whiten: Flag = False
    """Normalise advantages over the batch to mean 0 and variance 1."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the frozen reference; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss."""
    kl_in_reward: Flag = False
    """Subtract the k1 KL from the token rewards (gae only) instead of adding it to the loss."""
    kl_is_correct: Flag = False
    """Multiply the KL term by the importance weight: samples come from the quantized actor."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    dynamic_sampling: Flag = False
    """Drop groups whose accuracies are all equal and sample more until the batch is full."""
    max_gen_rounds: Count = 10
    """Dynamic sampling gives up after this many rounds in a step."""
    gen_multiple: Count = 1
    """Problems sampled per round, as a multiple of batch.problems, under dynamic sampling."""
    overlong_frac: Fraction = 0.0
    """Soft overlong punishment over this last share of max_tokens; 0 = off."""


@dataclass(frozen=True)
class CriticConfig(_Section):
    """The value model (algo.advantage = "gae")."""

    lr: Positive = 1e-5
    """Learning rate of the critic's own optimizer."""
    clip: Positive | None = 0.5
    """Range around the old value within which the value loss is not clipped; none = no clipping."""
    pretrain_steps: CountOrZero = 0
    """First steps in which only the critic is trained."""


@dataclass(frozen=True)
class CorrectionConfig(_Section):
    """How the sampler's mismatch is corrected, beyond the objective (algo.cap is C)."""

    mode: Literal["decoupled", "bypass"] = "decoupled"
    """bypass sets prox := behav and saves that forward (needs objective ppo_behav)."""
    level: Literal["token", "sequence"] = "token"
    """Importance weight per token, or one product per sequence."""
    kind: Literal["truncate", "icepop"] = "truncate"
    """min(mismatch, cap), or the mismatch inside a band and 0 outside."""
    icepop_low: Positive = 0.5
    """Lower end of IcePop's band."""
    icepop_high: Positive = 5.0
    """Upper end of IcePop's band."""
    batch_normalize: Flag = False
    """Divide the weights by their mean over the batch."""
    reject: tuple[str, ...] = ()
    """Rejection masks, e.g. "seq_mean_k1:0.999_1.001" or "token_k3:0.01"."""
    veto: Annotated[float, Field(gt=0, lt=1, strict=True)] | None = None
    """Drop a whole sequence when any token's mismatch falls below this, e.g. 1e-4."""


@dataclass(frozen=True)
class OptimConfig(_Section):
    """AdamW on FP32 master weights."""

    lr: Positive = 1e-6
    """Peak learning rate of the policy."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moments."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    warmup_steps: CountOrZero = 0
    """Linear warm-up, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine reach 0 where a step after the last one would be."""
    grad_clip: Positive = 1.0
    """Largest gradient norm."""
    norm_fed_lr_scale: Positive = 1.0
    """Multiplies the learning rate of q, k, v, gate and up, and divides that of their norms: what
    UAQ is to AdamW, without UAQ (for comparisons)."""
    dither: Flag = False
    """Begin with masters at random places among the numbers that round to the same BF16: the first
    forward stays as it is, and updates below BF16's step are seen on average. Needs
    model.compute_dtype = "bfloat16"."""


@dataclass(frozen=True)
class QuantConfig(_Section):
    """The actor that samples."""

    format: QuantFormat = "int8"
    """Weights and activations of the engine's linear layers. int6 and int4 are for experiments."""
    update_scale: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """UAQ's s: norm-fed weights are divided by it once, before training; 1 = off, paper: 1.5."""
    scale_o_proj: Flag = False
    """UAQ also on o_proj (against v_proj)."""
    scale_down_proj: Flag = False
    """UAQ also on down_proj (against up_proj)."""
    kv: Literal["none", "fp8"] = "none"
    """Format of the local engine's KV cache, whatever `format` is; none: compute precision."""
    track_rows: CountOrZero = 128
    """Output channels per weight whose updates are tracked (Eq. 13, 14, code flips); 0 = off."""


@dataclass(frozen=True)
class RolloutConfig(_Section):
    """The engine."""

    engine: Literal["local", "hf"] = "local"
    """local (ours, continuous batching) or hf (transformers, the reference)."""
    max_batch: Count = 256
    """Sequences decoded together."""
    page_size: CountOrZero = 0
    """Tokens per page of the KV cache; 0 = 64 on a GPU, 16 on a CPU."""
    kv_tokens: CountOrZero = 0
    """Capacity of the KV cache in tokens; 0 = enough for max_batch full sequences."""
    kv_memory_frac: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.8
    """Most of the free GPU memory that the KV cache takes. It is measured at the first rollout,
    when gradients and AdamW's moments may not be there yet: lower it if training then runs out."""
    release_kv: Flag = False
    """Give the KV cache's GPU memory to the trainer between rollouts."""
    deterministic: Flag = False
    """The same tokens whatever else is in the batch, also on a GPU; slower. On a CPU it needs
    threads = 1."""


@dataclass(frozen=True)
class EvalConfig(_Section):
    """Held-out accuracy."""

    every: CountOrZero = 0
    """Steps between evaluations, also before the first and after the last; 0 = never."""
    problems: Count = 128
    """Held-out problems."""
    samples: CountOrZero = 0
    """Completions per problem for avg@k and pass@k, besides greedy; 0 = greedy only."""
    temperature: Temperature = 1.0
    """Of those samples."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Of those samples."""
    max_tokens: CountOrZero = 0
    """Longest completion; 0 = sampling.max_tokens."""
    precision: Literal["both", "full", "quantized"] = "both"
    """Which weights answer: full precision, the quantized actor, or both, reported apart."""


@dataclass(frozen=True)
class SaveConfig(_Section):
    """Checkpoints."""

    every: CountOrZero = 0
    """Steps between checkpoints, also after the last step; 0 = only after the last."""
    keep: CountOrZero = 2
    """Newest checkpoints kept; 0 = none is written, and the run cannot be resumed."""


@dataclass(frozen=True)
class TrackConfig(_Section):
    """Where metrics go, besides metrics.jsonl."""

    samples: CountOrZero = 4
    """Rollouts written to samples.jsonl per step."""
    tensorboard: Flag = False
    """Write TensorBoard events into the run directory."""
    wandb: str = ""
    """Weights & Biases project; empty = off."""


@dataclass(frozen=True)
class Config(_Section):
    """One training run."""

    steps: Count = 100
    """RL steps: rollout, updates, sync."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Of everything random."""
    run_dir: Annotated[str, Field(min_length=1)] = "runs/default"
    """Where the run lives; a run that is there already is resumed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    threads: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0
    """CPU threads of torch; 0 = torch's choice."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    @property
    def updates_per_step(self) -> int:
        return self.batch.minibatches * self.batch.epochs

    @property
    def eval_precisions(self) -> Sequence[str]:
        """What held-out problems are answered in: "full", the actor's format, or both."""
        if self.quant.format == "none" or self.eval.precision == "full":
            return ("full",)
        both = ("full", self.quant.format)
        return both if self.eval.precision == "both" else both[1:]

    @property
    def has_full_engine(self) -> bool:
        """Whether evaluations need another engine than the actor's."""
        is_quantized = self.quant.format != "none"
        return self.eval.every > 0 and is_quantized and "full" in self.eval_precisions

    @property
    def eval_max_tokens(self) -> int:
        return self.eval.max_tokens or self.sampling.max_tokens


def load_config(path: str | Path | None, flags: Sequence[str] = ()) -> Config:
    """Read a recipe, lay the flags over it, and check the whole."""
    recipe = read_recipe(path) if path else {}
    source = " and ".join(
        [*([str(path)] if path else []), *(["flags"] if flags or not path else [])]
    )
    own = _section(recipe, "algo").get("name")
    name = _flag_value(flags, "--algo.name") or own
    if path and _is_run(path) and name != own:
        raise ConfigError(
            f"algo.name = {name!r}, but {path} holds the resolved recipe of a run with {own!r}, "
            "whose keys would all stay as they are; start from a recipe of recipes/ instead"
        )
    if path and _is_run(path):
        recipe["run_dir"] = str(path)  # it may have been moved
    config = build_config(_merge(PRESETS.get(str(name or AlgoConfig.name), {}), recipe), source)
    if flags := _with_values(flags):
        import tyro  # here, because it costs a tenth of a second that `qurl --help` does not pay

        config = tyro.cli(
            Config,
            prog="qurl COMMAND [RECIPE|RUN]",
            default=config,
            args=[_python_word(flags, i) for i in range(len(flags))],
            config=(tyro.conf.FlagConversionOff,),
        )
        config = build_config(to_dict(config), source)
    check_combinations(config, source)
    return config


def check_combinations(config: Config, source: str = "config") -> None:
    """Refuse settings that do not go together."""
    if mistakes := find_mistakes(config):
        raise ConfigError(_listed(mistakes, source))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The raw tree of a TOML recipe, or of the config.json of a run directory."""
    path = Path(path)
    if _is_run(path):
        path, parse, kind = path / "config.json", json.loads, "JSON"
    else:
        parse, kind = tomllib.loads, "TOML"
    if path.is_dir():
        raise ConfigError(f"{path} is a folder without a config.json; give a recipe or a run")
    if not path.is_file():
        raise ConfigError(f"there is no recipe and no run at {path}; see recipes/ for examples")
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of either parser, or no text at all
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if kind == "JSON" and not (
        isinstance(tree, dict) and {"steps", "run_dir", "algo"} <= set(tree)
    ):
        raise ConfigError(f"{path} is not that of a run, but something else's")
    return tree


def _is_run(path: str | Path) -> bool:
    return (Path(path) / "config.json").is_file()


def build_config(tree: Mapping[str, Any], source: str = "config") -> Config:
    """Validate a tree of plain values; all mistakes are reported at once.

    It sets no presets and does not look at combinations, as `load_config` does.
    """
    try:
        return TypeAdapter(Config).validate_python(_without_none_strings(tree))
    except ValidationError as error:
        mistakes = [_explain(e) for e in error.errors()]
        raise ConfigError(_listed(list(dict.fromkeys(mistakes)), source)) from None


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def to_json(config: Config) -> str:
    return json.dumps(to_dict(config), indent=2)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name, {})
    return section if isinstance(section, Mapping) else {}


def _flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last one counts, as for tyro."""
    found = None
    for i, flag in enumerate(flags):
        if flag == name and i + 1 < len(flags):
            found = flags[i + 1]
        elif flag.startswith(name + "="):
            found = flag.split("=", 1)[1]
    return found


def _with_values(flags: Sequence[str]) -> list[str]:
    """A switch that is only named is on."""
    words: list[str] = []
    for i, flag in enumerate(flags):
        words.append(flag)
        if _is_switch(flag) and all(word.startswith("--") for word in flags[i + 1 : i + 2]):
            words.append("true")
    return words


def _python_word(flags: Sequence[str], index: int) -> str:
    """Flags say none, true and false as recipes do; tyro wants them capitalised."""
    name, equals, value = flags[index].partition("=")
    if not equals:
        name, value = flags[max(index - 1, 0)], flags[index]
    is_word = (value == "none" and _keys_of(name)[-1] in _optional_keys()) or (
        value in ("true", "false") and _is_switch(name)
    )
    if not is_word:
        return flags[index]
    return f"{name}={value.capitalize()}" if equals else value.capitalize()


def _is_switch(flag: str) -> bool:
    """Does `--optim.dither`, say, name a key that is true or false?"""
    default: Any = Config()
    for key in _keys_of(flag):
        default = getattr(default, key, None)
    return isinstance(default, bool)


def _keys_of(flag: str) -> list[str]:
    return flag.removeprefix("--").replace("-", "_").split(".")


@functools.cache
def _optional_keys() -> frozenset[str]:
    """Keys whose type admits None."""
    fields = [f for section in _Section.__subclasses__() for f in dataclasses.fields(section)]  # type: ignore[arg-type]
    return frozenset(f.name for f in fields if str(f.type).endswith("None"))


def _without_none_strings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: "none" stands for it in the optional keys."""
    return {
        key: _without_none_strings(value)
        if isinstance(value, Mapping)
        else None
        if key in _optional_keys() and value == "none"
        else value
        for key, value in tree.items()
    }


def _explain(error: Mapping[str, Any]) -> str:
    """One validation error as `path = value is wrong because ...`."""
    parts = [str(p) for p in error["loc"] if not (isinstance(p, str) and "[" in p)]
    path, value = ".".join(parts), error["input"]
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path} = {value!r} is not a key; {_known_keys(parts[:-1])}"
    if kind == "literal_error":
        return f"{path} = {value!r} is not one of {context['expected']}"
    if kind == "dataclass_type":
        return f"{path} = {value!r} must be a table, like [{path}]"
    if kind == "missing":  # the input is what lacks it
        return f"{'.'.join(parts[:-1])} = {value!r} has too few values"
    if kind == "tuple_type":
        return f"{path} = {value!r} must be a list, like [{value!r}]"
    message = error["msg"].replace("Input should be", "must be").replace("Input must", "must")
    return f"{path} = {value!r}: {message}"


def _known_keys(section: Sequence[str]) -> str:
    node: Any = Config()
    for name in section:
        node = getattr(node, name)
    keys = ", ".join(f.name for f in dataclasses.fields(node))
    where = f"[{'.'.join(section)}]" if section else "the top level"
    return f"{where} has {keys}"


def _listed(mistakes: Sequence[str], source: str) -> str:
    if len(mistakes) == 1:
        return f"{mistakes[0]} ({source})"
    lines = "\n".join(f"  - {m}" for m in mistakes)
    return f"{len(mistakes)} mistakes in {source}:\n{lines}"
