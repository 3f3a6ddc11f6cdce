"""How far the engine's log-probs are from the trainer's, on a real model and real questions.

    python benchmarks/mismatch.py MODEL GSM8K.jsonl [OUT.json] [--problems 64] [--tokens 256] \\
        [--name NAME] [--formats int8,int6]

The engine samples at temperature 1 in each format; the trainer scores the same tokens.
By token: mean |logp_prox - logp_behav|, and the estimate k3 of KL(behav || prox). Both forwards
of the trainer, padded by transformers and packed by us, are compared too.
"""

from __future__ import annotations

import argparse
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl.bench.record import describe_machine
from qurl.config import ModelConfig
from qurl.losses import kl_penalty
from qurl.ops.device import pick_device
from qurl.rollout import build_engine
from qurl.tasks import load_task
from qurl.trainer.batches import pad
from qurl.trainer.packing import BatchLayout
from qurl.trainer.policy import Policy, load_policy
from qurl.types import Batch, Graded, SamplingParams

FORMATS = ("none", "int8", "fp8", "fp8-block")
KV = ("none", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probs of engine and trainer.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--name", help="of the model, in the results; without it, its folder's")
    args = parser.parse_args()
    device = pick_device("auto")
    policy = load_policy(args.model, ModelConfig(), device).freeze_()
    task = load_task("gsm8k", path=str(args.data), split="train", tokenizer=policy.tokenizer)
    problems = [task[i] for i in range(args.problems)]
    params = SamplingParams(max_tokens=args.tokens, temperature=1.0)

    rows = []
    print(f"{'format':10} {'kv':5} {'tokens':>7} {'mean |gap|':>11} {'99 %':>8} {'k3':>9}")
    caches = KV if device.type == "cuda" else ("none",)
    for quant, kv in itertools.product(args.formats.split(","), caches):
        engine = build_engine("local", policy.model, policy.tokenizer, quant=quant, kv=kv)
        rollouts = engine.generate(problems, params)
        batch = pad([Graded(r, [0.0], [{"accuracy": 0.0}]) for r in rollouts]).to(device)
        row = {"format": quant, "kv": kv, **compare(score(policy, batch), batch.logp_behav, batch)}
        rows.append(row)
        print(
            f"{quant:10} {kv:5} {row['tokens']:7d} {row['mean_gap']:11.5f} {row['gap_99']:8.4f} "
            f"{row['k3']:9.2e}"
        )
    padded = score(policy, batch, is_packed=False)
    forwards = compare(score(policy, batch), padded, batch)
    print(f"packed against padded forward of the trainer: {forwards['mean_gap']:.5f}")
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "machine": describe_machine(device),
                    "model": args.name or args.model.name,
                    "trainer": str(policy.compute_dtype).removeprefix("torch."),
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
    }


if __name__ == "__main__":
    main()
