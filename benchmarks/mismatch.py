"""How far the engine's log-probs are from the trainer's, on a real model and real questions.

    python benchmarks/mismatch.py MODEL GSM8K.jsonl [OUT.json] [--problems 64] [--tokens 256] \\
        [--name NAME] [--arms int8,fp8-unified] [--kv none,fp8]

The engine samples at temperature 1 in each format; the trainer scores the same tokens, in full
precision or, if the arm ends in "-unified", in the engine's format. By token: mean and 99 % of
|logp_prox - logp_behav|, the estimate k3 of KL(behav || prox), the largest ratio prox / behav or
behav / prox, and the share of tokens whose ratio leaves PPO's clip range of 0.2. Both forwards of
the trainer, padded by transformers and packed by us, are compared too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl.bench.record import describe_machine
from qurl.config import ModelConfig
from qurl.config.schema import QuantConfig
from qurl.losses import kl_penalty
from qurl.ops.device import pick_device
from qurl.quant.kv import set_kv_scales_
from qurl.rollout import build_engine
from qurl.tasks import load_task
from qurl.trainer.batches import pad
from qurl.trainer.packing import BatchLayout
from qurl.trainer.policy import Policy, load_policy
from qurl.types import Batch, Graded, SamplingParams

ARMS = ("none", "int8", "fp8", "fp8-block", "int8-unified", "fp8-unified", "fp8-block-unified")
UNIFIED = "-unified"
HEAD = (
    "arm                kv      tokens  mean |gap|      99 %        k3  largest ratio  outside clip"
)
ROW = (
    "{arm:17}  {kv:4}  {tokens:8d}  {mean_gap:10.5f}  {gap_99:8.4f}  {k3:8.2e}  "
    "{largest_ratio:13.3f}  {outside_clip:12.1e}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probs of engine and trainer.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--kv", default="none,fp8")
    parser.add_argument("--name", help="of the model, in the results; without it, its folder's")
    args = parser.parse_args()
    device = pick_device("auto")
    plain = policy = load_policy(args.model, ModelConfig(), device).freeze_()
    task = load_task("gsm8k", path=str(args.data), split="train", tokenizer=policy.tokenizer)
    problems = [task[i] for i in range(args.problems)]
    params = SamplingParams(max_tokens=args.tokens, temperature=1.0)

    rows = []
    print(HEAD)
    caches = args.kv.split(",") if device.type == "cuda" else ("none",)
    for arm, kv in itertools.product(args.arms.split(","), caches):
        quant: Any = arm.removesuffix(UNIFIED)
        is_unified = arm.endswith(UNIFIED)
        if is_unified:
            precision = QuantConfig(format=quant, unified=True, kv=kv)
            policy = load_policy(args.model, ModelConfig(), device, precision).freeze_()
        else:
            policy = plain
        options: Any = {"quant": quant, "kv": kv, "unified": is_unified}
        engine = build_engine("local", policy.model, policy.tokenizer, **options)
        if (scales := engine.sync(policy.model, version=1).kv_scales) is not None:
            set_kv_scales_(policy.model, scales)
        rollouts = engine.generate(problems, params)
        batch = pad([Graded(r, [0.0], [{"accuracy": 0.0}]) for r in rollouts]).to(device)
        row = {"arm": arm, "kv": kv, **compare(score(policy, batch), batch.logp_behav, batch)}
        rows.append(row)
        print(ROW.format(**row), flush=True)
        del engine
    padded = score(plain, batch, is_packed=False)
    forwards = compare(score(plain, batch), padded, batch)
    print(f"packed against padded forward of the trainer: {forwards['mean_gap']:.5f}")
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "machine": describe_machine(device),
                    "model": args.name or args.model.name,
                    "trainer": str(plain.compute_dtype).removeprefix("torch."),
                    "problems": args.problems,
                    "tokens": args.tokens,
                    "rows": rows,
                    "packed_against_padded": forwards,
                },
                indent=1,
            )
            + "\n"
        )


@torch.no_grad()
def score(policy: Policy, batch: Batch, *, is_packed: bool = True) -> Tensor:
    return policy.score(batch, BatchLayout.of(batch, is_packed=is_packed)).logp


def compare(logp_prox: Tensor, logp_behav: Tensor, batch: Batch) -> dict[str, Any]:
    keep = batch.mask.bool()
    prox, behav = logp_prox[keep].double(), logp_behav[keep].double()
    gaps = (prox - behav).abs()
    return {
        "tokens": int(keep.sum()),
        "mean_gap": float(gaps.mean()),
        "gap_99": float(gaps.quantile(0.99)),
        "k3": float(kl_penalty(behav, prox, "k3").mean()),
        "largest_ratio": float(gaps.max().exp()),
        "outside_clip": float((gaps > math.log(1.2)).double().mean()),
    }


if __name__ == "__main__":
    main()
