"""Kill anything of a run with two trainers and two engines, again and again, and see it through.

    python benchmarks/kills.py --kills 50

The driver, the other trainer rank or one of the engines gets signal 9 at a random moment. The run's
own command is given again whenever it ends early, as a scheduler would. In the end the held-out
accuracies are those of a run that nobody disturbed, and the events name every restart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qurl.run.directory import read_jsonl
from qurl.run.machine import describe_machine

RECIPE = "recipes/arithmetic-cpu.toml"
SETTINGS: dict[str, Any] = {
    "steps": 60,
    "batch.problems": 16,
    "batch.minibatches": 2,
    "save.every": 2,
    "eval.every": 20,
    "eval.problems": 100,
    "rollout.deterministic": "true",
    "parallel.trainers": 2,
    "parallel.engines": 2,
    "parallel.timeout": 120,
}


def start(folder: Path, **more: Any) -> subprocess.Popen[bytes]:
    words = [w for k, v in (SETTINGS | more).items() for w in (f"--{k}", str(v))]
    command = [sys.executable, "-m", "qurl", "train", RECIPE, *words, "--run_dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = (folder.parent / f"{folder.name}.log").open("ab")
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, start_new_session=True
    )


def find_victims(driver: int, folder: Path) -> dict[str, list[int]]:
    """Processes of the run in that folder by what they do; engines by the log they write to."""
    logs = str((folder / "workers" / "engine-").absolute())
    found: dict[str, list[int]] = {"driver": [driver], "rank": [], "engine": []}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            title = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            is_rank = parent == driver and b"spawn_main" in title
            if is_rank and "libtorch" in (entry / "maps").read_text():
                found["rank"].append(int(entry.name))
            elif os.readlink(entry / "fd" / "2").startswith(logs):
                found["engine"].append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def disturb(folder: Path, num_kills: int, longest: float, draw: random.Random) -> dict[str, int]:
    """Run to the end; returns how often each kind of process was killed, and the starts."""
    counts = {"driver": 0, "rank": 0, "engine": 0, "starts": 1}
    process, left = start(folder), num_kills
    while True:
        deadline = time.monotonic() + draw.uniform(2.0, longest)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if process.poll() == 0:
            return counts
        if process.poll() is not None:
            process, counts["starts"] = start(folder), counts["starts"] + 1
            continue
        victims = find_victims(process.pid, folder)
        kind = draw.choice([kind for kind, found in victims.items() if found])
        if left and (folder / "metrics.jsonl").exists():
            os.kill(draw.choice(victims[kind]), signal.SIGKILL)
            counts[kind], left = counts[kind] + 1, left - 1
            print(f"killed a {kind}, {left} to go", flush=True)


def accuracies(folder: Path) -> dict[str, float]:
    rows = read_jsonl(folder / "metrics.jsonl")
    return {
        f"{row['step']} {name}": value
        for row in rows
        for name, value in row.items()
        if name.startswith("eval/") and "accuracy" in name
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--longest", type=float, default=25.0, help="seconds between two kills")
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    quiet, disturbed = options.folder / "quiet", options.folder / "disturbed"
    if start(quiet).wait():
        sys.exit(f"the undisturbed run failed; see {quiet}.log")
    began = time.monotonic()
    counts = disturb(disturbed, options.kills, options.longest, random.Random(options.seed))
    events = [event["message"] for event in read_jsonl(disturbed / "events.jsonl")]
    ours, theirs = accuracies(disturbed), accuracies(quiet)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(torch.device("cpu")),
        "killed": counts,
        "minutes": (time.monotonic() - began) / 60,
        "engines replaced": sum("is gone" in message for message in events),
        "ranks restarted": sum("All ranks start again" in message for message in events),
        "largest difference of held-out accuracies": max(
            abs(ours[name] - theirs[name]) for name in theirs
        ),
        "accuracies": {"disturbed": ours, "quiet": theirs},
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
