"""Accuracy of a checkpoint by transformers alone: none of our engine, sampler or scheduler.

    python -m benchmarks.paper.baseline --model DIR --test FILE --completions OUT.jsonl

The prompts are those of the recipe, token by token; answers are greedy, in BF16 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.paper.arms import PPO, ROOT
from benchmarks.paper.results import BASELINE
from qurl.config import load_config
from qurl.ops.device import default_dtype, pick_device
from qurl.rewards.pool import GradingPool
from qurl.rollout.stop import eos_ids
from qurl.run.machine import describe_machine
from qurl.run.splits import held_out_problems, load_split
from qurl.types import Problem


@torch.no_grad()
def answer_greedily(
    model: Any, tokenizer: Any, problems: Sequence[Problem], *, max_tokens: int, batch: int
) -> list[str]:
    """Completions in the order of the problems; prompts of similar length share a batch."""
    texts = [""] * len(problems)
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].prompt_ids))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        prompts = [list(problems[i].prompt_ids) for i in rows]
        width = max(map(len, prompts))
        ids = [[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        output = model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # some checkpoints ask for another, which RL does not know
            eos_token_id=sorted(eos_ids(model, tokenizer)),
            pad_token_id=tokenizer.pad_token_id,
        )
        for i, tokens in zip(rows, output[:, width:].tolist(), strict=True):
            texts[i] = tokenizer.decode(tokens, skip_special_tokens=True)
    return texts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plain transformers accuracy of a checkpoint.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--recipe", default=str(ROOT / PPO))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, default=BASELINE)
    parser.add_argument("--completions", type=Path, help="JSONL of what was answered")
    args = parser.parse_args(argv)
    paths = ["--model.path", args.model, "--task.path", args.test, "--task.eval_path", args.test]
    config = load_config(args.recipe, paths)
    device = pick_device("auto")
    dtype = default_dtype(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model = model.to(device).eval()
    problems = held_out_problems(config, load_split(config, "eval", tokenizer, model.config))
    start = time.perf_counter()
    texts = answer_greedily(
        model, tokenizer, problems, max_tokens=config.eval_max_tokens, batch=args.batch
    )
    seconds = time.perf_counter() - start
    with GradingPool("math", workers=4) as pool:
        pairs = zip(problems, texts, strict=True)
        grades = pool.grade([(text, p.answer, p.extra) for p, text in pairs])
    outcomes = "".join("01"[grade.accuracy >= 1] for grade in grades)
    result = {
        "model": Path(args.model).name,
        "max_tokens": config.eval_max_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": round(seconds, 1),
        "machine": describe_machine(device),
        "outcomes": outcomes,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{outcomes.count('1')} of {len(outcomes)} in {seconds:.0f} s")
    if args.completions:
        lines = [
            json.dumps({"problem": p.id, "answer": p.answer, "completion": text}) + "\n"
            for p, text in zip(problems, texts, strict=True)
        ]
        args.completions.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
