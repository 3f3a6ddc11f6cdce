"""How far does the gap of a sound copy jump from sync to sync? What `canary.Yardstick` allows.

    python -m benchmarks.canary_jumps

The demo on a CPU: 13 seeds of six steps in FP8, and one run of 150 steps in INT8. A jump is the gap
of a sync over the largest gap before it. Writes benchmarks/results/canary_jumps.json.
"""

from __future__ import annotations

import argparse
import platform
from itertools import accumulate
from pathlib import Path

import torch

from benchmarks.scripts import RESULTS, ROOT, train_demo, write_result
from qurl.bench.record import describe_machine
from qurl.run.directory import read_jsonl

RESULT = RESULTS / "canary_jumps.json"
RUNS = [("fp8", seed, 6) for seed in range(13)] + [("int8", 0, 150)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "canary_jumps")
    folder = parser.parse_args().runs
    found = [measure(folder / f"{run[0]}-{run[1]}-{run[2]}", *run) for run in RUNS]
    versions = describe_machine(torch.device("cpu"))["versions"]
    write_result(RESULT, machine=platform.machine(), versions=versions, runs=found)
    for run in found:
        print(run["format"], run["seed"], f"largest jump {run['largest_jump']:.2f}")


def measure(run: Path, format: str, seed: int, steps: int) -> dict:
    flags = {"quant.format": format, "seed": seed, "steps": steps}
    if failure := train_demo(run, flags):
        raise SystemExit(f"{run}: {failure}")
    rows = read_jsonl(run / "metrics.jsonl")
    gaps = [row["sync/canary_gap"] for row in rows if "sync/canary_gap" in row]
    before = accumulate(gaps[:-1], max)
    largest_jump = max(gap / largest for gap, largest in zip(gaps[1:], before, strict=True))
    columns = {"format": format, "seed": seed, "steps": steps, "gaps": gaps}
    return columns | {"largest_jump": round(largest_jump, 3)}


if __name__ == "__main__":
    main()
