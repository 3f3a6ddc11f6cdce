"""Naive and corrected objectives side by side on the toy task, at INT8 and at a coarse format.

    python -m benchmarks.toy_objectives                    # all arms, three seeds
    python -m benchmarks.toy_objectives --steps 50 --seeds 1 --jobs 2
    python -m benchmarks.toy_objectives --draw-only        # table and plot from the saved JSON

Every arm is the demo recipe plus a few flags, run in its own process on one thread; all 33 take a
few core-hours. Runs resume, so that a benchmark that was stopped goes on where it was. Writes
toy_objectives.{json,md,svg} into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import platform
import statistics
from pathlib import Path

import torch

from benchmarks.measured import evals_by_updates, student_interval
from benchmarks.paper.plots import Line, Panel, Plot, draw, thin
from benchmarks.scripts import DEMO, RESULTS, ROOT, train_demo, write_result
from qurl.bench.record import describe_machine
from qurl.run.directory import read_jsonl

FORMATS = ("int8", "int4")
OBJECTIVES = ("ppo_prox", "ppo_behav", "decoupled", "tis", "acr")
ARMS = {
    "full precision": ("none", "ppo_prox"),
    **{f"{f} {objective}": (f, objective) for f in FORMATS for objective in OBJECTIVES},
}
KEPT = (
    "reward/mean",
    "eval/full/accuracy",
    "eval/quantized/accuracy",
    "rollout_corr/kl",
    "rollout_corr/rollout_is_max",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/truncated_frac",
    "actor/pg_clipfrac",
    "acr/rescued_frac",
    "actor/grad_norm",
)
PANELS = {
    "eval/full/accuracy": "held-out accuracy, full precision",
    "rollout_corr/kl": "KL(behav, prox)",
    "rollout_corr/rollout_is_max": "largest pi_prox / pi_behav",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--epochs", type=int, default=2, help="passes over each rollout batch")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "toy_objectives")
    parser.add_argument("--name", default="toy_objectives", help="of the files in results/")
    parser.add_argument("--draw-only", action="store_true")
    args = parser.parse_args()
    path = RESULTS / f"{args.name}.json"
    if not args.draw_only:
        write_result(path, **run_all(args))
    result = json.loads(path.read_text())
    table = make_table(result)
    path.with_suffix(".md").write_text(table)
    draw(plot(args.name, result), RESULTS)
    print(table)


def run_all(args: argparse.Namespace) -> dict:
    jobs = [(arm, seed) for seed in range(args.seeds) for arm in ARMS]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        curves = list(pool.map(lambda job: run_arm(args, *job), jobs))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per run",
        "versions": describe_machine(torch.device("cpu"))["versions"],
        "recipe": DEMO.name,
        "steps": args.steps,
        "lr": args.lr,
        "epochs": args.epochs,
        "runs": [
            {"arm": arm, "seed": seed, **curve}
            for (arm, seed), curve in zip(jobs, curves, strict=True)
        ],
    }


def run_arm(args: argparse.Namespace, arm: str, seed: int) -> dict:
    """Train one arm in a process of its own and keep its curves."""
    format, objective = ARMS[arm]
    run = args.runs / f"{arm.replace(' ', '-')}-{seed}-{args.steps}-{args.lr:g}-{args.epochs}"
    flags = {
        "seed": seed,
        "steps": args.steps,
        "quant.format": format,
        "algo.objective": objective,
        "optim.lr": args.lr,
        "batch.epochs": args.epochs,
    }
    failure = train_arm(run, flags)
    rows = read_rows(run / "metrics.jsonl", format)
    return {"failure": failure, "curves": {name: pick(rows, name) for name in KEPT}}


def train_arm(run: Path, flags: dict) -> str:
    """Train with these flags, and evaluations; returns why it failed, or ""."""
    return train_demo(run, {"eval.every": 10, "eval.problems": 400, "save.every": 50, **flags})


def read_rows(path: Path, format: str) -> list[dict]:
    rows = evals_by_updates(read_jsonl(path)) if path.exists() else []
    for row in rows:
        actor = row.get(f"eval/{format}/accuracy", row.get("eval/full/accuracy"))
        if actor is not None:
            row["eval/quantized/accuracy"] = actor
    return rows


def pick(rows: list[dict], name: str) -> list[list[float]]:
    """[[step, value], ...] of one metric."""
    return [[row["step"], round(float(row[name]), 6)] for row in rows if name in row]


def make_table(result: dict) -> str:
    """Mean over seeds and, in brackets, the lowest and the highest."""
    lines = [
        f"Toy objectives, {result['date']}: {result['recipe']}, {result['steps']} steps, lr "
        f"{result['lr']:g}, {result['epochs']} epoch(s), torch {result['versions']['torch']}, "
        f"{result['machine']}.",
        "Accuracy: mean of the last three evaluations (400 held-out problems each), over seeds "
        "[lowest, highest]. Mismatch: means over the last fifth of the steps.",
        "",
        "| arm | accuracy, full precision | accuracy, actor's format | KL(behav, prox) "
        "| largest rho | truncated | clipped | rescued | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        runs = [run for run in result["runs"] if run["arm"] == arm]
        if not runs:
            continue
        cells = [
            spread(runs, "eval/full/accuracy", last=3),
            spread(runs, "eval/quantized/accuracy", last=3),
            f"{late_mean(runs, 'rollout_corr/kl', result):.1e}",
            f"{max(values(runs, 'rollout_corr/rollout_is_max'), default=math.nan):.3g}",
            f"{late_mean(runs, 'rollout_corr/truncated_frac', result):.2%}",
            f"{late_mean(runs, 'actor/pg_clipfrac', result):.2%}",
            f"{late_mean(runs, 'acr/rescued_frac', result):.3%}",
            str(sum(bool(r["failure"]) for r in runs)),
        ]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    found = [text for format in FORMATS if (text := compare_acr(result, format))]
    return "\n".join([*lines, "", *found] if found else lines) + "\n"


def compare_acr(result: dict, format: str) -> str:
    """ACR less TIS by seed, with Student's 95 % interval of the mean.

    A CPU repeats a run to the bit, so that the two are one until ACR acts for the first time.
    """
    finals = {(r["arm"], r["seed"]): final(r, "eval/full/accuracy", 3) for r in result["runs"]}
    seeds = sorted(seed for arm, seed in finals if arm == f"{format} acr")
    pairs = [(finals[f"{format} acr", s], finals.get((f"{format} tis", s))) for s in seeds]
    differences = [acr - tis for acr, tis in pairs if acr is not None and tis is not None]
    if len(differences) < 3:
        return ""
    mean, (low, high) = statistics.fmean(differences), student_interval(differences)
    listed = ", ".join(f"{100 * d:+.1f}" for d in differences)
    return (
        f"{format}, acr less tis in points, full precision: mean {100 * mean:+.1f} (95 % "
        f"{100 * low:+.1f} to {100 * high:+.1f}), by seed {listed}."
    )


def final(run: dict, name: str, last: int) -> float | None:
    """The mean of the last values; None of a run that failed before it had any."""
    found = [v for _, v in run["curves"][name][-last:]]
    return statistics.fmean(found) if found else None


def spread(runs: list[dict], name: str, last: int) -> str:
    finals = [f for run in runs if (f := final(run, name, last)) is not None]
    if not finals:
        return ""
    return f"{statistics.fmean(finals):.3f} [{min(finals):.3f}, {max(finals):.3f}]"


def values(runs: list[dict], name: str, since: float = 0) -> list[float]:
    return [v for run in runs for step, v in run["curves"][name] if step >= since]


def late_mean(runs: list[dict], name: str, result: dict) -> float:
    late = values(runs, name, since=0.8 * result["steps"])
    return statistics.fmean(late) if late else math.nan


def plot(name: str, result: dict) -> Plot:
    """A row of panels for each format; lines are means over seeds."""
    panels = []
    for format in FORMATS:
        arms = {"full precision": "full precision", **{o: f"{format} {o}" for o in OBJECTIVES}}
        for metric, title in PANELS.items():
            lines = [
                Line(label, thin(mean_curve(result["runs"], arm, metric)))
                for label, arm in arms.items()
            ]
            is_log = metric == "rollout_corr/rollout_is_max"
            panels.append(Panel(f"{format}: {title}", lines, is_log))
    return Plot(name, panels, columns=len(PANELS))


def mean_curve(runs: list[dict], arm: str, name: str) -> list[tuple[float, float]]:
    """The mean over the seeds that reached each step."""
    by_step: dict[float, list[float]] = {}
    for run in (run for run in runs if run["arm"] == arm):
        for step, value in run["curves"][name]:
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(by_step[step])) for step in sorted(by_step)]


if __name__ == "__main__":
    main()
