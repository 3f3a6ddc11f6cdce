"""Alarms: what each one watches in metrics.jsonl, when it goes off, and what it then does.

An alarm reads the rows so far and nothing else, so a resumed run decides as the original would
have. Its action, and its threshold if it has one, are keys of `[alarms]` (docs/alarms.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Literal, NamedTuple

from qurl.config import Config
from qurl.config.schema import AlarmsConfig
from qurl.errors import TrainingError
from qurl.run.assembly import Parts
from qurl.run.directory import Run
from qurl.run.intervals import Z

Row = Mapping[str, float]
MISMATCH_FLOOR = 1e-3
"""KL per token of a mismatch that is too small to matter, however much it has grown."""
FALLEN_BACK = "rollout/full_precision"
"""1 in steps whose rollouts fell back to full precision; absent otherwise."""


class Cause(NamedTuple):
    """Why an alarm goes off: the number that it compares with its threshold, in words too."""

    value: float
    message: str


Watch = Callable[[Sequence[Row], int, float], Cause | None]
"""`watch(rows, window, threshold)`: whether the alarm is on after the last of these rows."""


@dataclass(frozen=True)
class Alarm:
    """One entry of `ALARMS`. Key `name` of `[alarms]` is its action."""

    name: str
    watches: tuple[str, ...]
    """What the names of the metrics end with; () if it looks at all of a row."""
    watch: Watch
    threshold: str = ""
    """Key of `[alarms]`; empty for an alarm without a threshold."""
    applies: Callable[[Config], bool] = lambda config: True
    """Whether a recipe gives it something to watch."""

    def is_wanted(self, config: Config) -> bool:
        return self.applies(config) and getattr(config.alarms, self.name) != "off"

    def find(self, rows: Sequence[Row], config: AlarmsConfig) -> Cause | None:
        return self.watch(rows, config.window, self.limit(config))

    def limit(self, config: AlarmsConfig) -> float:
        return float(getattr(config, self.threshold)) if self.threshold else math.nan


def series(rows: Sequence[Row], metric: str) -> list[float]:
    """All values of a metric but NaN, oldest first; none if the last row has none."""
    values = [row.get(metric, math.nan) for row in rows]
    return [x for x in values if not math.isnan(x)] if not math.isnan(values[-1]) else []


def lacks_signal(rows: Sequence[Row], window: int, steps: float) -> Cause | None:
    """Advantages are all equal, or all rewards are, in each of the last `steps` rows.

    A step whose answers are all right does not count: there is nothing left to learn.
    """
    spread, solved = "reward/std", "reward/frac_all_correct"
    high, low = "critic/advantages/max", "critic/advantages/min"
    steps = int(steps)
    last = [row for row in rows if row.keys() >= {spread, solved, high, low}][-steps:]
    if len(last) < steps or last[-1] is not rows[-1]:
        return None
    if any(row[solved] == 1 or (row[spread] != 0 and row[high] != row[low]) for row in last):
        return None
    lasting = f"for {steps} steps" if steps > 1 else "in the last step"
    wasted = [row for row in last if row[spread] != 0 and row.get("reward/frac_equal", 1) < 1]
    if wasted:
        some = f"in {len(wasted)} of them " if len(wasted) < steps else ""
        return Cause(
            float(steps),
            f"{lasting} nothing was learned: {some}rewards differ within groups, but all "
            f"advantages are equal (at last {wasted[-1][high]:.3g}). Look at the function of "
            "algo.advantage, and of batch.subselect if the recipe sets it",
        )
    reward = rows[-1]["reward/mean"]
    same = f"all {reward:.3g}" if rows[-1][spread] == 0 else "equal within each group"
    return Cause(
        float(steps),
        f"{lasting} no reward differed from those it is compared with (they are {same}), "
        "so nothing is learned. Look at the answers in samples.jsonl: the task may be too hard or "
        "too easy, or the reward may not accept the form of the answers",
    )


def stays(
    name: str,
    metric: str,
    side: Literal["above", "below"],
    words: str,
    window: int = 0,
    applies: Callable[[Config], bool] = Alarm.applies,
) -> Alarm:
    """An alarm on a metric on one side of the threshold in each of the last `window` rows."""
    sign = 1 if side == "above" else -1

    def watch(rows: Sequence[Row], shared: int, threshold: float) -> Cause | None:
        size = window or shared
        last = series(rows, metric)[-size:]
        if len(last) < size or any(sign * (x - threshold) <= 0 for x in last):
            return None
        return Cause(last[-1], f"{metric} = {last[-1]:.3g} is {side} {threshold:g}: {words}")

    return Alarm(name, (metric,), watch, f"{name}_{side}", applies)


def is_one_flow(config: Config) -> bool:
    """Whether sampler and policy should agree on each token: same codes, of the same weights."""
    is_fresh = not config.rollout.ahead and config.sampling.replay == "off"
    return config.quant.unified and is_fresh


def collapses(name: str, metric: str, words: str, *, is_best: bool = False) -> Alarm:
    """An alarm on less than `threshold` times the metric's start in each of the last `window` rows.

    The start is the mean of the first `window` rows; `is_best` takes the best such mean instead.
    Rows as low as some of that start, such as steps without a rare reward, are no collapse.
    """

    def watch(rows: Sequence[Row], window: int, threshold: float) -> Cause | None:
        values = series(rows, metric)
        earlier, last = values[:-window], values[-window:]
        if len(earlier) < window:
            return None
        starts = range(len(earlier) - window + 1 if is_best else 1)
        start = max((earlier[i : i + window] for i in starts), key=fmean)
        level = fmean(start)
        if level <= 0 or max(last) >= min(threshold * level, *start):
            return None
        share, of = last[-1] / level, "best" if is_best else "first"
        known = f"{share:.2g} of the mean of its {of} {window} steps ({level:.3g})"
        return Cause(share, f"{metric} = {last[-1]:.3g} is {known}: {words}")

    return Alarm(name, (metric,), watch, f"{name}_below")


def mismatch_grows(rows: Sequence[Row], window: int, threshold: float) -> Cause | None:
    """The mismatch is more than `threshold` times that of the first `window` rows, or the floor.

    The start is their median: a mean would let one early spike hide all later growth.
    """
    metric = "rollout_corr/k3_kl"
    values = series(rows, metric)
    if len(values) < 2 * window:
        return None
    start, last = median(values[:window]), values[-window:]
    growth = min(last) / max(start, MISMATCH_FLOOR)
    if growth <= threshold:
        return None
    first = f"{start:.2g} (median of its first {window} steps)"
    grown = f"{metric} has grown from {first} to {fmean(last):.2g}"
    return Cause(growth, f"{grown}: the sampler drifts away from the policy")


def held_out_falls(rows: Sequence[Row], window: int, threshold: float) -> Cause | None:
    """Held-out accuracy is below the best so far, and their 95 % intervals do not overlap.

    The best of many is high by luck, so intervals are widened for as many comparisons (Bonferroni).
    """
    for metric in (name for name in rows[-1] if name.endswith("/accuracy")):
        scored = [row for row in rows if metric in row]
        best, last = max(scored, key=lambda row: row[metric]), rows[-1]
        if not metric.startswith("eval/") or best is last:
            continue
        wider = NormalDist().inv_cdf(1 - 0.025 / (len(scored) - 1)) / Z
        margins = best[metric] - best[f"{metric}_low"] + last[f"{metric}_high"] - last[metric]
        if best[metric] - last[metric] > wider * margins:
            after = f"after step {best['step']:g}" if best["step"] >= 0 else "before training"
            fall = f"{metric} fell from {best[metric]:.1%} ({after}) to {last[metric]:.1%}"
            chance = f"more than chance explains in {len(scored)} evaluations"
            return Cause(last[metric], f"{fall}, {chance}")
    return None


def graders_time_out(rows: Sequence[Row], window: int, threshold: float) -> Cause | None:
    """More graders were killed in this row, in training or in an evaluation, than allowed."""
    names = (name for name in rows[-1] if name.endswith(("/timeouts", "/num_timeouts")))
    killed = {name: n for name in names if (n := rows[-1][name]) > threshold}
    if not killed:
        return None
    places = {name: name.rpartition("/")[0].replace("reward", "training") for name in killed}
    listed = ", ".join(f"{n:g} in {places[name]}" for name, n in killed.items())
    scored = "the reward of such an answer is task.timeout_score, and held-out ones count as wrong"
    return Cause(
        max(killed.values()), f"graders were killed at task.grade_timeout: {listed}; {scored}"
    )


def is_broken(rows: Sequence[Row], window: int, threshold: float) -> Cause | None:
    """A metric of this row is not a finite number."""
    broken = {name: x for name, x in rows[-1].items() if not math.isfinite(x)}
    listed = ", ".join(f"{name} = {x}" for name, x in broken.items())
    return Cause(float(len(broken)), listed) if broken else None


ALARMS = (
    Alarm(
        "no_signal",
        (
            *("reward/std", "reward/mean", "reward/frac_equal", "/frac_all_correct"),
            *("/advantages/max", "/advantages/min"),
        ),
        lacks_signal,
        "no_signal_steps",
    ),
    stays(
        "truncated",
        "response_length/clip_ratio",
        "above",
        "nearly all answers are cut at sampling.max_tokens. Raise it, or see whether they end",
    ),
    collapses("reward_collapse", "reward/mean", "the policy is losing its accuracy", is_best=True),
    Alarm("held_out_collapse", ("/accuracy", "/accuracy_low", "/accuracy_high"), held_out_falls),
    collapses("entropy_collapse", "actor/entropy", "the policy hardly explores any more"),
    collapses("length_collapse", "response_length/mean", "the answers have shrunk"),
    Alarm("mismatch_growth", ("rollout_corr/k3_kl",), mismatch_grows, "mismatch_growth_above"),
    stays(
        "sample_size",
        "rollout_corr/rollout_is_eff_sample_size",
        "below",
        "a few importance weights decide the updates",
    ),
    stays(
        "unified_gap",
        "rollout_corr/rollout_is_ratio_fraction_high",
        "above",
        "sampler and policy differ, which quant.unified should prevent. Set correction.mode = "
        "'decoupled', run qurl doctor, and report it",
        window=1,
        applies=is_one_flow,
    ),
    Alarm("grader_timeouts", ("timeouts",), graders_time_out, "grader_timeouts_above"),
    stays(
        "repeated_problems",
        "sampling/distinct_frac",
        "below",
        "most prompts of the step are repeated. The data has few rows, or equal ones",
        window=1,
    ),
    Alarm("non_finite", (), is_broken),
)
"""All alarms. To add one, add an entry here and its keys to `AlarmsConfig`."""


class Monitor:
    """Logs the rows of a run, sets off its alarms and carries out their actions.

    An alarm that warns or changes the engine acts when it comes on, and again only after it was
    off. One that stops the run does so after every step that it is on.
    """

    def __init__(self, config: Config, parts: Parts, run: Run) -> None:
        """`run` has been rewound to the first step, so its rows are those before it."""
        self._config, self._parts, self._run = config, parts, run
        self.reason_to_stop: str | None = None
        self._rows = [_watched(row) for row in run.rows()]
        self._on = self._find_alarms(self._rows).keys()
        if self._rows and self._can_fall_back:
            came_on = self._on - self._find_alarms(self._rows[:-1]).keys()
            is_now = not came_on.isdisjoint(config.alarms.falling_back)
            parts.is_full = is_now or FALLEN_BACK in self._rows[-1]

    @property
    def _can_fall_back(self) -> bool:
        """A resumed run whose recipe no longer asks for it goes back to quantized rollouts."""
        return bool(self._config.alarms.falling_back) and self._config.quant.format != "none"

    @contextmanager
    def logging(self, step: int, metrics: dict[str, float]) -> Iterator[None]:
        """Log the row of a step at the end, whatever happens: its weights have been updated.

        A row is logged before the step is saved: a kill in between repeats the step and loses no
        row.
        """
        try:
            yield
        finally:
            for name, seconds in self._run.timer.lap().items():
                metrics[name] = metrics.get(name, 0.0) + seconds  # to those of a failed evaluation
            self._run.log(step, metrics)
        self._rows.append(_watched({"step": step} | metrics))
        note(self._run, step, metrics)
        self._act(step)

    def stop(self) -> None:
        """Raise if an alarm asked for a stop; the caller has saved the step."""
        if self.reason_to_stop is not None:
            raise TrainingError(self.reason_to_stop)

    def _find_alarms(self, rows: Sequence[Row]) -> dict[str, Cause]:
        """The wanted alarms that are on after these rows."""
        config = self._config
        wanted = [alarm for alarm in ALARMS if rows and alarm.is_wanted(config)]
        return {alarm.name: found for alarm in wanted if (found := alarm.find(rows, config.alarms))}

    def _act(self, step: int) -> None:
        was_on, causes = self._on, self._find_alarms(self._rows)
        self._on = causes.keys()
        for alarm in (alarm for alarm in ALARMS if alarm.name in causes):
            action = getattr(self._config.alarms, alarm.name)
            if action != "stop" and alarm.name in was_on:
                continue
            self._sound(alarm, step, action, causes[alarm.name])
            if action == "stop":
                self._ask_to_stop(alarm, step, causes[alarm.name])
            elif action == "requantize":
                self._parts.renew_engine()
            elif action == "full":
                self._parts.is_full = self._can_fall_back
        if step + 1 == self._config.steps and self._config.alarms.no_signal != "off":
            self._look_back(step)

    def _look_back(self, step: int) -> None:
        """At the end of a run too short for `no_signal`: a word if no step had a signal."""
        num_steps = len([row for row in self._rows if "reward/std" in row])
        is_short = 0 < num_steps < self._config.alarms.no_signal_steps
        if is_short and (cause := lacks_signal(self._rows, 0, num_steps)):
            self._sound(ALARMS[0], step, "warn", cause)

    def _sound(self, alarm: Alarm, step: int, action: str, cause: Cause) -> None:
        threshold = alarm.limit(self._config.alarms)
        self._run.event(
            "alarm",
            f"{alarm.name}, step {step}: {cause.message}{MEANING[action]}",
            name=alarm.name,
            step=step,
            value=cause.value,
            threshold=None if math.isnan(threshold) else threshold,
            action=action,
        )

    def _ask_to_stop(self, alarm: Alarm, step: int, cause: Cause) -> None:
        has_saved = self._config.save.keep and step >= 0
        saved = f"All {step + 1} steps are saved" if has_saved else "Nothing was saved"
        when = f"after step {step}" if step >= 0 else "before its first step"
        remedy = f"fix the cause, or add --alarms.{alarm.name} warn to the same command to continue"
        self.reason_to_stop = (
            f"the alarm {alarm.name} stopped the run {when}: {cause.message}. "
            f"{saved} in {self._run.path}; {remedy} (docs/alarms.md)"
        )


MEANING = {
    "warn": "",
    "stop": ". The run stops",
    "requantize": ". The engine is built anew from the trainer's weights",
    "full": ". Rollouts are in full precision from the next step on",
}
"""What the message of an alarm says about its action."""


def _watched(row: Row) -> dict[str, float]:
    """The values of a row that some alarm reads."""
    return {
        name: x
        for name, x in row.items()
        if name in ("step", FALLEN_BACK) or name.endswith(WATCHED) or not math.isfinite(x)
    }


WATCHED = tuple(ending for alarm in ALARMS for ending in alarm.watches)


def note(run: Run, step: int, metrics: Row) -> None:
    """Events of a step that are no alarms."""
    if skipped := metrics.get("actor/skipped_updates"):
        run.event("warning", f"step {step}: {skipped:g} updates had no token left", step=step)
    if metrics.get("correction/prox_skipped") == 0:
        tail = f"{metrics['correction/gap_tail']:.2g} of the tokens have a gap above the clip range"
        run.event("fallback", f"step {step} made the prox forward: {tail}", step=step)
