"""Which correction is best where truncation bites: the toy task at coarse formats, many seeds.

    python -m benchmarks.toy_seeds --seeds 20 --jobs 2     # resumes: finished runs are skipped
    python -m benchmarks.toy_seeds --table                 # print the table of the saved runs

Coarse rollouts and four passes over each batch, so that weights are truncated and ratios move. Each
run takes one thread and a few minutes. All arms of a seed run before the next seed starts, so that
a benchmark that is stopped can compare what it has. Writes benchmarks/results/toy_seeds.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks import toy_objectives as toy
from benchmarks.measured import student_interval
from benchmarks.scripts import DEMO, RESULTS, ROOT, write_result
from qurl.bench.record import describe_machine

RESULT = RESULTS / "toy_seeds.json"
FORMATS = ("int4", "int6", "none")
STEPS, LEARNING_RATE, SLOW_RATE, EPOCHS = 80, 5e-4, 1e-4, 4
BASELINE = "tis C=2"
FAMILIES = {
    "ppo, ": {
        "algo.name": "ppo",
        "algo.advantage": "gae",
        "batch.problems": 1024,
        "sampling.group-size": 1,
    },
    "dapo, ": {
        "algo.name": "dapo",
        "algo.max-gen-rounds": 40,
        "task.reward": "benchmarks.rewards:signed_exact",
    },
    "slow, ": {"optim.lr": SLOW_RATE},
}
"""What methods share whose names begin so: a critic instead of groups, with as many completions;
DAPO's preset with its rewards of -1 and +1; updates that are small beside a step of the format."""
POOLED = (
    ("uncorrected", BASELINE),
    ("uncorrected, dual clip 3", BASELINE),
    ("acr C=2", BASELINE),
    ("acr C=5", "tis C=5"),
    ("ppo, uncorrected", "ppo, tis C=2"),
    ("ppo, acr C=2", "ppo, tis C=2"),
    ("dapo, uncorrected", "dapo, tis C=2"),
    ("slow, uncorrected", "slow, tis C=2"),
    ("slow, decoupled", "slow, tis C=2"),
    ("slow, acr C=2", "slow, tis C=2"),
    ("slow, tis C=2, UAQ 1.5", "slow, tis C=2"),
    ("slow, tis C=2, UAQ 1.5", "slow, tis C=2, lr x 1.5 on UAQ's layers"),
)
TIS = {"algo.objective": "tis", "algo.cap": 2.0}
ACR = {"algo.objective": "acr", "algo.cap": 2.0}
METHODS = {
    "uncorrected": {"algo.objective": "ppo_prox"},
    "uncorrected, dual clip 3": {"algo.objective": "ppo_prox", "algo.dual-clip": 3.0},
    "decoupled": {"algo.objective": "decoupled"},
    "tis C=2": TIS,
    "acr C=2": ACR,
    "acr C=2, bound 2": {**ACR, "experimental.acr-max-bound": 2.0},
    "tis C=5": {**TIS, "algo.cap": 5.0},
    "acr C=5": {**ACR, "algo.cap": 5.0},
    "ppo, uncorrected": {"algo.objective": "ppo_prox"},
    "ppo, tis C=2": TIS,
    "ppo, acr C=2": ACR,
    "dapo, uncorrected": {"algo.objective": "ppo_prox"},
    "dapo, tis C=2": TIS,
    "slow, uncorrected": {"algo.objective": "ppo_prox"},
    "slow, decoupled": {"algo.objective": "decoupled"},
    "slow, tis C=2": TIS,
    "slow, acr C=2": ACR,
    "slow, tis C=2, UAQ 1.5": {**TIS, "quant.update-scale": 1.5},
    "slow, tis C=2, lr x 1.5 on UAQ's layers": {**TIS, "experimental.norm-fed-lr-scale": 1.5},
}
COLUMNS = {
    "eval/full/accuracy": "accuracy, full precision",
    "eval/quantized/accuracy": "accuracy, actor's format",
    "rollout_corr/kl": "KL(behav, prox)",
    "rollout_corr/truncated_frac": "truncated",
    "actor/pg_clipfrac": "clipped",
    "acr/rescued_frac": "rescued",
    "uaq/update_norm": "update, Eq. (13)",
    "uaq/quant_error": "rounding, Eq. (14)",
    "uaq/update_proj": "projection",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "toy_seeds")
    parser.add_argument("--table", action="store_true", help="print what was measured, run nothing")
    args = parser.parse_args()
    if not args.table:
        run_all(args)
    print(make_table(json.loads(RESULT.read_text())["runs"]))


def run_all(args: argparse.Namespace) -> None:
    runs = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    done = {(run["format"], run["method"], run["seed"]) for run in runs}
    jobs = [(f, m, s) for s in range(args.seeds) for f in args.formats for m in args.methods]
    lock = threading.Lock()

    def work(job: tuple[str, str, int]) -> None:
        found = run_one(args.runs, *job)
        with lock:
            runs.append(found)
            save(runs)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(work, [job for job in jobs if job not in done]))


def run_one(folder: Path, format: str, method: str, seed: int) -> dict:
    """Train one arm; what is kept of a metric is its mean over the last evaluations or steps."""
    name = f"{format}-{method}-{seed}".translate(str.maketrans(" =,'", "----"))
    flags = {
        "seed": seed,
        "steps": STEPS,
        "quant.format": format,
        "optim.lr": LEARNING_RATE,
        "optim.schedule": "constant",
        "batch.epochs": EPOCHS,
        **FAMILIES.get(family_of(method), {}),
        **METHODS[method],
    }
    failure = toy.train_arm(folder / name, flags)
    rows = toy.read_rows(folder / name / "metrics.jsonl", format)
    found = {"format": format, "method": method, "seed": seed, "failure": failure}
    return found | {column: last_mean(rows, column) for column in COLUMNS}


def family_of(method: str) -> str:
    return next(filter(method.startswith, FAMILIES), "")


def last_mean(rows: list[dict], name: str) -> float | None:
    """Over the last three evaluations, or the last fifth of the steps; None without a value."""
    since = 0 if name.startswith("eval/") else 0.8 * STEPS
    values = [row[name] for row in rows if name in row and row["step"] >= since]
    values = values[-3:] if name.startswith("eval/") else values
    return round(statistics.fmean(values), 6) if values else None


def save(runs: list[dict]) -> None:
    write_result(
        RESULT,
        versions=describe_machine(torch.device("cpu"))["versions"],
        recipe=DEMO.name,
        **{"steps": STEPS, "lr": LEARNING_RATE, "schedule": "constant", "epochs": EPOCHS},
        runs=sorted(runs, key=order),
    )


def order(run: dict) -> tuple:
    return run["format"], run["seed"], list(METHODS).index(run["method"])


def make_table(runs: list[dict]) -> str:
    """Means over seeds, and paired differences to TIS with Student's 95 % intervals."""
    lines = []
    for format in dict.fromkeys(run["format"] for run in runs):
        by_method = {m: pick(runs, format, m) for m in METHODS}
        lines += [
            f"{format}, {STEPS} steps, lr {LEARNING_RATE:g} (slow: {SLOW_RATE:g}), {EPOCHS} "
            "epochs. Points; differences to TIS with C = 2 and to rollouts in full precision "
            "(none), of the same family, by seed, with 95 % intervals.",
            "",
            "| method | seeds | full precision | less tis | less none | actor's format | less tis "
            "| KL | truncated | clipped | rescued |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            row(
                m,
                found,
                by_method[family_of(m) + BASELINE],
                pick(runs, "none", family_of(m) + "uncorrected"),
            )
            for m, found in by_method.items()
            if found
        ]
        lines += [""]
    return "\n".join([*lines, *pool_formats(runs)])


def pool_formats(runs: list[dict]) -> list[str]:
    """Differences of pairs of methods, in full precision and in the actor's, over all formats."""
    lines = ["All formats together:"]
    for method, baseline in POOLED:
        found, others = (
            {(f, seed): run for f in FORMATS for seed, run in pick(runs, f, m).items()}
            for m in (method, baseline)
        )
        full, actor = (difference(found, others, name) for name in list(COLUMNS)[:2])
        pairs = len(found.keys() & others.keys())
        lines.append(f"{method} less {baseline}, {pairs} pairs: {full}; actor {actor}")
    return lines


def pick(runs: list[dict], format: str, method: str) -> dict[int, dict]:
    found = (run for run in runs if (run["format"], run["method"]) == (format, method))
    return {run["seed"]: run for run in found if not run["failure"]}


def row(
    method: str, found: dict[int, dict], baseline: dict[int, dict], unquantized: dict[int, dict]
) -> str:
    full, actor = "eval/full/accuracy", "eval/quantized/accuracy"
    cells = [method, str(len(found))]
    cells += [f"{100 * mean(found, full):.1f}", difference(found, baseline, full)]
    cells += [difference(found, unquantized, full)]
    cells += [f"{100 * mean(found, actor):.1f}", difference(found, baseline, actor)]
    cells += [f"{mean(found, 'rollout_corr/kl'):.2f}"]
    shares = ("rollout_corr/truncated_frac", "actor/pg_clipfrac", "acr/rescued_frac")
    return "| " + " | ".join([*cells, *(f"{mean(found, s):.2%}" for s in shares)]) + " |"


def mean(found: dict[int, dict], name: str) -> float:
    values = [run[name] for run in found.values() if run[name] is not None]
    return statistics.fmean(values) if values else math.nan


def difference(found: dict[Any, dict], baseline: dict[Any, dict], name: str) -> str:
    shared = sorted(found.keys() & baseline.keys())
    differences = [100 * (found[s][name] - baseline[s][name]) for s in shared]
    if found == baseline or len(differences) < 3:
        return "-"
    low, high = student_interval(differences)
    return f"{statistics.fmean(differences):+.1f} ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    main()
