"""What drafts from the last epoch's answers save, on a toy task or on GSM8K.

    python -m benchmarks.histospec
    python -m benchmarks.histospec --model FOLDER --data gsm8k_train.jsonl --epochs 3

Without a model: running sums (`3+8+5=` is `3,11,16`) of eight digits, rewarded by the share of
right sums, 32 x 8 completions a step of a tiny model in INT8 at temperature 1, on one thread of a
CPU, whose seconds say little about a GPU. The learning rate is that of the demo, so the policy
moves between two epochs. With a model: recipes/gsm8k-histospec.toml with 1 to 32 problems x 8
completions a step, and the median rollout of an epoch, because the first one with drafts compiles
kernels. Both ask the same problems again and again. Every arm starts from the same weights; on a
CPU all sample the same tokens, which is checked. Writes
benchmarks/results/histospec.json or histospec_gsm8k.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from random import Random
from statistics import fmean, median

import torch

from benchmarks.scripts import DEMO, RESULTS, ROOT, to_words, write_problems, write_result
from qurl.config import load_config
from qurl.ops.device import pick_device
from qurl.run.assembly import initial_model, load_split
from qurl.run.directory import read_jsonl
from qurl.run.machine import describe_machine
from qurl.tasks.files import read_columns
from qurl.tasks.generated import Draft
from qurl.train import train

GSM8K = ROOT / "recipes" / "gsm8k-histospec.toml"
NUM_ASKED = 32
"""Problems of a step of the toy task."""

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
OFF = {"rollout.drafts": "off"}
GSM8K_SHARED: dict[str, object] = {
    "eval.every": 0,
    "save.every": 0,
    "save.keep": 0,
    "track.samples": 64,
    "quant.track_rows": 0,
}
GSM8K_STEPS, GSM8K_PROBLEMS = 4, 16
"""Fewest steps and problems of an epoch."""
GSM8K_ARMS: dict[str, dict[str, object]] = {
    f"{arm}, {asked} x 8": {"batch.problems": asked, **flags}
    for asked in (1, 2, 4, 8, 32)
    for arm, flags in {
        "off": OFF,
        "192 tokens a step": DRAFTS,
        "1024 tokens a step": {**DRAFTS, "systems.histospec.step_tokens": 1024},
    }.items()
}
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


def prepare(folder: Path, num_problems: int) -> dict[str, object]:
    """The model and the problems that all arms share."""
    words = ["--task.name", "benchmarks.histospec:running_sums"]
    keys = ("task.difficulty", "model.scratch.warm_start_steps", "threads", "device")
    config = load_config(DEMO, [*words, *to_words({key: SHARED[key] for key in keys})])
    model = initial_model(config, folder, torch.device("cpu"))
    path = folder / "train.jsonl"
    write_problems(path, load_split(config, "train"), num_problems)
    reward = "benchmarks.histospec:share_right"
    return {"model.path": model, "task.name": "file", "task.reward": reward, "task.path": path}


def first_problems(folder: Path, data: Path, asked: int) -> tuple[Path, int]:
    """A file with the problems of an epoch: enough for a few steps of `asked`."""
    num_problems = max(GSM8K_PROBLEMS, GSM8K_STEPS * asked)
    path = folder / f"train-{num_problems}.jsonl"
    with path.open("w") as file:
        for _, row in itertools.islice(read_columns(data), num_problems):
            file.write(json.dumps(row) + "\n")
    return path, num_problems


def run_arm(folder: Path, arm: str, flags: dict[str, object], recipe: Path, num_asked: int) -> Path:
    """Train one arm until it has asked so many problems, and return its run directory."""
    name = arm.replace(" ", "-").replace(",", "")
    steps = num_asked // int(str(flags["batch.problems"]))
    return train(load_config(recipe, to_words(flags | {"steps": steps, "run_dir": folder / name})))


def by_epoch(run: Path, epochs: int) -> list[dict[str, float]]:
    """Means over the steps of each epoch, and the median rollout."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["step"] >= 0]
    names = (*KEPT, "reward/accuracy", "response_length/mean", "timing_s/rollout")
    num_steps = len(rows) // epochs
    parts = [rows[first : first + num_steps] for first in range(0, len(rows), num_steps)]
    return [
        {
            **{n: fmean(r[n] for r in part) for n in names if n in part[0]},
            "median_rollout_s": median(r["timing_s/rollout"] for r in part),
        }
        for part in parts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--problems", type=int, default=128, help="of an epoch of the toy task")
    parser.add_argument("--model", type=Path, help="folder; with --data, GSM8K instead of the toy")
    parser.add_argument("--data", type=Path, help="problems of GSM8K")
    parser.add_argument("--arms", help="a|b: only these")
    args = parser.parse_args()
    is_toy = args.model is None
    recipe, arms = (DEMO, ARMS) if is_toy else (GSM8K, GSM8K_ARMS)
    names = args.arms.split("|") if args.arms else list(arms)
    results, samples = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if is_toy:
            kept = {k: v for k, v in SHARED.items() if not k.startswith("model.scratch")}
            del kept["task.difficulty"]
            shared = kept | prepare(folder, args.problems)
        else:
            shared = GSM8K_SHARED | {"model.path": args.model}
        for arm in names:
            flags, num_problems = shared | arms[arm], args.problems
            if not is_toy:
                asked = int(str(flags["batch.problems"]))
                path, num_problems = first_problems(folder, args.data, asked)
                flags |= {"task.path": path, "task.eval_path": path}
            run = run_arm(folder, arm, flags, recipe, args.epochs * num_problems)
            results[arm] = by_epoch(run, args.epochs)
            samples[arm] = (run / "samples.jsonl").read_text()
            print(arm)
            for epoch, row in enumerate(results[arm]):
                line = ", ".join(f"{k} {v:.3f}" for k, v in row.items())
                print(f"  epoch {epoch}: {line}", flush=True)
    is_same = len(set(samples.values())) == 1
    write_result(
        RESULTS / ("histospec.json" if is_toy else "histospec_gsm8k.json"),
        machine=describe_machine(pick_device("cpu" if is_toy else "auto")),
        settings={k: str(v) for k, v in (SHARED if is_toy else GSM8K_SHARED).items()},
        flags={arm: {k: str(v) for k, v in arms[arm].items()} for arm in names},
        same_samples=is_same,
        epochs=results,
    )
    print(f"all arms sampled the same: {is_same}")


if __name__ == "__main__":
    main()
