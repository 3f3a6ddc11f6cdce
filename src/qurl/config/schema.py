"""The keys of a recipe: a tree of frozen dataclasses.

The docstring under each field feeds `--help` and docs/recipe.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

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


class Section:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class ScratchConfig(Section):
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
class ModelConfig(Section):
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
class TaskConfig(Section):
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
class BatchConfig(Section):
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
class SamplingConfig(Section):
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
class AlgoConfig(Section):
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
class CriticConfig(Section):
    """The value model (algo.advantage = "gae")."""

    lr: Positive = 1e-5
    """Learning rate of the critic's own optimizer."""
    clip: Positive | None = 0.5
    """Range around the old value within which the value loss is not clipped; none = no clipping."""
    pretrain_steps: CountOrZero = 0
    """First steps in which only the critic is trained."""


@dataclass(frozen=True)
class CorrectionConfig(Section):
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
class OptimConfig(Section):
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
class QuantConfig(Section):
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
class RolloutConfig(Section):
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
class EvalConfig(Section):
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
class SaveConfig(Section):
    """Checkpoints."""

    every: CountOrZero = 0
    """Steps between checkpoints, also after the last step; 0 = only after the last."""
    keep: CountOrZero = 2
    """Newest checkpoints kept; 0 = none is written, and the run cannot be resumed."""


@dataclass(frozen=True)
class TrackConfig(Section):
    """Where metrics go, besides metrics.jsonl."""

    samples: CountOrZero = 4
    """Rollouts written to samples.jsonl per step."""
    tensorboard: Flag = False
    """Write TensorBoard events into the run directory."""
    wandb: str = ""
    """Weights & Biases project; empty = off."""


@dataclass(frozen=True)
class Config(Section):
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
