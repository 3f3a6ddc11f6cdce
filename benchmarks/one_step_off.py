"""Does sampling one step ahead cost accuracy? The toy task with `rollout.ahead` 0 and 1.

    python -m benchmarks.one_step_off --seeds 3            # resumes: finished runs are skipped
    python -m benchmarks.one_step_off --table              # print the table of the saved runs

Each run is the demo recipe with other flags, takes one thread and a minute or two. It says nothing
about time: the engine is in the trainer's process. Writes benchmarks/results/one_step_off.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks import toy_objectives as toy
from benchmarks.scripts import DEMO, RESULTS, ROOT, write_result
from qurl.bench.record import describe_machine

RESULT = RESULTS / "one_step_off.json"
STEPS = 60
ARMS = {
    "ahead 0, acr": {"rollout.ahead": 0},
    "ahead 1, acr": {"rollout.ahead": 1},
    "ahead 1, uncorrected": {"rollout.ahead": 1, "algo.objective": "ppo_prox"},
}
COLUMNS = {
    "eval/full/accuracy": "accuracy after the last step",
    "reward/accuracy": "accuracy of rollouts",
    "rollout_corr/k3_kl": "KL(behav, prox)",
    "rollout_corr/k3_kl_age": "of age",
    "rollout_corr/k3_kl_quant": "of quantization",
    "rollout_corr/truncated_frac": "truncated",
    "actor/pg_clipfrac": "clipped",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "one_step_off")
    parser.add_argument("--table", action="store_true", help="print what was measured, run nothing")
    args = parser.parse_args()
    runs = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    done = {(run["arm"], run["seed"]) for run in runs}
    jobs = [(arm, seed) for seed in range(args.seeds) for arm in ARMS if (arm, seed) not in done]
    for arm, seed in () if args.table else jobs:
        runs.append(run_one(args.runs, arm, seed))
        save(runs)
    print(make_table(runs))


def run_one(folder: Path, arm: str, seed: int) -> dict:
    """Train one arm: its last evaluation, and means over the last fifth of the steps."""
    run = folder / f"{arm}-{seed}".replace(",", "").replace(" ", "-")
    flags = {"seed": seed, "steps": STEPS, "eval.every": 20, **ARMS[arm]}
    failure = toy.train_arm(run, flags)
    rows = toy.read_rows(run / "metrics.jsonl", "int8")
    found = {"arm": arm, "seed": seed, "failure": failure}
    for name in COLUMNS:
        values = [row[name] for row in rows if name in row and row["step"] >= 0.8 * STEPS]
        values = values[-1:] if name.startswith("eval/") else values
        found[name] = round(statistics.fmean(values), 8) if values else None
    return found


def save(runs: list[dict]) -> None:
    versions = describe_machine(torch.device("cpu"))["versions"]
    write_result(RESULT, versions=versions, recipe=DEMO.name, steps=STEPS, arms=ARMS, runs=runs)


def make_table(runs: list[dict]) -> str:
    """Mean over seeds and, in brackets, the lowest and the highest."""
    lines = [f"| arm | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for arm in ARMS:
        cells = [show([run[name] for run in runs if run["arm"] == arm]) for name in COLUMNS]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def show(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.3g} [{min(known):.3g}, {max(known):.3g}]"


if __name__ == "__main__":
    main()
