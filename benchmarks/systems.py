"""The related systems against plain GRPO on the toy task: what does the same accuracy cost?

    python -m benchmarks.systems                          # all arms, three seeds
    python -m benchmarks.systems --seeds 1 --arms grpo dots
    python -m benchmarks.systems --table                  # the table of the saved JSON

Sums of two to five digits, a pool of 640 problems that is asked again and again, a tiny model in
INT8, one thread per run. Every arm starts from the same warm-started model of its seed and differs
from `grpo` by the flags below. Runs resume, and each finished one is written at once, so that a
benchmark that was stopped goes on where it was. Writes benchmarks/results/systems.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import statistics
from pathlib import Path
from random import Random

import torch

from benchmarks.measured import evals_by_updates, student_interval
from benchmarks.scripts import DEMO, RESULTS, ROOT, train_demo, write_problems, write_result
from qurl.bench.record import describe_machine
from qurl.config import load_config
from qurl.run.assembly import initial_model, load_split
from qurl.run.directory import read_jsonl
from qurl.tasks.generated import Draft
from qurl.tasks.puzzles import draw_sum

RESULT = RESULTS / "systems.json"
NUM_PROBLEMS = {"train": 640, "eval": 300}
TARGETS = (0.5, 0.6)
METRIC = "eval/full/accuracy"

SHARED = {
    "batch.problems": 32,
    "sampling.group_size": 8,
    "batch.epochs": 1,
    "optim.lr": 2e-4,
    "optim.schedule": "constant",
    "quant.track_rows": 0,
    "eval.precision": "full",
    "eval.problems": NUM_PROBLEMS["eval"],
    "save.every": 20,
    "track.samples": 0,
}
DYNAMIC = {"algo.dynamic_sampling": True, "algo.max_gen_rounds": 30}
DOTS = {"sampling.select": "dots", "systems.dots.references": 16}
OWN_ANSWERS = {"systems.dots.recent_epochs": 1}
ARMS: dict[str, dict[str, object]] = {
    "grpo": {},
    "dynamic sampling": DYNAMIC,
    "greso": {"sampling.select": "greso"},
    "greso + dynamic sampling": {"sampling.select": "greso", **DYNAMIC},
    "dots": DOTS,
    "dots, own answers": {**DOTS, **OWN_ANSWERS},
    "dots, own answers + replay": {
        **DOTS,
        **OWN_ANSWERS,
        "sampling.replay": "recent",
        "systems.replay.capacity": 64,
    },
    "replay": {"sampling.replay": "recent", "systems.replay.capacity": 64},
    "e3": {"sampling.budget": "e3", "sampling.thermostat": "e3"},
    "e3 budget": {"sampling.budget": "e3"},
    "shuffle-r1": {"batch.subselect": "shuffle-r1"},
    "pods": {"batch.subselect": "pods", "systems.pods.keep": 4},
    # Four times the sequences of a step, a quarter of the steps, twice the learning rate.
    "brorl": {
        "batch.problems": 16,
        "sampling.group_size": 64,
        "sampling.chunk": 32,
        "optim.base_batch": 256,
        "algo.advantage": "reinforce_pp",
    },
    "grpo, 128 problems": {"batch.problems": 128, "optim.base_batch": 256},
}
"""Flags of each arm. The last is what brorl must beat: as many sequences, of more problems."""
LARGE = ("brorl", "grpo, 128 problems")


def mixed_sums(rng: Random, difficulty: int) -> Draft:
    """A sum of two to `difficulty` digits."""
    return draw_sum(rng, rng.randint(2, difficulty))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "systems")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        os.nice(19)
        # One after the other: transformers makes no two models at once in threads.
        shared = [prepare(args.runs / f"seed-{seed}", seed) for seed in range(args.seeds)]
        jobs = [(arm, seed) for seed in range(args.seeds) for arm in args.arms]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for run in pool.map(lambda job: run_arm(args, *job, shared[job[1]]), jobs):
                keep(run)
    print(make_table(json.loads(RESULT.read_text())))


def prepare(folder: Path, seed: int) -> dict[str, str]:
    """The model and the files that all arms of a seed share."""
    words = ["--task.name", "benchmarks.systems:mixed_sums", "--task.difficulty", "5"]
    words += ["--model.scratch.warm_start_steps", "120", "--seed", str(seed)]
    config = load_config(DEMO, words)
    model = initial_model(config, folder, torch.device("cpu"))
    keys = {"train": "task.path", "eval": "task.eval_path"}
    for split, count in NUM_PROBLEMS.items():
        write_problems(folder / f"{split}.jsonl", load_split(config, split), count)
    files = {key: str(folder / f"{split}.jsonl") for split, key in keys.items()}
    return {"model.path": str(model), "task.name": "file", "task.reward": "exact", **files}


def run_arm(args: argparse.Namespace, arm: str, seed: int, shared: dict[str, str]) -> dict:
    """Train one arm in a process of its own and keep what it cost."""
    steps = args.steps // 4 if arm in LARGE else args.steps
    run = args.runs / f"{arm.replace(' ', '-')}-{seed}-{steps}"
    flags = SHARED | shared | ARMS[arm] | {"seed": seed, "steps": steps}
    failure = train_demo(run, flags | {"eval.every": 2 if arm in LARGE else 8})
    return {"arm": arm, "seed": seed, "steps": steps, "failure": failure, "curve": curve(run)}


def curve(run: Path) -> list[dict[str, float]]:
    """Accuracy of each evaluation, and what was spent before it."""
    spent = {"sampled_tokens": 0.0, "trained_tokens": 0.0, "seconds": 0.0}
    points = []
    rows = read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    for row in evals_by_updates(rows):
        if METRIC in row:
            points.append({"step": row["step"], "accuracy": row[METRIC], **spent})
        if "perf/rollout_tokens" in row:
            update = row["timing_s/update"]
            spent["sampled_tokens"] += row["perf/rollout_tokens"]
            spent["trained_tokens"] += row["perf/train_tokens_per_s"] * update
            parts = ("rollout", "grade", "prox", "sync", "track")
            spent["seconds"] += update + sum(row.get(f"timing_s/{part}", 0.0) for part in parts)
    return points


def keep(run: dict) -> None:
    """Write a finished run into the result file, in place of an earlier one."""
    earlier = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    others = [r for r in earlier if (r["arm"], r["seed"]) != (run["arm"], run["seed"])]
    write_result(
        RESULT,
        machine=f"{platform.machine()}, {os.cpu_count()} cores, one thread per run",
        versions=describe_machine(torch.device("cpu"))["versions"],
        flags={arm: {k: str(v) for k, v in flags.items()} for arm, flags in ARMS.items()},
        runs=sorted([*others, run], key=lambda r: (list(ARMS).index(r["arm"]), r["seed"])),
    )


def cost(run: dict, target: float, what: str) -> float | None:
    """What a run had spent when the mean of three evaluations first reached the target.

    None if it never did.
    """
    for first, second, third in zip(run["curve"], run["curve"][1:], run["curve"][2:], strict=False):
        if statistics.fmean(p["accuracy"] for p in (first, second, third)) >= target:
            return third[what]
    return None


def make_table(result: dict) -> str:
    """Final accuracies less those of `grpo` with 95 % intervals over seeds, and costs relative to
    it, mean over seeds [lowest, highest]; both of the same seed."""
    runs = {(run["arm"], run["seed"]): run for run in result["runs"] if run["curve"]}
    heads = [f"{what} to {t:.0%}" for t in TARGETS for what in ("sampled", "trained", "seconds")]
    lines = ["| arm | seeds | final accuracy | less grpo's | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(heads) + 4) + "|")
    for arm in dict.fromkeys(arm for arm, _ in runs):
        seeds = [seed for name, seed in runs if name == arm]
        finals = [final_accuracy(runs[arm, seed]) for seed in seeds]
        cells = [arm, str(len(seeds)), spread(finals), difference(runs, arm, seeds)]
        for target in TARGETS:
            for what in ("sampled_tokens", "trained_tokens", "seconds"):
                cells.append(compare(runs, arm, seeds, target, what))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def final_accuracy(run: dict) -> float:
    """Of the last three evaluations."""
    return statistics.fmean(point["accuracy"] for point in run["curve"][-3:])


def difference(runs: dict, arm: str, seeds: list[int]) -> str:
    found = [
        final_accuracy(runs[arm, seed]) - final_accuracy(runs["grpo", seed])
        for seed in seeds
        if ("grpo", seed) in runs
    ]
    if arm == "grpo" or len(found) < 3:
        return "-"
    low, high = student_interval(found)
    return f"{statistics.fmean(found):+.2f} ({low:+.2f} to {high:+.2f})"


def compare(runs: dict, arm: str, seeds: list[int], target: float, what: str) -> str:
    ratios, num_failed = [], 0
    for seed in seeds:
        if ("grpo", seed) not in runs:
            continue
        ours, plain = (cost(runs[name, seed], target, what) for name in (arm, "grpo"))
        if ours is None:
            num_failed += 1
        elif plain:
            ratios.append(ours / plain)
    reached = f" ({num_failed} never)" if num_failed else ""
    return (spread(ratios) if ratios else "-") + reached


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
