"""The records: small, frozen, flowing one way through the loop.

    Problem ─▶ Rollout (Completions) ─▶ Graded ─▶ Batch ─▶ Scored ─▶ Corrected ─▶ Trainable ─▶ loss

Each stage of a batch has all that the one before it had, and every tensor is always present.

Shapes: B sequences, T positions, G completions of one problem.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar

if TYPE_CHECKING:  # tasks are checked, and grading processes start, without torch
    import torch
    from torch import Tensor

TokenIds: TypeAlias = "Sequence[int] | Tensor"
"""Of one response."""
COLDEST = 1e-6
"""The lowest temperature that is not greedy: FP32 takes far smaller ones for 0."""

SHORTEST = 2
"""Tokens of the shortest sequence: one of a prompt, and one of a response."""


@dataclass(frozen=True)
class Problem:
    """One question of a task, tokenised."""

    id: str
    prompt_ids: Sequence[int]
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The task's own data; `extra["prompt"]` is the text of the prompt where there is one."""
    max_tokens: int | None = None
    """Most tokens of a completion, if fewer than `SamplingParams.max_tokens`."""

    @property
    def name(self) -> str:
        """The id without what `qurl.sampling` appends when a problem is asked again or in pieces:
        "sum-7@3@@64" -> "sum-7"."""
        return re.sub(r"(@\d+)?(@@\d+)?$", "", self.id)


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. `temperature=0` is greedy."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 keep all."""
    stop: Sequence[int | str] = ()
    """Token ids or strings that end a completion, besides the model's own end-of-sequence ones."""
    seed: int = 0
    group_size: int = 1
    """Completions per problem."""
    ignore_eos: bool = False
    """Sample to `max_tokens` whatever comes (for benchmarks)."""

    def __post_init__(self) -> None:
        is_warm = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        rules = {
            f"max_tokens = {self.max_tokens} must be at least 1": self.max_tokens >= 1,
            f"group_size = {self.group_size} must be at least 1": self.group_size >= 1,
            f"temperature = {self.temperature} must be 0 (greedy), or from {COLDEST:g} on": is_warm,
            f"top_p = {self.top_p} must lie in (0, 1]": 0 < self.top_p <= 1,
            f"top_k = {self.top_k} must be positive, or 0 or -1 (all)": self.top_k >= -1,
            f"stop = {self.stop!r} must be a sequence, such as [{self.stop!r}]": (
                not isinstance(self.stop, str)
            ),
        }
        for mistake, holds in rules.items():
            if not holds:
                raise ValueError(mistake)

    def limit(self, problem: Problem) -> int:
        """Most tokens of a completion of this problem."""
        own = problem.max_tokens
        return self.max_tokens if own is None else min(own, self.max_tokens)


@dataclass(frozen=True)
class Completion:
    """One sampled answer, token by token. A sampled end-of-sequence token is part of it.

    The policy writes "3*4=", a calculator adds "12", and the policy ends the turn after a sync:

        Completion(
            token_ids=[3, 14, 4, 11, 1, 2, 0],
            logprobs=[-0.1, -0.7, -0.2, -0.1, 0.0, 0.0, -0.3],
            text="3*4=12",
            finish="stop",
            trained=[True, True, True, True, False, False, True],
            versions=[7, 7, 7, 7, 7, 7, 8],
        )
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """log pi_behav of each token, under the distribution that it was really drawn from
    (quantized weights, temperature, top-p and top-k); for greedy decoding, at temperature 1."""
    text: str
    finish: Literal["stop", "length"]
    trained: Sequence[bool] = ()
    """Whether the policy chose the token, so that it is trained; by default, all of them."""
    versions: Sequence[int] = ()
    """Version of the weights that sampled each token; by default, 0."""

    def __post_init__(self) -> None:
        if not self.trained:
            object.__setattr__(self, "trained", (True,) * len(self.token_ids))
        if not self.versions:
            object.__setattr__(self, "versions", (0,) * len(self.token_ids))


@dataclass(frozen=True)
class Rollout:
    """A problem and its group of completions."""

    problem: Problem
    completions: Sequence[Completion]
    version: int
    """Of the weights that sampled it; the oldest, where a sync came in between."""
    temperature: float


@dataclass(frozen=True)
class Graded:
    """A rollout and what each completion is worth."""

    rollout: Rollout
    rewards: Sequence[float]
    """What is trained on: correctness plus any shaping."""
    details: Sequence[Mapping[str, float]]
    """Per completion; always holds `accuracy`, the unshaped reward that filters look at."""

    @property
    def accuracies(self) -> list[float]:
        return [d["accuracy"] for d in self.details]


@dataclass(frozen=True, eq=False)
class KVScales:
    """How an FP8 cache codes keys and values (`qurl.quant.kv`).

    A key 9.0 of a head with scale 0.5 and center 1.0 has the code 16.
    """

    scale: Tensor  # [layers, 2, H_kv], of keys and of values
    center: Tensor  # [layers, H_kv, D], of keys


@dataclass(frozen=True)
class SyncReport:
    """What one `engine.sync` did."""

    version: int
    seconds: float
    """For quantizing and copying the weights."""
    bytes: int
    """Size of the engine's copy of the synchronised weights."""
    code_flip_frac: float
    """Share of quantized codes that changed since the last sync; 0 on the first and without
    quantization, NaN in engines that do not count them (vLLM)."""
    verified: bool
    """Trainer and engine agree on the canary prompt within the bound, and the rows that were looked
    at are exact copies. A sync that fails this raises instead."""
    canary_gap: float
    """Mean |log-prob difference| between trainer and engine on the canary prompt."""
    verify_seconds: float = 0.0
    """For the canary prompt and the spot check, where they are timed apart; else in `seconds`."""
    kv_scales: KVScales | None = None
    """Of an FP8 cache, for trainers that round keys and values as the engine does."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Completions as sampled: one right-padded row each, prompt and response together.

    `mask` is 1 on the tokens that are trained. Per-token tensors are aligned with `token_ids`:
    `logp_behav[b, t]` is the log-prob of `token_ids[b, t]` given everything before it, and 0 where
    `mask` is 0. A prompt of two tokens with completions of two and one:

        token_ids   [[5, 6, 7, 0], [5, 6, 0, 0]]    lengths  [4, 3]
        mask        [[0, 0, 1, 1], [0, 0, 1, 0]]    rewards  [1, 0]    accuracies  [1, 0]
        logp_behav  [[0, 0, -0.2, -0.1], ...]       group    [0, 0]
    """

    token_ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64, prompt + response
    mask: Tensor  # [B, T] float
    logp_behav: Tensor  # [B, T]
    rewards: Tensor  # [B] outcome of each sequence
    accuracies: Tensor  # [B] the same before any shaping; from 1 on the answer is right
    group: Tensor  # [B] int64, which rollout of the step
    problem_ids: Sequence[str]  # [B]
    temperature: float
    bundle: int = 1
    """So many rows that follow each other stay in one mini-batch."""

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.mask.sum())

    def into(self, stage: type[Stage], **added: Tensor) -> Stage:
        """The next stage: everything in this batch, and what `added` names."""
        fields: dict[str, Any] = {**vars(self), **added}
        return stage(**fields)

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor."""
        from torch import Tensor

        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return self.replace(**{name: function(x) for name, x in tensors.items()})

    def select(self, rows: Tensor) -> Self:
        """The given sequences, trimmed to the longest of them."""
        longest = int(self.lengths[rows].max()) if len(rows) else SHORTEST
        picked = self.map(lambda x: x[rows, :longest] if x.dim() == 2 else x[rows])
        return picked.replace(problem_ids=[self.problem_ids[row] for row in rows.tolist()])

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda x: x.to(device))


@dataclass(frozen=True, kw_only=True)
class Scored(Batch):
    """A batch with what the trainer's forwards add, all [B, T] and 0 where `mask` is 0.

    A run without a reference has `logp_ref = logp_prox` (its KL is 0), one without a critic has
    `values = 0`. For the batch above, where quantization made the first token too likely:

        logp_behav  [[0, 0, -0.2, -0.1], ...]
        logp_prox   [[0, 0, -0.3, -0.1], ...]    mismatch rho = exp(-0.1) = 0.90 on that token

    A row without `has_prox` has had no forward of the policy: its `logp_prox` is `logp_behav` and
    its entropy 0. The first update of a step gives its own rows their prox (`Learner.update`).
    """

    logp_prox: Tensor  # [B, T]
    logp_ref: Tensor  # [B, T]
    values: Tensor  # [B, T]
    entropy: Tensor  # [B, T] of pi_prox
    has_prox: Tensor  # [B] bool


@dataclass(frozen=True, kw_only=True)
class Corrected(Scored):
    """A scored batch with its importance weights; rejected tokens are out of `mask`.

    With C = 2, a token with mismatch rho = 8 has weight 2 and shrink 1/4; one with rho = 0.9 has
    weight 0.9 and shrink 1.
    """

    weight: Tensor  # [B, T] importance weight, min(rho, C) if truncated
    shrink: Tensor  # [B, T] r = w / rho, in (0, 1]


@dataclass(frozen=True, kw_only=True)
class Trainable(Corrected):
    """What the losses read.

    With GRPO, rewards [1, 0] of one group give the advantages [0.71, -0.71], on every trained token
    of the sequence. Without a critic, returns are the advantages.
    """

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T] what the critic learns; by default advantages + values


@dataclass(frozen=True, kw_only=True)
class Trained(Trainable):
    """A batch after its updates.

    A token with logp = -0.8 and logp_prox = -1.0 had the ratio R = exp(0.2) = 1.22 when its
    sequence was trained on for the last time; with clip_high = 0.2 and A > 0 it was clipped.
    """

    logp: Tensor  # [B, T] before a row's last update; logp_prox if it had none


Stage = TypeVar("Stage", bound=Batch)
