"""A step's sampling: takes problems, generates, grades, and keeps the groups that teach."""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from qurl.config import AlgoConfig, Config
from qurl.errors import ConfigError, EngineError, TrainingError
from qurl.ops.background import in_background
from qurl.plugins import naming_failures
from qurl.rewards import Grading, Pool, reward_metrics
from qurl.rewards.grading import overlong_cache
from qurl.rollout import Engine
from qurl.rollout.engine import Earlier, Stream
from qurl.sampling.histopipe import plan, rank_correlation
from qurl.sampling.packed import pack, unpack
from qurl.sampling.parts import Hooks
from qurl.sampling.stream import ProblemStream
from qurl.seeds import derive_seed
from qurl.types import COLDEST, Graded, Problem, Rollout, SamplingParams


class Sampler:
    """Takes problems, generates and grades, as often as a step needs.

    Grading starts with the first finished group. `timing_s/rollout` is the time until the last one
    is finished, and `timing_s/grade` what grading takes after that.
    """

    def __init__(
        self,
        config: Config,
        stream: ProblemStream,
        engine: Engine,
        pool: Pool,
        step: int,
        hooks: Hooks | None = None,
    ) -> None:
        self.config, self.stream, self.engine, self.pool = config, stream, engine, pool
        self.step, self.hooks = step, hooks or Hooks(select=stream.select)
        self.graded: list[Graded] = []
        self.probed: list[Graded] = []
        """Groups that only tell the selector something."""
        self._rollout_seconds = self._grade_seconds = 0.0
        self._draft_counts = getattr(engine, "draft_counts", None)
        """Before this step."""
        self._foretold: tuple[list[float], list[float]] = [], []
        """Expected and actual mean lengths of the problems that HistoPipe dealt."""

    def collect(self) -> Sampled:
        """The fresh groups of the step."""
        probe = getattr(self.hooks.select, "probe", None)
        if probe and (indices := probe(self.step, self.stream.history, self.config.seed)):
            self.probed = self._sample(self.stream.hand_out(indices), "probe")
        num_fresh = self.hooks.num_fresh(self.config.batch.problems)
        size = getattr(self.hooks.select, "round", None)
        collected = collect(self, num_fresh, self.config.algo, size)
        return Sampled(collected.graded, self.graded, self.metrics() | collected.metrics())

    def begin(self) -> Future[Sampled]:
        """`collect` without times, in the background if the engine works elsewhere.

        An engine in this process shares weights with the trainer, which is about to change them:
        it samples everything now. The numbers are the same.
        """
        if getattr(self.engine, "works_elsewhere", False):
            return in_background(self._collect_untimed)
        begun: Future[Sampled] = Future()
        begun.set_result(self._collect_untimed())
        return begun

    def _collect_untimed(self) -> Sampled:
        """The loop times itself what it waits for."""
        sampled = self.collect()
        metrics = {k: v for k, v in sampled.metrics.items() if not k.startswith("timing_s/")}
        return dataclasses.replace(sampled, metrics=metrics)

    def __call__(self, round: int, count: int) -> list[Graded]:
        graded = self._sample(self.stream.take(count), round)
        self.graded += graded
        return graded

    def _sample(self, problems: Sequence[Problem], round: int | str) -> list[Graded]:
        """A graded group for each problem, in their order."""
        sampling, hooks = self.config.sampling, self.hooks
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=self._temperature(),
            stop=sampling.stops,
            group_size=sampling.group_size,
            seed=derive_seed(self.config.seed, "rollout", self.step, round),
        )
        indices = [self.stream.index_of(problem) for problem in problems]
        sizes = self._sizes(indices)
        cut = [_cut(p, n, sampling.chunk) for p, n in zip(problems, sizes, strict=True)]
        num_pieces = [len(pieces) for pieces in cut]
        expected, engines = self._plan(indices)
        hints = {
            "earlier": _repeat(self._earlier(indices), num_pieces),
            "engines": _repeat(engines, num_pieces),
        }
        by_id = self._generate([*chain(*cut)], params, hints)
        graded = [
            _join(problem, [by_id[piece.id] for piece, _ in pieces])
            for problem, pieces in zip(problems, cut, strict=True)
        ]
        if shape := getattr(hooks.budget, "shape", None):
            graded = shape(indices, graded)
        self.stream.record(graded)
        if expected:
            lengths = [fmean(len(c.token_ids) for c in g.rollout.completions) for g in graded]
            self._foretold[0].extend(expected)
            self._foretold[1].extend(lengths)
        return graded

    def _generate(
        self,
        asked: Sequence[tuple[Problem, int]],
        params: SamplingParams,
        hints: Mapping[str, Sequence[Any]],
    ) -> dict[str, Graded]:
        """So many completions of each problem, graded, by the id of the problem."""
        grading, start = Grading(self.pool), time.perf_counter()
        with self.engine.stream(params) as rollouts:
            _submit(rollouts, asked, params.group_size, hints)
            for rollout in rollouts:
                grading.submit(rollout)
        generated = time.perf_counter()
        finished = grading.rewards(overlong_cache=self.overlong_cache, max_tokens=params.max_tokens)
        self._rollout_seconds += generated - start
        self._grade_seconds += time.perf_counter() - generated
        return {group.rollout.problem.id: group for group in finished}

    def _temperature(self) -> float:
        """The temperature of this step. The trainer divides by it, so it is not 0."""
        with naming_failures("sampling.thermostat"):
            found: Any = self.hooks.thermostat(self.step, self.config.sampling.temperature)
        try:
            temperature = float(found)
        except (TypeError, ValueError):  # no number
            temperature = math.nan
        if not COLDEST <= temperature < math.inf:
            raise ConfigError(
                f"sampling.thermostat returned {found!r}; it must return a temperature from "
                f"{COLDEST:g} on"
            )
        return temperature

    def _earlier(self, indices: Sequence[int]) -> Earlier:
        """The last responses to each problem; none unless drafts are on."""
        if self.config.rollout.drafts == "off":
            return ()
        return [self.stream.history.responses(index) for index in indices]

    def _plan(self, indices: Sequence[int]) -> tuple[list[float], list[int]]:
        """Expected length and engine of each problem, if HistoPipe deals them and knows any."""
        if self.config.parallel.deal == "free":
            return [], []
        return plan(indices, self.stream.history, self.config.parallel.engines, self.step)

    def _sizes(self, indices: Sequence[int]) -> list[int]:
        """Completions of each problem, as the budget has them."""
        size, num = self.config.sampling.group_size, len(indices)
        with naming_failures("sampling.budget"):
            sizes = [int(n) for n in self.hooks.budget(indices, self.stream.history, size)]
        if len(sizes) != num or min(sizes, default=1) < 1:
            raise ConfigError(
                f"sampling.budget returned {sizes}; it must return {num} sizes of 1 or more"
            )
        return sizes

    def metrics(self) -> dict[str, float]:
        """Describe everything that was sampled, before groups are dropped."""
        lengths = [len(c.token_ids) for g in self.graded for c in g.rollout.completions]
        probed = sum(len(c.token_ids) for g in self.probed for c in g.rollout.completions)
        num_tokens = float(sum(lengths) + probed)
        prompts = [tuple(group.rollout.problem.prompt_ids) for group in self.graded]
        metrics = reward_metrics(self.graded) | {
            "sampling/distinct_frac": len(set(prompts)) / len(prompts),
            "perf/rollout_tokens": num_tokens,
            "perf/rollout_tokens_per_s": num_tokens / self._rollout_seconds,
            "sampling/temperature": self.graded[0].rollout.temperature,
            "timing_s/rollout": self._rollout_seconds,
            "timing_s/grade": self._grade_seconds,
        }
        if (saturated := getattr(self.engine, "kv_saturated_frac", None)) is not None:
            metrics["rollout/kv_saturated_frac"] = saturated
        if self._draft_counts is not None:
            counts = self.engine.draft_counts  # type: ignore[attr-defined]
            metrics |= counts.since(self._draft_counts).metrics()
        if not math.isnan(agreement := rank_correlation(*self._foretold)):
            metrics["sampling/length_rank_corr"] = agreement
        if self.overlong_cache:
            allowed = self.config.sampling.max_tokens - self.overlong_cache
            metrics["reward/overlong"] = fmean(length > allowed for length in lengths)
        return metrics

    @property
    def overlong_cache(self) -> int:
        """Number of last tokens that are punished."""
        return overlong_cache(self.config.algo.overlong_frac, self.config.sampling.max_tokens)


def _cut(problem: Problem, size: int, chunk: int) -> list[tuple[Problem, int]]:
    """A problem with its number of completions, in pieces of at most `chunk`; 0 cuts nothing."""
    if not chunk or size <= chunk:
        return [(problem, size)]
    return [
        # Engines draw by id: pieces must not answer alike.
        (dataclasses.replace(problem, id=f"{problem.id}@@{start}"), min(chunk, size - start))
        for start in range(0, size, chunk)
    ]


def _repeat(values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Each value as often as its problem has pieces; nothing if there are no values."""
    return [v for v, count in zip(values, counts, strict=bool(values)) for _ in range(count)]


def _submit(
    rollouts: Stream,
    asked: Sequence[tuple[Problem, int]],
    group_size: int,
    hints: Mapping[str, Sequence[Any]],
) -> None:
    problems, sizes = [problem for problem, _ in asked], [size for _, size in asked]
    known = inspect.signature(rollouts.submit).parameters
    options: dict[str, Any] = {}
    if not set(sizes) <= {group_size}:
        options["sizes"] = sizes
        if "sizes" not in known:
            raise EngineError(
                f"sampling.budget or sampling.chunk asks for groups of {min(sizes)} to "
                f"{max(sizes)}, and submit(problems, sizes) of the engine's stream takes no sizes; "
                "use rollout.engine = 'local', or leave them off"
            )
    options |= {name: hint for name, hint in hints.items() if hint}
    if "earlier" in options and "earlier" not in known:
        raise EngineError(
            "rollout.drafts drafts from earlier responses, and submit(problems, sizes, "
            "earlier) of the engine's stream takes none; use rollout.engine = 'local', or "
            "rollout.drafts = 'off'"
        )
    if "engines" in options and "engines" not in known:
        raise EngineError(
            "parallel.deal = 'histopipe' says which engine gets a problem, and the engine of this "
            "run is no group of engines: its stream takes no engines; use 'free'"
        )
    rollouts.submit(problems, **options)


def _join(problem: Problem, pieces: Sequence[Graded]) -> Graded:
    """The pieces of a group as one."""
    if len(pieces) == 1:
        return pieces[0]
    rollouts = [piece.rollout for piece in pieces]
    completions = [c for rollout in rollouts for c in rollout.completions]
    version, temperature = min(r.version for r in rollouts), rollouts[0].temperature
    return Graded(
        Rollout(problem, completions, version, temperature),
        [reward for piece in pieces for reward in piece.rewards],
        [detail for piece in pieces for detail in piece.details],
    )


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, all from the same weights."""

    graded: list[Graded]
    """The groups to train on."""
    everything: list[Graded]
    """All groups, also those that dynamic sampling dropped, and its surplus."""
    metrics: dict[str, float]

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints, because the weights that sampled it are gone after a crash."""
        places = {id(group): place for place, group in enumerate(self.everything)}
        kept = [places[id(group)] for group in self.graded]
        return {"groups": [*map(pack, self.everything)], "kept": kept, "metrics": self.metrics}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Sampled:
        groups = [*map(unpack, state["groups"])]
        return cls([groups[place] for place in state["kept"]], groups, dict(state["metrics"]))


@dataclass(frozen=True)
class Collected:
    """The groups of a step and how they were obtained."""

    graded: list[Graded]
    rounds: int
    num_groups_sampled: int
    num_groups_with_signal: int
    """All of them if no group is dropped; the surplus counts."""

    def metrics(self) -> dict[str, float]:
        return {
            "sampling/rounds": float(self.rounds),
            "sampling/groups_kept_frac": self.num_groups_with_signal / self.num_groups_sampled,
        }


def has_signal(group: Graded) -> bool:
    """Do accuracies differ within the group, so that there is something to compare?

    The shaped reward does not count: length penalties would make a group of wrong answers look
    informative.
    """
    return len(set(group.accuracies)) > 1


def collect(
    sample: Callable[[int, int], Sequence[Graded]],
    num_groups: int,
    algo: AlgoConfig,
    size_of: Callable[[int, int], int] | None = None,
) -> Collected:
    """`num_groups` groups from `sample(round, count)`.

    With dynamic sampling (DAPO), groups without signal are dropped and more are sampled from the
    same weights until there are enough; the surplus is cut off. `size_of(num_groups, num_missing)`
    says how many a round asks for, if a selector knows better than `algo.gen_multiple`.
    """
    dynamic = algo.dynamic_sampling
    kept: list[Graded] = []
    num_sampled = 0
    for round in range(algo.max_gen_rounds if dynamic else 1):
        count = num_groups * (algo.gen_multiple if dynamic else 1)
        if dynamic and size_of:
            count = size_of(num_groups, num_groups - len(kept))
        groups = sample(round, count)
        num_sampled += len(groups)
        kept += [group for group in groups if has_signal(group) or not dynamic]
        if len(kept) >= num_groups:
            return Collected(kept[:num_groups], round + 1, num_sampled, len(kept))
    raise TrainingError(
        f"dynamic sampling found {len(kept)} groups with mixed outcomes among {num_sampled} in "
        f"algo.max_gen_rounds = {algo.max_gen_rounds} rounds, and {num_groups} are needed: the "
        "problems are too easy or too hard for this policy. Raise algo.max_gen_rounds and resume; "
        "or, in another run_dir, raise sampling.group_size, change the task, or turn "
        "algo.dynamic_sampling off"
    )
