"""Who works when: trainers and engines together, apart, and one step ahead, from a trace.

    python benchmarks/placement.py --json benchmarks/results/placement.json

Every 50 ms the CPU time of each trainer and engine is read. A process that used more than a tenth
of the time since then was at work. A CPU with few cores is not a cluster: shares show who waits
for whom, not what a GPU would do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import kills
import torch

from qurl.run.directory import read_jsonl
from qurl.run.machine import describe_machine

PERIOD = 0.05
ARMS = {
    "together": {"parallel.trainers": 2, "parallel.engines": 0},
    "apart": {"parallel.trainers": 1, "parallel.engines": 1},
    "apart, one step ahead": {"parallel.trainers": 1, "parallel.engines": 1, "rollout.ahead": 1},
}
TICKS = 100
"""Of the kernel's clock, per second."""


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def trace(folder: Path, settings: dict) -> dict[str, float]:
    """Shares of the time from the first step to the last."""
    plain = {"steps": 40, "eval.every": 0, "save.every": 0, "threads": 1}
    process, counts, before = kills.start(folder, **plain | settings), Counter(), {}
    while process.poll() is None:
        time.sleep(PERIOD)
        if not (folder / "metrics.jsonl").exists():
            continue
        victims, busy = kills.find_victims(process.pid, folder), set()
        for kind, pids in victims.items():
            for pid in pids:
                try:
                    ticks = cpu_ticks(pid)
                except OSError:
                    continue
                if ticks - before.get(pid, ticks) > PERIOD * TICKS / 10:
                    busy.add("engine" if kind == "engine" else "trainer")
                before[pid] = ticks
        counts["moments"] += 1
        counts.update(busy or {"nobody"})
        counts["both"] += len(busy) == 2
    if process.returncode:
        raise SystemExit(f"{folder} failed; see {folder}.log")
    rows = read_jsonl(folder / "metrics.jsonl")[5:]
    shares = {name: counts[name] / counts["moments"] for name in ("trainer", "engine", "both")}
    step = statistics.median(row["timing_s/step"] for row in rows)
    return {"step_s": step, "nobody": counts["nobody"] / counts["moments"], **shares}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/placement"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(torch.device("cpu")),
        "arms": {
            name: trace(options.folder / name.split(",")[-1].strip().replace(" ", "-"), x)
            for name, x in ARMS.items()
        },
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
