"""What drafts from the last epoch's answers save on a toy task, on a CPU.

    python -m benchmarks.histospec

Running sums (`3+8+5=` is `3,11,16`) of eight digits, rewarded by the share of right sums: a pool of
128 problems, 32 x 8 completions a step, a tiny model in INT8 at temperature 1, one thread. Every
arm starts from the same warm-started model and samples the same tokens, which is checked. The
learning rate is that of the demo, so the policy moves between two epochs. Seconds of a CPU say
little about a GPU. Writes benchmarks/results/histospec.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import fmean

import torch

from qurl.config import load_config
from qurl.run.assembly import initial_model, load_split
from qurl.run.directory import read_jsonl
from qurl.run.machine import describe_machine
from qurl.tasks.generated import Draft
from qurl.train import train

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "arithmetic-cpu.toml"
RESULT = ROOT / "benchmarks" / "results" / "histospec.json"
NUM_PROBLEMS, NUM_ASKED = 128, 32
STEPS_PER_EPOCH = NUM_PROBLEMS // NUM_ASKED

SHARED = {
    "task.difficulty": 8,
    "model.scratch.warm_start_steps": 400,
    "batch.problems": NUM_ASKED,
    "batch.epochs": 1,
    "sampling.group_size": 8,
    "sampling.max_tokens": 32,
    "sampling.keep_responses": True,
    "quant.track_rows": 0,
    "eval.every": 0,
    "save.every": 0,
    "track.samples": 64,
    "threads": 1,
    "device": "cpu",
}
DRAFTS = {"rollout.drafts": "histospec"}
ARMS: dict[str, dict[str, object]] = {
    "off": {},
    "192 tokens a step": DRAFTS,
    "1024 tokens a step": {**DRAFTS, "systems.histospec.step_tokens": 1024},
    "1024 tokens a step, add_reset": {
        **DRAFTS,
        "systems.histospec.step_tokens": 1024,
        "systems.histospec.window": "add_reset",
    },
    "off, 32 sequences at once": {"rollout.max_batch": 32},
    "192 tokens a step, 32 sequences at once": {**DRAFTS, "rollout.max_batch": 32},
}
KEPT = ("draft/accept_frac", "draft/accepted_length", "draft/tokens_per_step", "draft/step_frac")
"""Metrics of the result, besides accuracy and seconds of rollouts."""


def running_sums(rng: Random, difficulty: int) -> Draft:
    """`3+8+5=` and `3,11,16`."""
    terms = [rng.randrange(10) for _ in range(difficulty)]
    sums = [str(sum(terms[: i + 1])) for i in range(difficulty)]
    return Draft("+".join(map(str, terms)) + "=", ",".join(sums))


def share_right(text: str, answer: str, extra: object) -> float:
    """Of the sums, place by place."""
    right = answer.split(",")
    found = text.split(",")
    return sum(a == b for a, b in zip(found, right, strict=False)) / max(len(found), len(right))


def prepare(folder: Path) -> dict[str, object]:
    """The model and the problems that all arms share."""
    words = ["--task.name", "benchmarks.histospec:running_sums"]
    keys = ("task.difficulty", "model.scratch.warm_start_steps", "threads", "device")
    config = load_config(RECIPE, [*words, *to_words({key: SHARED[key] for key in keys})])
    model = initial_model(config, folder, torch.device("cpu"))
    task = load_split(config, "train")
    problems = [task[i] for i in range(NUM_PROBLEMS)]
    rows = [{"prompt": p.extra["prompt"], "answer": p.answer} for p in problems]
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "benchmarks.histospec:share_right"
    return {"model.path": model, "task.name": "file", "task.reward": reward, "task.path": path}


def to_words(flags: dict[str, object]) -> list[str]:
    return [str(word) for key, value in flags.items() for word in (f"--{key}", value)]


def run_arm(folder: Path, arm: str, shared: dict[str, object], steps: int) -> Path:
    """Train one arm, and return its run directory."""
    kept = {k: v for k, v in SHARED.items() if not k.startswith("model.scratch")}
    del kept["task.difficulty"]
    flags = kept | shared | ARMS[arm] | {"steps": steps, "run_dir": folder / arm.replace(" ", "-")}
    return train(load_config(RECIPE, to_words(flags)))


def by_epoch(run: Path) -> list[dict[str, float]]:
    """Means over the steps of each epoch."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["step"] >= 0]
    epochs = []
    for first in range(0, len(rows), STEPS_PER_EPOCH):
        part = rows[first : first + STEPS_PER_EPOCH]
        names = (*KEPT, "reward/accuracy", "response_length/mean", "timing_s/rollout")
        epochs.append({n: fmean(r[n] for r in part) for n in names if n in part[0]})
    return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    results, samples = {}, {}
    with tempfile.TemporaryDirectory() as name:
        shared = prepare(Path(name))
        for arm in ARMS:
            run = run_arm(Path(name), arm, shared, args.epochs * STEPS_PER_EPOCH)
            results[arm] = by_epoch(run)
            samples[arm] = (run / "samples.jsonl").read_text()
    for arm, epochs in results.items():
        print(arm)
        for epoch, row in enumerate(epochs):
            print(f"  epoch {epoch}:", ", ".join(f"{k} {v:.3f}" for k, v in row.items()))
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(torch.device("cpu")),
        "settings": {k: str(v) for k, v in SHARED.items()},
        "flags": {arm: {k: str(v) for k, v in flags.items()} for arm, flags in ARMS.items()},
        "same_samples": len(set(samples.values())) == 1,
        "epochs": results,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"all arms sampled the same: {result['same_samples']}")


if __name__ == "__main__":
    main()
