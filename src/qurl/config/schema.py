"""The keys of a recipe: a tree of frozen dataclasses.

The docstring under each field feeds `--help` and docs/recipe.md. `module:name` stands for a part of
your own (`qurl.plugins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import Field

from qurl.config.fields import (
    Count,
    CountOrZero,
    Decay,
    FilePath,
    Flag,
    Fraction,
    NonNegative,
    OrNone,
    Positive,
    Rate,
    Section,
    Share,
    Table,
    Temperature,
)
from qurl.config.systems import SystemsConfig


@dataclass(frozen=True)
class ScratchConfig(Section):
    """A tiny Llama that is built from scratch and warm-started on worked answers."""

    hidden_size: Annotated[int, Field(ge=1, le=8192, strict=True)] = 128
    """Width of the residual stream."""
    layers: Annotated[int, Field(ge=1, le=128, strict=True)] = 2
    """Decoder layers."""
    heads: Count = 4
    """Attention heads, and key-value heads."""
    warm_start_steps: CountOrZero = 300
    """Supervised steps on the task's own worked answers before RL."""
    warm_start_lr: Rate = 2e-3
    """Learning rate of the warm start."""
    warm_start_batch: Count = 128
    """Examples per supervised step."""


@dataclass(frozen=True)
class ModelConfig(Section):
    """The policy."""

    path: FilePath = "scratch"
    """Folder or hub name of a causal LM, or "scratch" to build a tiny one."""
    scratch: ScratchConfig = field(default_factory=ScratchConfig)
    lora_rank: CountOrZero = 0
    """Train LoRA adapters of this rank on all projections instead of the weights; 0 = off."""
    lora_alpha: Count = 32
    """Adapters are scaled by lora_alpha / lora_rank."""
    base: Literal["full", "nvfp4"] = "full"
    """Precision of the frozen weights under LoRA. nvfp4 (QeRL): trainer and actor compute with the
    same 4-bit codes; the adapters stay separate, in full precision."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass to save memory."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the trainer; see also optim.masters. auto: bfloat16 on a GPU, else float32."""
    compile: Flag = False
    """Compile the decoder layers with torch.compile instead of using our fused ones."""
    deterministic: Flag = False
    """Sum gradients in a fixed order, also on a GPU; slower. See also rollout.deterministic."""
    logits_chunk: Count = 1024
    """Number of positions whose logits are in memory at once."""
    keep_logits: Flag = False
    """Keep the gradients of all logits of a micro-batch, so that the backward pass need not compute
    the logits again. This is faster but takes 2 bytes (BF16) of memory per token and vocabulary
    entry. It has no effect with an entropy bonus (algo.entropy_coef)."""

    @property
    def has_coded_base(self) -> bool:
        return self.base != "full"


@dataclass(frozen=True)
class TaskConfig(Section):
    """The problems and how answers are graded."""

    name: FilePath = "arithmetic"
    """arithmetic, countdown, gsm8k, math, code, file, gym:<reasoning-gym task>, or module:name."""
    path: FilePath = ""
    """File of training problems: JSONL (also .gz) or parquet."""
    eval_path: FilePath = ""
    """File of held-out problems. Generated tasks hold out some of their own."""
    mix: Table[Share] = ()
    """Several training files and the share of each; replaces path."""
    eval_sets: Table[FilePath] = ()
    """Several held-out files, each with a name; replaces eval_path."""
    reward: str = "auto"
    """auto (the task's own), math, exact, countdown, code, gym:<name>, or module:name."""
    rewards: Table[str] = ()
    """Rewards for single rows, by the value of their `reward` or `data_source` column."""
    instruction: str = "auto"
    """Text after each question of a file. auto: ask for \\boxed, unless the column is `prompt`."""
    system: str = ""
    """System message before each question; rows with their own system message keep it."""
    chat_template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking = false."""
    max_prompt_tokens: Count = 1024
    """Longest prompt; a longer one is an error unless skip_long_prompts is set."""
    skip_long_prompts: Flag = False
    """Drop prompts longer than max_prompt_tokens, and report how many."""
    difficulty: Count = 4
    """Size of generated problems: terms of a sum (arithmetic), numbers to combine (countdown)."""
    grade_workers: Annotated[int, Field(ge=1, le=256, strict=True)] = 2
    """Grader processes."""
    grade_timeout: Positive = 10.0
    """Seconds after which a grader is killed."""
    grade_memory: OrNone[Positive] = 8.0
    """GB that a grader process may allocate before it is killed; none = no limit."""
    timeout_score: Annotated[float, Field(lt=1, strict=True)] = 0.0
    """Reward if the grader was killed; use the value that your reward gives to a wrong answer."""

    @property
    def training_files(self) -> dict[str, float]:
        """{file: its share}; the file is empty if the task needs none."""
        return {expanduser(path): share for path, share in self.mix} or {self.path: 1.0}

    @property
    def held_out_files(self) -> dict[str, str]:
        """{name: file}; a single file has no name."""
        return dict(self.eval_sets) or {"": self.eval_path}


@dataclass(frozen=True)
class BatchConfig(Section):
    """How much a step samples and how it is split into updates."""

    problems: Count = 32
    """Problems per step."""
    minibatches: Count = 4
    """Optimizer updates per pass over the step's batch."""
    epochs: Count = 1
    """Passes over the step's batch."""
    microbatch_tokens: Count = 16384
    """Tokens per forward and backward pass, at most; a longer sequence gets its own pass."""
    subselect: str = "all"
    """Which completions of a step to train on: all, shuffle-r1, pods, or module:name."""


@dataclass(frozen=True)
class SamplingConfig(Section):
    """How training rollouts are sampled: always without top-p and top-k."""

    max_tokens: Count = 256
    """Longest completion."""
    group_size: Count = 8
    """Completions per problem, G."""
    temperature: Temperature = 1.0
    """Sampling temperature. The trainer also divides its logits by it."""
    stop: tuple[str, ...] = ()
    """Strings or special tokens that end a completion, such as "<|im_end|>"."""
    stop_ids: tuple[CountOrZero, ...] = ()
    """Token ids that end a completion, besides the model's end-of-sequence tokens."""
    select: str = "shuffle"
    """Which problems come next: shuffle (a new random order each epoch), greso, dots, or
    module:name."""
    budget: str = "uniform"
    """How many completions each problem gets: uniform (group_size), e3 (more for hard problems), or
    module:name."""
    thermostat: str = "off"
    """How the temperature changes over steps: off (it stays), e3 (keeps the entropy up), or
    module:name."""
    replay: str = "off"
    """How to reuse earlier groups: off, recent (rollout replay of DOTS-RR), or module:name."""
    chunk: CountOrZero = 0
    """Sample and grade a group in pieces of this many completions; 0 = the whole group at once."""
    keep_responses: Flag = False
    """Keep the tokens of each problem's last group in the history, and in checkpoints."""

    @property
    def stops(self) -> tuple[str | int, ...]:
        """Strings and token ids, for `SamplingParams.stop`."""
        return (*self.stop, *self.stop_ids)


@dataclass(frozen=True)
class AlgoConfig(Section):
    """The objective and the advantage. `name` selects a preset of the other keys."""

    name: Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "vapo"] = "grpo"
    """Preset. The table of presets shows which keys it sets."""
    objective: str = "acr"
    """ppo_prox (Eq. 1), ppo_behav (3), decoupled (4), tis (5), acr (9), or module:name."""
    cap: OrNone[Annotated[float, Field(ge=1, le=1e9, strict=True)]] = 2.0
    """C, the largest importance weight; larger ones are truncated. none = no truncation."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0, le=1e9, strict=True)] = 0.2
    """The ratio is clipped above 1 + clip_high; acr raises this bound for truncated weights."""
    dual_clip: OrNone[Annotated[float, Field(gt=1, strict=True)]] = None
    """Bound on the loss of tokens with negative advantages (verl's clip_ratio_c)."""
    advantage: str = "grpo"
    """gae (trains a critic), grpo, dr_grpo, rloo, reinforce_pp, or module:name."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses are averaged. The denominator covers the whole mini-batch."""
    gamma: Fraction = 1.0
    """Discount factor of gae."""
    lam: Fraction = 1.0
    """Lambda of gae."""
    critic_lam: OrNone[Fraction] = None
    """Lambda of the returns that the critic learns; none = same as lam."""
    lam_alpha: NonNegative = 0.0
    """If above 0, a response of n tokens gets lambda = 1 - 1 / (lam_alpha n), at least 0 (VAPO).
    0 = use lam."""
    whiten: Flag = False
    """Normalise advantages over the batch to mean 0 and variance 1."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the frozen reference model; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference in the loss."""
    kl_in_reward: Flag = False
    """Subtract the KL (k1) from the token rewards instead of adding it to the loss; gae only."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    symmetric: Literal["off", "sppo", "sa2c"] = "off"
    """Symmetric RL loss in place of the clipped term. sppo has the gradient of PPO multiplied by
    symmetric_alpha + symmetric_beta. sa2c gives likely tokens a larger weight."""
    symmetric_alpha: NonNegative = 0.5
    """Weight of the forward term of `symmetric`, the policy gradient."""
    symmetric_beta: Positive = 0.4
    """Weight of the reverse term of `symmetric`."""
    positive_coef: NonNegative = 0.0
    """Weight of the negative log-likelihood of right answers in the loss (VAPO)."""
    dynamic_sampling: Flag = False
    """Drop groups with equal accuracies and sample more until the batch is full (DAPO)."""
    max_gen_rounds: Count = 10
    """Most rounds of dynamic sampling in a step. If they do not fill the batch, the run stops."""
    gen_multiple: Count = 1
    """Problems per round of dynamic sampling, as a multiple of batch.problems."""
    overlong_frac: Fraction = 0.0
    """Penalise completions that reach into this last share of max_tokens (DAPO); 0 = off."""


@dataclass(frozen=True)
class CriticConfig(Section):
    """The value model. It is trained only if the advantage needs it (gae)."""

    lr: Rate = 1e-5
    """Learning rate of the critic."""
    clip: OrNone[Positive] = 0.5
    """Clip values to this range around the old value; none = no clipping."""
    pretrain_steps: CountOrZero = 0
    """Steps at the start that train the critic only."""


@dataclass(frozen=True)
class CorrectionConfig(Section):
    """Correction of the mismatch between trainer and sampler, beyond the objective and algo.cap."""

    mode: Literal["decoupled", "bypass", "auto"] = "decoupled"
    """How to get the log-probs of prox. decoupled: the trainer computes them. bypass: use those of
    behav, for ppo_behav. auto: use those of behav in steps where at most one token in 1,000 has a
    gap above the clip range."""
    level: Literal["token", "sequence"] = "token"
    """One importance weight per token, or their product per sequence."""
    kind: Literal["truncate", "icepop"] = "truncate"
    """truncate: weight = min(mismatch, cap). icepop: weight = mismatch inside a band, else 0."""
    icepop_low: Positive = 0.5
    """Lower end of icepop's band."""
    icepop_high: Positive = 5.0
    """Upper end of icepop's band."""
    batch_normalize: Flag = False
    """Divide the weights by their mean over the batch."""
    reject: tuple[str, ...] = ()
    """Rejection masks, such as "seq_mean_k1:0.999_1.001" or "token_k3:0.01"."""
    veto: OrNone[Annotated[float, Field(gt=0, lt=1, strict=True)]] = None
    """Drop a sequence if the mismatch of any of its tokens is below this value, such as 1e-4."""

    @property
    def weighting(self) -> dict[str, Any]:
        """The options of `qurl.correction.weigh`."""
        return {key: getattr(self, key) for key in ("level", "kind", "icepop_low", "icepop_high")}


@dataclass(frozen=True)
class OptimConfig(Section):
    """AdamW on master weights."""

    lr: Rate = 1e-6
    """Peak learning rate of the policy."""
    base_batch: CountOrZero = 0
    """Number of sequences per step that lr is meant for. A step of B sequences uses
    lr * sqrt(B / base_batch) (BroRL). 0 = use lr unchanged."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. linear and cosine reach 0 right after the last step."""
    grad_clip: Positive = 1.0
    """Scale gradients down to this norm if theirs is larger."""
    name: Literal["adamw", "hadam"] = "adamw"
    """hadam is AdamW that stores h = sqrt(v) instead of v, because FP16 can hold h."""
    moments: Literal["fp32", "fp16", "8bit"] = "fp32"
    """Precision of the moments. fp32, fp16 and 8bit take 8, 4 and 2 bytes per parameter. fp16 is
    for hadam, which multiplies gradients by an adaptive scale first; 8bit is for adamw."""
    masters: Literal["fp32", "bf16"] = "fp32"
    """Format of the master weights. bf16: each projection weight is stored as BF16 plus the 16 bits
    that rounding lost, which together make the FP32 number. This needs a bfloat16 trainer, which
    then needs no BF16 copies of the projections."""


@dataclass(frozen=True)
class QuantConfig(Section):
    """Precision of the actor, which samples. With `unified`, also of the trainer."""

    format: Literal["none", "int8", "fp8", "fp8-block", "nvfp4", "int6", "int4"] = "int8"
    """Format of weights and activations in linear layers. nvfp4 codes weights only. int6 and int4
    are for experiments."""
    scales: Literal["dynamic", "frozen"] = "dynamic"
    """Scales of int8 weights. dynamic: computed anew at each sync. frozen: computed once, from the
    untrained weights (FlashRL)."""
    noise: Literal["off", "aqn"] = "off"
    """aqn: add random noise to the weights of the actor's norms, for exploration (QeRL;
    [systems.aqn])."""
    update_scale: Annotated[float, Field(ge=1, le=1000, strict=True)] = 1.0
    """UAQ's s: divide weights fed by a norm by s once, before training; 1 = off, paper: 1.5."""
    full_layers: CountOrZero = 0
    """Keep the linear layers of this many first and last decoder layers in full precision."""
    kv: Literal["none", "fp8"] = "none"
    """Format of the local engine's KV cache; none = compute precision."""
    unified: Flag = False
    """One precision flow (Jet-RL): the trainer's linear layers also compute in `format`, and the
    trainer rounds keys and values as the cache does."""
    backward: Literal["bf16", "dgrad", "all"] = "bf16"
    """Which gradients of unified layers use 8-bit products. bf16: none. dgrad: gradients of
    inputs. all: gradients of weights too."""
    track_rows: CountOrZero = 128
    """Measure updates on this many output channels per weight (Eq. 13, 14, code flips); 0 = off."""


@dataclass(frozen=True)
class VllmConfig(Section):
    """Options for `rollout.engine = "vllm"` only ([vllm.md](vllm.md))."""

    tensor_parallel: Count = 1
    """GPUs that share each layer. With more than one, vLLM runs in separate processes."""
    own_process: Flag = False
    """Run vLLM in a separate process instead of the trainer's."""
    online: Flag = False
    """Let vLLM quantize INT8 weights itself. Otherwise it gets our codes, which are fewer bytes."""
    options: Table[bool | int | float | str] = ()
    """Arguments of `vllm.LLM` by name, such as max_model_len."""


@dataclass(frozen=True)
class RolloutConfig(Section):
    """The rollout engine."""

    engine: str = "local"
    """local (ours, continuous batching), hf (transformers, the reference), vllm, or module:name."""
    episode: str = ""
    """module:name of a function that plays the turns of one problem; empty = one completion."""
    max_batch: Count = 256
    """Sequences decoded together."""
    kv_tokens: CountOrZero = 0
    """Capacity of the KV cache in tokens; 0 = enough for max_batch sequences of full length."""
    kv_memory_frac: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.8
    """Largest share of free GPU memory for the KV cache; lower it if training needs more."""
    release_kv: Flag = False
    """Give the KV cache's GPU memory to the trainer between rollouts."""
    deterministic: Flag = False
    """Sample the same tokens whatever else is in the batch; slower. On a CPU, set threads = 1."""
    ahead: Literal[0, 1] = 0
    """1: sample the next step's rollouts while this step's batch is trained. Rollouts are then one
    step old ([one step off](parallel.md#one-step-off))."""
    drafts: Literal["off", "histospec"] = "off"
    """Speculative decoding: histospec drafts from the last responses to the same problem."""
    vllm: VllmConfig = field(default_factory=VllmConfig)


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Several GPUs (docs/parallel.md)."""

    trainers: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Number of processes that train one model, each on its own GPU."""
    shard: Flag = True
    """Each trainer holds a share of weights, gradients and moments. false = each holds all of them:
    no weights are exchanged, layers are fused, and LoRA and every optimizer work."""
    engines: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0
    """Number of separate processes that sample, each with a whole copy of the actor on its own GPU
    (needs Ray). 0 = the trainers sample."""
    colocate: Flag = True
    """Without `engines`: every trainer samples a share of the problems. false = only the first
    trainer samples."""
    min_engines: Count = 1
    """The run stops if fewer than this many engines are left."""
    timeout: Positive = 300.0
    """Replace an engine that decodes no token, or does not answer, for this many seconds. Trainers
    that Ray starts must begin within the same time."""
    address: str = ""
    """HOST:PORT of the Ray cluster that starts engines and trainers, or "auto" to find it. "local"
    = start Ray on this machine for both. Empty = start Ray on this machine for engines only;
    trainers are plain processes."""
    deal: Literal["free", "histopipe"] = "free"
    """Which of the `engines` gets a problem. free: the engine with the fewest sequences. histopipe:
    engines take turns, each with problems of similar expected length
    ([HistoPipe](systems.md#histopipe))."""

    @property
    def is_sharded(self) -> bool:
        return self.trainers > 1 and self.shard


@dataclass(frozen=True)
class EvalConfig(Section):
    """Held-out accuracy."""

    every: CountOrZero = 0
    """Steps between evaluations. The first one is before step 0, the last one after the last step.
    0 = never. If a recipe has held-out files and does not set this key, it is 20."""
    problems: Count = 128
    """Held-out problems."""
    samples: CountOrZero = 0
    """Sampled completions per problem, for avg@k and pass@k; 0 = greedy completions only."""
    temperature: Temperature = 1.0
    """Temperature of the sampled completions."""
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Nucleus mass of the sampled completions."""
    max_tokens: CountOrZero = 0
    """Longest completion; 0 = sampling.max_tokens."""
    precision: Literal["both", "full", "quantized"] = "both"
    """Which weights are evaluated: full precision, the quantized actor, or both."""


@dataclass(frozen=True)
class SaveConfig(Section):
    """Checkpoints."""

    every: CountOrZero = 0
    """Steps between checkpoints. The last step is always saved; 0 = save only that one. If a recipe
    has training files and does not set this key, it is 20."""
    keep: CountOrZero = 2
    """How many of the newest checkpoints to keep; 0 = write none, so the run cannot be resumed."""


@dataclass(frozen=True)
class TrackConfig(Section):
    """What is logged besides metrics.jsonl."""

    samples: CountOrZero = 4
    """Rollouts written to samples.jsonl per step."""
    tensorboard: Flag = False
    """Write TensorBoard events into the run directory."""
    wandb: str = ""
    """Weights & Biases project; empty = off."""


Action = Literal["off", "warn", "stop", "requantize", "full"]


@dataclass(frozen=True)
class AlarmsConfig(Section):
    """What to do if a run goes wrong ([alarms](alarms.md)).

    `warn` warns once. `stop` saves everything and ends with an error. `requantize` builds a new
    engine. `full` samples in full precision from the next step on. `off` does nothing.
    """

    window: Count = 10
    """A collapse must last this many steps in a row. The first so many steps are a run's start."""
    no_signal: Action = "stop"
    """Nothing to learn: rewards are all equal, or equal within each group, and not all answers are
    right."""
    no_signal_steps: Count = 10
    """Steps in a row without a signal."""
    truncated: Action = "warn"
    """Answers are cut at sampling.max_tokens."""
    truncated_above: Fraction = 0.95
    """Share of cut answers, in each step of the window."""
    reward_collapse: Action = "warn"
    """The mean reward falls far below its best."""
    reward_collapse_below: Fraction = 0.5
    """Share of the best window's mean, in each step of the window."""
    held_out_collapse: Action = "warn"
    """Held-out accuracy falls: its 95 % interval lies below that of the best evaluation."""
    entropy_collapse: Action = "warn"
    """The policy stops exploring."""
    entropy_collapse_below: Fraction = 0.05
    """Share of the entropy at the start, in each step of the window."""
    length_collapse: Action = "warn"
    """Answers shrink."""
    length_collapse_below: Fraction = 0.2
    """Share of the mean length at the start, in each step of the window."""
    mismatch_growth: Action = "warn"
    """rollout_corr/k3_kl grows far beyond its own start."""
    mismatch_growth_above: Positive = 4.0
    """Multiple of its start (of 0.001, if it starts lower), in each step of the window."""
    sample_size: Action = "warn"
    """Few tokens carry most of the importance weight."""
    sample_size_below: Fraction = 0.5
    """Effective sample size as a share of the tokens, in each step of the window."""
    unified_gap: Action = "warn"
    """With quant.unified: sampler and policy differ on some tokens."""
    unified_gap_above: Fraction = 0.0
    """Share of a step's tokens with a ratio prox / behav above algo.cap."""
    grader_timeouts: Action = "warn"
    """Graders are killed at task.grade_timeout, in training or in an evaluation."""
    grader_timeouts_above: CountOrZero = 0
    """Killed graders in one step or evaluation."""
    repeated_problems: Action = "warn"
    """A step contains the same prompts many times."""
    repeated_problems_below: Fraction = 0.5
    """Share of different prompts among the prompts of a step."""
    non_finite: Action = "warn"
    """A metric is NaN or infinite. If a loss, gradient or log-prob is, the run always stops."""

    @property
    def falling_back(self) -> list[str]:
        """The alarms after which rollouts are in full precision."""
        return [name for name, action in vars(self).items() if action == "full"]


@dataclass(frozen=True)
class ExperimentalConfig(Section):
    """Options for comparisons. They may change or disappear in any release."""

    acr_max_bound: OrNone[Annotated[float, Field(gt=1, le=1e9, strict=True)]] = None
    """Largest upper clip bound that acr may use; none = no limit."""
    weighted_kl: Flag = False
    """Multiply the KL term by the importance weight, because the actor drew the samples."""
    norm_fed_lr_scale: Annotated[float, Field(ge=1e-6, le=1000, strict=True)] = 1.0
    """Multiply the learning rate of q, k, v, gate and up by this number, and divide the learning
    rate of their norms by it. UAQ has the same effect."""
    dither: Flag = False
    """Start masters at random values that round to their BF16 values; needs a bfloat16 trainer."""
    scale_o_proj: Flag = False
    """Apply UAQ to o_proj instead of v_proj."""
    scale_down_proj: Flag = False
    """Apply UAQ to down_proj instead of up_proj."""


@dataclass(frozen=True)
class Config(Section):
    """One training run."""

    steps: Count = 100
    """RL steps: sync, rollout, updates."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Seed for all randomness."""
    run_dir: Annotated[str, Field(min_length=1)] = "runs/default"
    """Directory of the run. If it already holds a run, that run is resumed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if there is one."""
    threads: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0
    """CPU threads of torch; 0 = torch's default."""
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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    systems: SystemsConfig = field(default_factory=SystemsConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    experimental: ExperimentalConfig = field(default_factory=ExperimentalConfig)

    @property
    def sequences_per_step(self) -> int:
        return self.batch.problems * self.sampling.group_size

    @property
    def updates_per_step(self) -> int:
        return self.batch.minibatches * self.batch.epochs

    @property
    def peak_lr(self) -> float:
        """optim.lr for the batch of a step: eta0 sqrt(B / B0)."""
        size, base = self.sequences_per_step, self.optim.base_batch
        return self.optim.lr * (size / base) ** 0.5 if base else self.optim.lr

    @property
    def eval_precisions(self) -> Sequence[str]:
        """Precisions of an evaluation: "full", the actor's format, or both.

        A policy whose base is in codes has no other precision.
        """
        if self.model.has_coded_base:
            return (self.quant.format,)
        if self.quant.format == "none" or self.eval.precision == "full":
            return ("full",)
        both = ("full", self.quant.format)
        return both if self.eval.precision == "both" else both[1:]

    @property
    def has_full_engine(self) -> bool:
        """Do evaluations during training, or an alarm, need a second, unquantized engine?"""
        is_evaluated = self.eval.every > 0 and "full" in self.eval_precisions
        is_fallback = bool(self.alarms.falling_back)
        return self.quant.format != "none" and (is_evaluated or is_fallback)

    @property
    def eval_max_tokens(self) -> int:
        return self.eval.max_tokens or self.sampling.max_tokens
