"""Runs a command as if the GPU had less memory, and says how much of it the command took.

    python -m benchmarks.smaller_card 24 qurl bench step --model 1.5B --keys model.lora_rank=32

This process holds all GPU memory except the given GB (10^9 bytes); the command gets the rest. It
reads the free memory every 20 ms, so what the command takes includes its CUDA context, graphs, and
caches that torch does not count. Adds to benchmarks/results/smaller_card.json and exits like the
command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from benchmarks.scripts import RESULTS
from qurl.bench.record import Record
from qurl.ops.device import pick_device

POLL_S = 0.02


def hold_all_but(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory whose absence leaves so many bytes free."""
    free, _ = torch.cuda.mem_get_info(device)
    if free <= num_bytes:
        raise SystemExit(f"the GPU has {free / 1e9:.1f} GB free, no more than was asked for")
    return torch.empty(free - num_bytes, dtype=torch.uint8, device=device)


def peak_while(command: list[str], device: torch.device) -> tuple[int, int]:
    """Most bytes that a command took, and its exit status."""
    before, _ = torch.cuda.mem_get_info(device)
    least = before
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            least = min(least, torch.cuda.mem_get_info(device)[0])
            time.sleep(POLL_S)
    return before - least, process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gb", type=float, help="memory that the command finds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("give a command to run")
    device = pick_device("cuda")
    record = Record("smaller_card", RESULTS / "smaller_card.json", device)
    held = hold_all_but(int(args.gb * 1e9), device)
    peak, status = peak_while(args.command, device)
    del held
    said = {"peak_gb": round(peak / 1e9, 2), "exit_status": status}
    print(f"{args.gb:g} GB free: {said}")
    key = f"{args.gb:g} GB: {' '.join(args.command)}"
    record.add(key, settings={"gb": args.gb, "command": args.command}, figures=said)
    return status


if __name__ == "__main__":
    sys.exit(main())
