"""How long engines wait for each other: HistoPipe against first come and longest first, simulated.

    python -m benchmarks.histopipe

A pool of problems is asked again and again, several completions of each. Lengths are log-normal
over problems, and again around each problem's own, so that ranks are nearly the same in each epoch.
An engine decodes all of its sequences together. A decode step takes

    t(b) = BASE_MS + EACH_MS b   for b unfinished sequences

which is what we measured for a 7B model in INT8 on an H200 (docs/engine.md). Training has GPUs of
its own. Policies:

    fifo            problems in the order in which they come, as many for each engine
    longest         the longest expected one to the engine with the least to do (LPT)
    histopipe       groups by expected length, in turns (`qurl.sampling.histopipe`)
    without turns   the same, but an engine always gets the same group

When a step begins:

    stale 0   when the one before it has been trained on
    ahead     when the one before it is sampled, and the one before that trained on: what QuRL does
              with `rollout.ahead = 1`
    stale 1   as ahead, but an engine goes on as soon as it is done itself

The bubble ratio is 1 - busy / (engines x makespan). Writes benchmarks/results/histopipe.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random

import torch

from benchmarks.scripts import RESULTS, write_result
from qurl.run.machine import describe_machine
from qurl.sampling.histopipe import assign, rank_correlation

BASE_MS, EACH_MS = 2.06, 0.0173
"""Of a decode step: 3.17 ms with 64 sequences and 6.50 ms with 256."""

Policy = Callable[[Sequence[float], int, int], Sequence[int]]
"""`policy(expected lengths, num_engines, step)`: the engine of each problem."""


@dataclass(frozen=True)
class Setting:
    """What is simulated."""

    engines: int = 8
    problems: int = 256
    """Per step."""
    group_size: int = 8
    steps_per_epoch: int = 16
    epochs: int = 3
    """The first one is not counted: nothing is known in it."""
    median: float = 800.0
    """Tokens."""
    spread: float = 0.8
    """Standard deviation of the problems' log lengths."""
    noise: float = 0.3
    """And of the completions of one problem."""
    max_tokens: int = 8192
    train_share: float = 0.3
    """Seconds of training per step, relative to the mean rollout of fifo."""


def fifo(expected: Sequence[float], num_engines: int, step: int) -> list[int]:
    return [i * num_engines // len(expected) for i in range(len(expected))]


def longest_first(expected: Sequence[float], num_engines: int, step: int) -> list[int]:
    loads, engines = [0.0] * num_engines, [0] * len(expected)
    for index in sorted(range(len(expected)), key=lambda i: -expected[i]):
        engines[index] = loads.index(min(loads))
        loads[engines[index]] += expected[index]
    return engines


def without_turns(expected: Sequence[float], num_engines: int, step: int) -> list[int]:
    return assign(expected, num_engines, 1)


POLICIES: dict[str, Policy] = {
    "fifo": fifo,
    "longest": longest_first,
    "without turns": without_turns,
    "histopipe": assign,
}

MODES: dict[str, dict[str, int]] = {
    "stale 0": {"stale": 0},
    "ahead": {"stale": 1, "waits": True},
    "stale 1": {"stale": 1},
}


def decode_seconds(lengths: Sequence[float]) -> float:
    """Seconds until an engine has decoded sequences of these lengths, all at once."""
    total, before, ordered = 0.0, 0.0, sorted(lengths)
    for done, length in enumerate(ordered):
        running = len(ordered) - done
        total += (length - before) * (BASE_MS + EACH_MS * running)
        before = length
    return total / 1000


def draw_steps(setting: Setting, seed: int) -> list[list[tuple[int, list[float]]]]:
    """For each step of all epochs, (problem, lengths of its completions) in a random order."""
    rng = Random(seed)
    count = setting.problems * setting.steps_per_epoch
    centers = [rng.lognormvariate(math.log(setting.median), setting.spread) for _ in range(count)]
    steps = []
    for _ in range(setting.epochs):
        order = rng.sample(range(count), count)
        asked = [
            (
                i,
                [
                    min(centers[i] * rng.lognormvariate(0, setting.noise), setting.max_tokens)
                    for _ in range(setting.group_size)
                ],
            )
            for i in order
        ]
        size = setting.problems
        steps += [asked[first : first + size] for first in range(0, count, size)]
    return steps


def work(setting: Setting, policy: Policy, steps: Sequence) -> list[list[float]]:
    """Seconds [step][engine] that each engine decodes, from the second epoch on."""
    known: dict[int, float] = {}
    seconds = []
    for step, asked in enumerate(steps):
        if step >= setting.steps_per_epoch:
            engines = policy([known[i] for i, _ in asked], setting.engines, step)
            shares: list[list[float]] = [[] for _ in range(setting.engines)]
            for engine, (_, lengths) in zip(engines, asked, strict=True):
                shares[engine] += lengths
            seconds.append([decode_seconds(share) for share in shares])
        known |= {i: statistics.fmean(lengths) for i, lengths in asked}
    return seconds


def makespan(
    seconds: Sequence[Sequence[float]], train: float, stale: int, waits: bool = False
) -> float:
    """Until all steps are decoded and trained on. `waits`: engines begin a step together."""
    free = [0.0] * len(seconds[0])
    trained = [0.0] * (stale + 1)
    """Ends of the updates before the next steps, the newest last."""
    for engines in seconds:
        begin = max(trained[-1 - stale], max(free) if waits else 0.0)
        free = [max(end, begin) + busy for end, busy in zip(free, engines, strict=True)]
        trained = [*trained[1:], max(*free, trained[-1]) + train]
    return trained[-1]


def simulate(setting: Setting, seed: int) -> dict[str, dict[str, float]]:
    """Makespan and bubble ratio of each policy in each mode."""
    steps = draw_steps(setting, seed)
    seconds = {name: work(setting, policy, steps) for name, policy in POLICIES.items()}
    train = setting.train_share * statistics.fmean(max(step) for step in seconds["fifo"])
    results = {}
    for name, engines in seconds.items():
        busy = sum(map(sum, engines))
        for mode, options in MODES.items():
            total = makespan(engines, train, **options)
            results[f"{name}, {mode}"] = {
                "seconds": total,
                "bubbles": 1 - busy / (setting.engines * total),
                "busy": busy,
            }
    return results


def epoch_correlation(setting: Setting, seed: int) -> float:
    """Rank correlation of the problems' mean lengths in two epochs."""
    steps, size = draw_steps(setting, seed), setting.steps_per_epoch
    first, second = (
        {i: statistics.fmean(lengths) for step in part for i, lengths in step}
        for part in (steps[:size], steps[size : 2 * size])
    )
    return rank_correlation([first[i] for i in first], [second[i] for i in first])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for noise in (0.1, 0.3, 0.6):
        for engines in (2, 4, 8, 16):
            setting = Setting(engines=engines, noise=noise)
            runs = [simulate(setting, seed) for seed in range(args.seeds)]
            correlation = statistics.fmean(
                epoch_correlation(setting, seed) for seed in range(args.seeds)
            )
            means = {
                arm: {key: statistics.fmean(run[arm][key] for run in runs) for key in figures}
                for arm, figures in runs[0].items()
            }
            rows.append({"setting": asdict(setting), "correlation": correlation, "arms": means})
            base = means["fifo, stale 0"]["seconds"]
            print(f"{engines} engines, noise {noise}, rank correlation {correlation:.3f}")
            for arm, figures in means.items():
                speed, bubbles = base / figures["seconds"], figures["bubbles"]
                print(f"  {arm:24} {speed:.2f}x, bubbles {bubbles:.0%}")
    machine = describe_machine(torch.device("cpu"))
    write_result(RESULTS / "histopipe.json", machine=machine, seeds=args.seeds, results=rows)


if __name__ == "__main__":
    main()
