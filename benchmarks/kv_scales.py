"""Which scales suit an FP8 KV cache: those of the canary with a wide margin, or of the last batch.

    python -m benchmarks.kv_scales --model FOLDER --data gsm8k_train.jsonl

FP8-RL can take scales from the trainer's last batch: percentile 99.9 of |k| and of |v|, times 1.05.
Here a model samples answers. Scales come from the first half of them, and the trainer scores the
other half with and without rounded keys and values. Nothing else is quantized. Runs on a CPU in
FP32; writes benchmarks/results/kv_scales.json.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.mismatch import compare, score
from benchmarks.scripts import RESULTS, run_command, write_result
from qurl.bench.record import describe_machine
from qurl.config import ModelConfig
from qurl.quant.kv import FP8_MAX, KVRounding, set_kv_scales_
from qurl.rollout import build_engine
from qurl.tasks import load_task
from qurl.trainer.batches import pad
from qurl.trainer.policy import load_policy
from qurl.types import Graded, KVScales, SamplingParams

MARGIN, PERCENTILE = 1.05, 0.999


@dataclass(frozen=True)
class Options:
    model: Path
    data: Path
    problems: int = 32
    tokens: int = 128


class Recorder(KVRounding):
    """Keeps the keys and values of one layer, and rounds them once it has scales."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.num_beyond = self.num_rounded = 0

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.scales is None:
            self.seen.append((k.detach().squeeze(0), v.detach().squeeze(0)))  # [H_kv, N, D]
        else:
            scale, center = self.scales
            numbers = torch.stack([k.squeeze(0) - center[:, None], v.squeeze(0)])
            self.num_beyond += int((numbers.abs() > FP8_MAX * scale[..., None, None]).sum())
            self.num_rounded += numbers.numel()
        return super().forward(k, v)


def main() -> int:
    return run_command("kv_scales", Options, measure)


@torch.no_grad()
def measure(options: Options) -> None:
    device = torch.device("cpu")
    policy = load_policy(options.model, ModelConfig(), device).freeze_()
    task = load_task("gsm8k", path=str(options.data), split="train", tokenizer=policy.tokenizer)
    engine = build_engine("local", policy.model, policy.tokenizer, quant="none", kv="fp8")
    of_canary = engine.sync(policy.model, version=1).kv_scales
    assert of_canary is not None
    sampler = build_engine("local", policy.model, policy.tokenizer, quant="none")
    sampler.sync(policy.model, version=1)
    problems = [task[i] for i in range(options.problems)]
    rollouts = sampler.generate(problems, SamplingParams(max_tokens=options.tokens))
    graded = [Graded(r, [0.0], [{"accuracy": 0.0}]) for r in rollouts]
    half = len(graded) // 2
    last, batch = pad(graded[:half]), pad(graded[half:])

    recorders = attach_(policy.model)
    score(policy, last)
    seen = [tuple(torch.cat(x, 1) for x in zip(*r.seen, strict=True)) for r in recorders]
    rules = {
        "canary, largest x 16, by head, centered (ours)": of_canary,
        "batch, 99.9 % x 1.05, by layer (FP8-RL)": of_batch(seen, PERCENTILE, by_head=False),
        "batch, 99.9 % x 1.05, by head, centered": of_batch(seen, PERCENTILE, of_canary),
        "batch, largest x 1.05, by head, centered": of_batch(seen, 1.0, of_canary),
    }
    expected, rows = score(policy, batch), []
    for name, scales in rules.items():
        set_kv_scales_(policy.model, scales)
        for recorder in recorders:
            recorder.num_beyond = recorder.num_rounded = 0
        found = compare(expected, score(policy, batch), batch)
        beyond = sum(recorder.num_beyond for recorder in recorders)
        total = sum(recorder.num_rounded for recorder in recorders)
        rows.append({"scales": name, **found, "saturated_frac": beyond / total})
        print(rows[-1], flush=True)
    write_result(
        RESULTS / "kv_scales.json",
        machine=describe_machine(device),
        what="log-probs of the trainer with rounded keys and values against those without, by the "
        "rule for the scales",
        model=options.model.name,
        problems=options.problems,
        tokens=options.tokens,
        rows=rows,
    )


def attach_(model: nn.Module) -> list[Recorder]:
    """Let every attention record its keys and values."""
    attentions = [module for module in model.modules() if hasattr(module, "k_proj")]
    for attention in attentions:
        attention.kv_rounding = Recorder()
    return [attention.kv_rounding for attention in attentions]  # type: ignore[misc]


def of_batch(
    seen: list[tuple[Tensor, ...]],
    quantile: float,
    centers: KVScales | None = None,
    *,
    by_head: bool = True,
) -> KVScales:
    """Scales from keys and values [H_kv, N, D] of each layer."""
    scales, zero = [], torch.zeros(len(seen), len(seen[0][0]), seen[0][0].shape[-1])
    center = zero if centers is None else centers.center
    for (k, v), c in zip(seen, center, strict=True):
        sizes = [(k - c[:, None]).abs().flatten(1), v.abs().flatten(1)]  # [H_kv, N D]
        tops = torch.stack([largest(x if by_head else x.flatten()[None], quantile) for x in sizes])
        scales.append((tops * MARGIN / FP8_MAX).expand(2, len(k)))
    return KVScales(torch.stack(scales), center)


def largest(x: Tensor, quantile: float) -> Tensor:
    """The quantile of each row; torch's own refuses rows of this length."""
    place = max(1, round(quantile * x.shape[1]))
    return x.kthvalue(place).values


if __name__ == "__main__":
    sys.exit(main())
