"""What the page draws: which metrics go together, under which title."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Chart:
    """Metrics on one pair of axes."""

    group: str
    title: str
    note: str
    metrics: Mapping[str, str]
    """Metric -> label. A name with * stands for a family, labelled by what each * matches."""
    scale: Literal["linear", "log", "share"] = "linear"
    """A share is shown in percent."""
    kind: Literal["line", "stack"] = "line"
    unit: str = ""


PARTS: Mapping[str, tuple[str, str]] = {
    "update": ("update", "gradient steps of the policy"),
    "rollout": ("rollout", "the sampler, a quantized copy of the policy, writes completions"),
    "prox": ("re-scoring", "the full-precision policy scores what the sampler wrote"),
    "eval": ("evaluation", "answers to held-out problems"),
    "sync": ("sync", "new weights are quantized for the sampler"),
    "grade": ("grading", "waiting for graders after the last completion"),
    "track": ("update tracking", "how much of an update the quantized copy sees"),
    "save": ("checkpoint", "writing weights to the disk"),
    "other": ("other", "what no part accounts for"),
}
"""Parts of a step, timing_s/*: name and meaning. Their order is that of their colours."""

LEARNING, SAMPLER = "Does it learn?", "Is the sampler still the policy?"
UPDATES, SPEED = "Are the updates sound?", "Where does the time go?"

CHARTS: Sequence[Chart] = (
    Chart(LEARNING, "Reward", "Mean over the completions of a step.", {"reward/mean": "reward"}),
    Chart(
        LEARNING,
        "Held-out accuracy",
        "Greedy answers to problems that are never trained on, with 95% intervals.",
        {"eval/*/accuracy": ""},
        "share",
    ),
    Chart(
        LEARNING,
        "Held-out accuracy by set",
        "The same for each set of task.eval_sets.",
        {"eval/*/*/accuracy": ""},
        "share",
    ),
    Chart(
        LEARNING,
        "Response length",
        "Tokens per completion.",
        {"response_length/mean": "mean", "response_length/max": "longest"},
        unit="tokens",
    ),
    Chart(
        LEARNING,
        "Truncated completions",
        "Share of completions cut at sampling.max_tokens.",
        {"response_length/clip_ratio": "truncated"},
        "share",
    ),
    Chart(
        LEARNING,
        "Groups without signal",
        "Share of groups that are all right or all wrong. A comparison within the group learns "
        "nothing from them.",
        {"reward/frac_all_correct": "all right", "reward/frac_all_wrong": "all wrong"},
        "share",
    ),
    Chart(
        LEARNING,
        "Entropy",
        "Of the policy, per token. It falls as the policy becomes sure.",
        {"actor/entropy": "entropy"},
        unit="nats",
    ),
    Chart(
        SAMPLER,
        "Mismatch KL",
        "How far the quantized sampler is from the full-precision policy: KL(behav || prox) per "
        "token.",
        {"rollout_corr/k3_kl": "mismatch KL"},
        "log",
    ),
    Chart(
        SAMPLER,
        "Effective sample size",
        "Share of the batch that counts after importance weighting. 100%: the weights change "
        "nothing.",
        {"rollout_corr/rollout_is_eff_sample_size": "effective sample size"},
        "share",
    ),
    Chart(
        SAMPLER,
        "Largest and smallest ratio",
        "Probability under the policy over that under the sampler, of the step's most extreme "
        "tokens. 1: no difference.",
        {"rollout_corr/rollout_is_max": "largest", "rollout_corr/rollout_is_min": "smallest"},
        "log",
    ),
    Chart(
        SAMPLER,
        "Truncated weights",
        "Share of tokens whose ratio is above the cap C, so that their weight is C, or below 1/C.",
        {
            "rollout_corr/rollout_is_ratio_fraction_high": "above C",
            "rollout_corr/rollout_is_ratio_fraction_low": "below 1/C",
        },
        "share",
    ),
    Chart(
        SAMPLER,
        "Probability gap",
        "Difference between policy and sampler in the probability of a sampled token.",
        {"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "largest"},
        "log",
    ),
    Chart(
        SAMPLER,
        "Codes of an FP8 cache at their limit",
        "Share of keys and values at the end of their range.",
        {"rollout/kv_saturated_frac": "saturated"},
        "share",
    ),
    Chart(
        UPDATES,
        "Clipped tokens",
        "Share of tokens whose ratio left the clip range, and of those that ACR's wider bound "
        "lets through.",
        {"actor/pg_clipfrac": "clipped", "acr/rescued_frac": "rescued by ACR"},
        "share",
    ),
    Chart(
        UPDATES,
        "Widest bound",
        "Largest upper clip bound that ACR allowed in a step.",
        {"acr/max_upper": "upper bound"},
    ),
    Chart(
        UPDATES,
        "Gradient norm",
        "Before clipping at optim.grad_clip.",
        {"actor/grad_norm": "policy", "critic/grad_norm": "critic"},
        "log",
    ),
    Chart(
        UPDATES,
        "Loss",
        "Of the objective. Its level says little, a jump a lot.",
        {"actor/pg_loss": "policy", "actor/kl_loss": "KL term", "critic/vf_loss": "critic"},
    ),
    Chart(
        UPDATES,
        "KL of the updates",
        "From the policy before a step to the policy in its updates.",
        {"actor/ppo_kl": "KL"},
    ),
    Chart(
        UPDATES,
        "KL to the reference",
        "How far the policy has moved from where it started.",
        {"actor/ref_kl": "KL"},
    ),
    Chart(
        UPDATES,
        "Learning rate",
        "After warm-up and schedule.",
        {"actor/lr": "policy", "critic/lr": "critic"},
    ),
    Chart(
        UPDATES,
        "Critic",
        "Share of the returns' variance that the values explain.",
        {"critic/vf_explained_var": "explained variance"},
    ),
    Chart(
        UPDATES,
        "Update against quantization error",
        "Relative size of an update (Eq. 13) and of the actor's rounding (Eq. 14), squared.",
        {"uaq/update_norm": "update", "uaq/quant_error": "quantization error"},
        "log",
    ),
    Chart(
        UPDATES,
        "Update visibility",
        "How much of an update the quantized copy sees: share of codes changed, cosine, "
        "projection (1 = all of it).",
        {
            "uaq/code_flip_frac": "changed codes",
            "uaq/update_cosine": "cosine",
            "uaq/update_proj": "projection",
        },
    ),
    Chart(SPEED, "Time per step", "Seconds, by part.", {"timing_s/*": ""}, kind="stack", unit="s"),
    Chart(
        SPEED,
        "Throughput",
        "Tokens per second while sampling, and while training.",
        {"perf/rollout_tokens_per_s": "rollout", "perf/train_tokens_per_s": "training"},
        unit="tokens/s",
    ),
    Chart(
        SPEED,
        "Memory",
        "Peak so far.",
        {"perf/cpu_memory_used_gb": "process", "perf/max_memory_allocated_gb": "GPU (torch)"},
        unit="GiB",
    ),
)

INTERVALS = ("_low", "_high")


def is_charted(metric: str) -> bool:
    """Does any chart show this metric, or the end of its interval?"""
    return _CHARTED.fullmatch(metric) is not None


_CHARTED = re.compile(
    "|".join(
        f"{re.escape(name).replace(re.escape('*'), '[^/]+')}(?:{'|'.join(INTERVALS)})?"
        for chart in CHARTS
        for name in chart.metrics
    )
)
