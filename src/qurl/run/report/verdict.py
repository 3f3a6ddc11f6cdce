"""Is the run healthy? A few questions, each with an answer in words."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from qurl.run.intervals import paired_difference
from qurl.run.report.charts import PARTS

Level = Literal["good", "info", "watch", "bad"]
ORDER: Sequence[Level] = ("bad", "watch", "good", "info")
TITLES: Mapping[Level, str] = {
    "good": "Healthy",
    "info": "Nothing to judge yet",
    "watch": "Look closer",
    "bad": "Needs attention",
}
LEVELS: Mapping[str, Level] = {"alarm": "bad", "warning": "watch", "fallback": "watch"}
"""Severity of an event by its kind; all others inform."""
PLURALS = {"rollout": "rollouts", "update": "updates", "eval": "evaluations"}


class Check(NamedTuple):
    level: Level
    question: str
    answer: str


@dataclass
class Facts:
    """What the checks read, gathered row by row."""

    config: Mapping[str, Any]
    series: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Finite values of each metric, of training steps only."""
    last_step: int = -1
    broken: Counter[str] = field(default_factory=Counter)
    """Metrics that were not finite, and how often."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    alarms: dict[str, None] = field(default_factory=dict)
    """Names of the alarms that went off, in their order."""
    evals: dict[str, list[tuple[int, list[bool]]]] = field(default_factory=dict)
    """(updates, outcomes) of each evaluation, by precision."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each part, over all steps."""
    machines: list[Mapping[str, Any]] = field(default_factory=list)

    def add(
        self,
        rows: Sequence[Mapping[str, Any]],
        events: Sequence[dict[str, Any]],
        evals: Sequence[Mapping[str, Any]],
    ) -> None:
        for row in rows:
            self._add_row(row)
        for event in events:
            self.kinds[str(event.get("kind"))] += 1
            if event.get("kind") == "alarm" and "name" in event:
                self.alarms[str(event["name"])] = None
            if machine := event.pop("machine", None):
                self.machines.append(machine)
        for record in evals:
            outcomes = [digit == "1" for digit in record["outcomes"]]
            self.evals.setdefault(record["precision"], []).append((record["step"], outcomes))

    def _add_row(self, row: Mapping[str, Any]) -> None:
        values = {name: float(x) for name, x in row.items() if name != "step"}
        self.broken.update(name for name, x in values.items() if not math.isfinite(x))
        parts = {n: x for n, x in values.items() if n.startswith("timing_s/") and math.isfinite(x)}
        whole = parts.pop("timing_s/step", sum(parts.values()))
        parts["timing_s/other"] = max(whole - sum(parts.values()), 0.0)
        for name, x in parts.items():
            part = name.removeprefix("timing_s/")
            self.seconds[part] = self.seconds.get(part, 0.0) + x
        if row["step"] >= 0:
            self.last_step = max(self.last_step, row["step"])
            for name, x in values.items():
                if math.isfinite(x):
                    self.series[name].append(x)

    def ends(self, name: str) -> tuple[float, float] | None:
        """Means over the first and over the last steps of a metric."""
        if not (values := self.series.get(name)):
            return None
        width = _width(values)
        return statistics.fmean(values[:width]), statistics.fmean(values[-width:])


def _width(values: Sequence[float]) -> int:
    """How many values are the first, and the last."""
    return max(1, min(10, len(values) // 5))


def judge(facts: Facts) -> dict[str, Any]:
    """The verdict of all checks: as bad as the worst of them."""
    checks = [check for find in CHECKS for check in find(facts)]
    levels: list[Level] = [check.level for check in checks] or ["info"]
    level = min(levels, key=ORDER.index)
    return {
        "level": level,
        "title": TITLES[level],
        "done": facts.last_step + 1,
        "steps": facts.config.get("steps", 0),
        "checks": [check._asdict() for check in checks],
    }


def _events(facts: Facts) -> Iterator[Check]:
    counts = {kind: facts.kinds[kind] for kind in LEVELS if facts.kinds[kind]}
    if counts:
        level: Level = "bad" if any(LEVELS[kind] == "bad" for kind in counts) else "watch"
        listed = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items())
        named = f": {', '.join(facts.alarms)}" if facts.alarms else ""
        yield Check(level, "Did anything go wrong?", f"{listed}. See the events below{named}.")
    elif facts.last_step >= 0:
        yield Check("good", "Did anything go wrong?", "No alarms, no warnings.")
    if facts.broken:
        named = ", ".join(name for name, _ in facts.broken.most_common(3))
        answer = f"{facts.broken.total()} logged values are not finite: {named}."
        yield Check("bad", "Are all numbers finite?", answer)


def _reward(facts: Facts) -> Iterator[Check]:
    question = "Does the reward rise?"
    if not (ends := facts.ends("reward/mean")):
        return
    first, last = ends
    values = facts.series["reward/mean"]
    if len(values) >= 3 and max(values) == min(values):
        answer = f"All {len(values)} steps have a mean reward of {last:g}: there is nothing to "
        yield Check("bad", question, answer + "learn from. Check the task's answers and reward.")
        return
    if len(values) < 5:
        yield Check("info", question, f"It is {last:.3f}; {len(values)} steps say little.")
        return
    jumps = [b - a for a, b in pairwise(values)]
    width = _width(values)
    noise = 2 * statistics.pstdev(jumps) / math.sqrt(width)  # of a difference of two means
    level, moved = "info", "No clear change"
    if abs(last - first) > noise:
        level, moved = ("good", "It rose") if last > first else ("watch", "It fell")
    yield Check(level, question, f"{moved}: {first:.3f} → {last:.3f} (means of {width} steps).")


def _accuracy(facts: Facts) -> Iterator[Check]:
    question = "Does it answer new problems better?"
    for precision, found in facts.evals.items():
        if precision != "full" and "full" in facts.evals:
            continue
        (_, first), (last_step, last) = found[0], found[-1]
        at = f"{_percent(last)} after {last_step} steps"
        if len(found) < 2 or len(first) != len(last):
            reason = "one evaluation has nothing to compare with"
            if len(found) > 1:
                reason = f"the first evaluation had {len(first)} problems, this one {len(last)}"
            yield Check("info", question, f"{at}; {reason}.")
            continue
        change = paired_difference(first, last)
        level: Level = "info"
        if change.is_clear:
            level = "good" if change.value > 0 else "bad"
        elif statistics.fmean(last) == 1:
            level = "good"
        unclear = "" if change.is_clear else f" {len(last)} problems are too few to tell."
        answer = f"Held-out accuracy {_percent(first)} → {at}: {_points(change)}.{unclear}"
        yield Check(level, question, answer)


def _quantized(facts: Facts) -> Iterator[Check]:
    full = dict(facts.evals.get("full", ()))
    for precision, found in facts.evals.items():
        step, outcomes = found[-1]
        if precision == "full" or len(full.get(step, ())) != len(outcomes):
            continue
        change = paired_difference(full[step], outcomes)
        level: Level = "watch" if change.is_clear and change.value < 0 else "good"
        answer = f"{precision} answers {_percent(outcomes)}, full precision {_percent(full[step])}"
        question = "Does quantization cost accuracy?"
        yield Check(level, question, f"{answer}: {_points(change)}.")


def _mismatch(facts: Facts) -> Iterator[Check]:
    question = "Is the sampler still the policy?"
    size = facts.ends("rollout_corr/rollout_is_eff_sample_size")
    kl = facts.ends("rollout_corr/k3_kl")
    if not size or not kl:
        if facts.config.get("correction.mode") == "bypass":
            yield Check("info", question, "Not measured: correction.mode = bypass.")
        return
    level: Level = "good" if size[1] >= 0.9 else "watch" if size[1] >= 0.5 else "bad"
    answer = f"{size[1]:.1%} of the batch counts after importance weighting (effective sample size)"
    yield Check(level, question, f"{answer}. Mismatch KL {kl[0]:.2g} → {kl[1]:.2g}.")


def _completions(facts: Facts) -> Iterator[Check]:
    if not (ends := facts.ends("response_length/clip_ratio")):
        return
    level: Level = "good" if ends[1] < 0.2 else "watch" if ends[1] < 0.9 else "bad"
    limit = facts.config.get("sampling.max_tokens")
    answer = f"{ends[1]:.1%} are cut at sampling.max_tokens = {limit}."
    yield Check(level, "Do completions end by themselves?", answer)


def _time(facts: Facts) -> Iterator[Check]:
    total = sum(facts.seconds.values())
    if not total or not facts.series.get("reward/mean"):
        return
    parts = sorted(facts.seconds.items(), key=lambda part: -part[1])[:3]
    names = {name: PLURALS.get(name, PARTS.get(name, (name,))[0]) for name, _ in parts}
    listed = ", ".join(f"{names[name]} {x / total:.0%}" for name, x in parts)
    share = facts.seconds.get("rollout", 0.0) / total
    gain = f" If rollouts took no time, the run would be {1 / (1 - share):.2f}x as fast."
    answer = f"{listed[:1].upper()}{listed[1:]}.{gain if share < 1 else ''}"
    yield Check("info", "Where does the time go?", answer)


CHECKS: Sequence[Callable[[Facts], Iterator[Check]]] = (
    _events,
    _reward,
    _accuracy,
    _quantized,
    _mismatch,
    _completions,
    _time,
)


def _percent(outcomes: Sequence[bool]) -> str:
    return f"{statistics.fmean(outcomes):.1%}"


def _points(change: Any) -> str:
    value, low, high = (100 * x for x in change)
    return f"{value:+.1f} points (95%: {low:+.1f} to {high:+.1f})"
