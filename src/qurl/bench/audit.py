"""`qurl audit RUN --at STEP`: bias and variance of objectives' gradients, without training.

Which objective is better is a question about gradients before it is one about accuracies. At a
checkpoint theta of a run, with problems in K chunks:

    target    T = E_{y ~ pi_theta}[ A(y) grad log pi_theta(y) ]   full-precision rollouts of theta
    estimate  G = gradient of an objective on rollouts of the quantized actor, with the noise that
              the run adds to it in its next step (AQN)

With --updates j the estimates are those of update j + 1: rollouts and pi_prox are theta's, gradient
and target those of theta_j, which j mini-batch updates of the run's own objective made from other
rollouts of the same problems. Ratios differ from 1 there, so that clipping and ACR act.

With --advantages the same rollouts are judged by several advantages, each with its own target: that
says whether one of them, such as a group's mean in place of a critic, hides the mismatch.

Sums over tokens are divided by the number of sequences, so that denominators add no noise. Weights
are per token, as in the paper; `correction.*` of the run is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from torch import Tensor

from qurl.advantages import ESTIMATORS, Estimator, compare
from qurl.bench.gradients import Moments, Sketcher
from qurl.bench.record import Record
from qurl.config import Config, load_config
from qurl.correction import LOG_CLAMP, correct
from qurl.errors import ConfigError
from qurl.losses import SURROGATES, facts_of, policy_loss
from qurl.objectives import ADVANTAGES, OBJECTIVES, Advantage
from qurl.quant.formats import FORMATS
from qurl.rewards import Grading
from qurl.rewards.grading import overlong_cache
from qurl.rollout import Engine
from qurl.run.assembly import Parts, assemble
from qurl.run.choices import Choices
from qurl.run.directory import Run
from qurl.run.engines import add_noise, build_actor
from qurl.run.fork import fork
from qurl.run.intervals import Estimate
from qurl.seeds import derive_seed
from qurl.trainer.batches import pad
from qurl.trainer.learner import Learner, clip_options
from qurl.types import Batch, Corrected, Graded, Problem, SamplingParams, Trainable

HEAD = (
    "updates  advantage     format    objective   C     bias / |T|^2              "
    "cosine                    change / |T|^2             variance  clipped  truncated  rescued"
)
ROW = (
    "{updates:7}  {advantage:12}  {format:8}  {objective:10}  {cap:4}  {bias:24}  "
    "{cosine:24}  {change:24}  {variance:>9}  {clipped:7.2%}  {truncated:9.2%}  {rescued:7.3%}"
)


@dataclass(frozen=True)
class Audit:
    """Bias, variance and direction of objectives' gradients at a checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run."""
    at: int
    """Step of the checkpoint."""
    formats: tuple[str, ...] = ()
    """Formats of the actor; by default none and the run's own."""
    objectives: tuple[str, ...] = ("ppo_prox", "decoupled", "tis", "acr")
    caps: tuple[float, ...] = (2.0,)
    """C of the objectives that truncate."""
    updates: tuple[int, ...] = (0,)
    """Updates between rollouts and gradient."""
    advantages: tuple[str, ...] = ()
    """Advantages to judge the same rollouts by; by default the run's own."""
    problems: int = 128
    """Problems of the audit."""
    group: int = 0
    """Completions of each; 0 = sampling.group_size of the run."""
    chunks: int = 16
    """Parts of the problems, over which noise is estimated."""
    out: Path | None = None
    """JSON file with the results; by default audit.json in the run's directory."""

    def check(self) -> None:
        """Raise if a flag makes no sense."""
        choices = {"formats": ("none", *FORMATS), "objectives": tuple(OBJECTIVES)}
        for flag, allowed in choices.items():
            for value in getattr(self, flag):
                if value not in allowed:
                    raise ConfigError(f"--{flag} {value} is not one of {', '.join(allowed)}")
        if self.chunks < 4:
            raise ConfigError(f"--chunks {self.chunks} is too few for an interval; use 4 or more")
        if self.problems < 1 or self.problems % self.chunks:
            raise ConfigError(
                f"--problems {self.problems} must be a multiple of --chunks {self.chunks}"
            )
        for flag in ("objectives", "caps", "updates"):
            if not getattr(self, flag):
                raise ConfigError(f"--{flag} is empty; give one value or more, or leave it out")
        if min(*self.updates, self.group) < 0 or min(self.caps) < 1:
            raise ConfigError("--updates and --group must be at least 0 and --caps at least 1")


class AuditRow(NamedTuple):
    """What one objective's gradient is like, in total and per layer group."""

    updates: int
    advantage: str
    format: str
    objective: str
    cap: float | None
    groups: dict[str, dict[str, Estimate]]
    """Bias, cosine, variance, and change from the arm before it: of "all" and each layer group."""
    shares: dict[str, float]
    """Shares of the tokens that were clipped, truncated and rescued."""


def run_audit(options: Audit) -> None:
    """Print a row for each objective and save it at once."""
    options.check()
    with opened(options) as auditor:
        out = options.out or options.run / "audit.json"
        record = Record("audit", out, auditor.policy.device)
        print(HEAD)
        for found in auditor.figures():
            print(row_of(found), flush=True)
            settings = {flag: getattr(options, flag) for flag in ("problems", "chunks", "updates")}
            settings["group"] = auditor.group_size
            key = f"{options.run.resolve().name} at {options.at}"
            record.add(key, settings=settings, figures=found._asdict())
    print(
        "bias, cosine: against the full-precision gradient T; change: from the row above, on the "
        "same rollouts; variance: of one mini-batch, / |T|^2. Lost in noise: T, or for the cosine "
        f"the estimate, cannot be told from 0; raise --problems.\nsaved to {record.path}"
    )


@contextmanager
def opened(options: Audit) -> Iterator[Auditor]:
    """The parts of the run at its checkpoint, in a copy that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="qurl-audit-") as work:
        flags = ["--run-dir", str(Path(work, "run")), "--track.wandb", "", "--eval.every", "0"]
        flags += ["--parallel.trainers", "1"]
        config = load_config(fork(options.run, options.at, flags))
        if config.quant.unified:
            raise ConfigError(
                f"{options.run} has quant.unified = true: its policy is its actor, so there is no "
                "mismatch to audit"
            )
        choices = Choices.of(config)
        with Run.open(config) as run, assemble(config, run, choices) as parts:
            yield Auditor(options, config, parts, choices)


class Auditor:
    """Samples chunks of rollouts and takes their gradients."""

    def __init__(self, options: Audit, config: Config, parts: Parts, choices: Choices) -> None:
        self.options, self.config, self.parts, self.choices = options, config, parts, choices
        assert isinstance(parts.learner, Learner)  # on one device: see `opened`
        self.learner, self.policy = parts.learner, parts.learner.policy
        self.group_size = options.group or config.sampling.group_size
        self.estimators = self._find_estimators()
        self.sketcher = Sketcher(self.policy.model)
        self.problems = parts.stream.take(options.problems)
        self.full_engine = build_actor(config, self.policy, "none", choices)

    def _find_estimators(self) -> dict[str, Estimator]:
        """The advantages of the audit by name; raises if the run cannot compute one."""
        own = self.config.algo.advantage
        names = self.options.advantages or (own,)
        known = {**ESTIMATORS, own: self.parts.advantage}
        for name in names:
            if name not in known:
                raise ConfigError(f"--advantages {name} is not one of {', '.join(known)}")
            facts = ADVANTAGES.get(name, Advantage())  # a user's own compares what it likes
            if facts.needs_critic and self.learner.critic is None:
                raise ConfigError(f"--advantages {name} needs a critic, and the run has none")
            if facts.needs_group and self.group_size < 2:
                raise ConfigError(
                    f"--advantages {name} compares completions of a problem, and --group is "
                    f"{self.group_size}; set it to 2 or more"
                )
        return {name: known[name] for name in names}

    def figures(self) -> Iterator[AuditRow]:
        """One for each number of updates, advantage, format, objective and cap."""
        formats = self.options.formats or ("none", self.config.quant.format)
        chunks = {format: self._roll_out(format) for format in dict.fromkeys(formats)}
        trained_on = self._batch_to_train(max(self.options.updates))
        start = {
            name: ([x.detach().clone() for x in model.parameters()], deepcopy(optim.state_dict()))
            for name, (model, optim) in self.learner.optimizers.items()
        }
        for updates in self.options.updates:
            self._restore(start)
            if updates:
                self._update(trained_on, updates)
            on_policy = self._chunks(self.full_engine, "target", updates)
            for advantage in self.estimators:
                target, _ = self._gradients(self._judge(on_policy, advantage), "decoupled")
                for format, scored in chunks.items():
                    batches, above = self._judge(scored, advantage), None
                    for objective, cap in self._arms():
                        gradients, shares = self._gradients(batches, objective, cap)
                        groups = self._compare(gradients, target, above or gradients)
                        yield AuditRow(updates, advantage, format, objective, cap, groups, shares)
                        above = gradients

    def _arms(self) -> Iterator[tuple[str, float | None]]:
        """Objectives of one cap stand together, since each is compared with the one above it."""
        names = self.options.objectives
        yield from ((name, None) for name in names if not OBJECTIVES[name].is_truncated)
        for cap in self.options.caps:
            yield from ((name, cap) for name in names if OBJECTIVES[name].is_truncated)

    def _judge(self, batches: Sequence[Corrected], advantage: str) -> list[Trainable]:
        """The batches with their advantages; only the run's own are whitened, if it does that."""
        is_whitened = self.config.algo.whiten and advantage == self.config.algo.advantage
        estimate = self.estimators[advantage]
        return [compare(batch, estimate, is_whitened=is_whitened) for batch in batches]

    def _roll_out(self, format: str) -> list[Corrected]:
        engine = self.full_engine
        if format != "none":
            parts = (self.config, self.policy, format, self.choices)
            engine = build_actor(*parts, scales=self.parts.scales)
        return self._chunks(engine, f"estimate {format}", 0)

    def _chunks(self, engine: Engine, purpose: str, updates: int) -> list[Corrected]:
        """Rollouts of the present weights, a batch for each chunk."""
        graded = self._sample(engine, self.problems, purpose, updates, self.group_size)
        size = len(graded) // self.options.chunks
        return [self._score(graded[i : i + size]) for i in range(0, len(graded), size)]

    def _sample(
        self, engine: Engine, problems: Sequence[Problem], purpose: str, updates: int, size: int
    ) -> list[Graded]:
        """So many graded completions of each problem."""
        sampling = self.config.sampling
        engine.sync(self.policy.model, version=self.options.at + updates)
        if purpose != "target":
            add_noise(self.config, engine, self.options.at)
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=sampling.stops,
            group_size=size,
            seed=derive_seed(self.config.seed, "audit", purpose, updates),
        )
        rollouts = engine.generate(problems, params)
        overlong = overlong_cache(self.config.algo.overlong_frac, sampling.max_tokens)
        grading = Grading(self.parts.pool, rollouts)
        return grading.rewards(overlong_cache=overlong, max_tokens=sampling.max_tokens)

    def _score(self, graded: Sequence[Graded]) -> Corrected:
        batch = pad(graded).to(self.policy.device)
        scored = self.learner.recompute(batch, self.options.at)
        found = self.learner.score(batch, torch.arange(len(batch), device=self.policy.device))
        return correct(self.learner.with_prox(scored, found), cap=None)

    def _gradients(
        self, batches: Sequence[Trainable], objective: str, cap: float | None = None
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Gradients [K, D] of each layer group, and shares of tokens."""
        found, totals, num_tokens = [], dict.fromkeys(("clipped", "truncated", "rescued"), 0.0), 0
        for batch in batches:
            for _, part, _ in self.learner.pieces(batch):
                stats = self._backward(part, objective, cap, denominator=len(batch))
                totals = {name: total + stats[name] for name, total in totals.items()}
                num_tokens += part.num_tokens
            found.append(self.sketcher.take())
        self.policy.free_copies_()
        shares = {name: float(total) / max(num_tokens, 1) for name, total in totals.items()}
        return {group: torch.stack([f[group] for f in found]) for group in found[0]}, shares

    def _backward(
        self, part: Trainable, objective: str, cap: float | None, *, denominator: int
    ) -> dict[str, Tensor]:
        """Add one piece's gradient to the model's; returns numbers of tokens."""
        logp = self.policy.score(part).logp
        loss, stats = policy_loss(
            *(logp, part.logp_prox, part.logp_behav, part.advantages, part.mask),
            objective=objective,
            cap=facts_of(SURROGATES[objective]).cap(cap),
            **clip_options(self.config),
            denominator=denominator,
        )
        loss.backward()
        mismatch = (part.logp_prox - part.logp_behav).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
        is_truncated = (mismatch > (cap or torch.inf)) & part.mask.bool()
        return {
            "clipped": stats["actor/pg_clipfrac"] * part.num_tokens,
            "truncated": is_truncated.sum(),
            "rescued": stats["acr/rescued_frac"] * part.num_tokens,
        }

    def _batch_to_train(self, num_updates: int) -> Batch | None:
        """Rollouts of the run's actor for the updates, of other draws than the estimates'."""
        if not num_updates:
            return None
        size = max(1, self.config.batch.problems // self.config.batch.minibatches)  # whole groups
        asked = [self.problems[i % len(self.problems)] for i in range(size * num_updates)]
        group_size = self.config.sampling.group_size
        graded = self._sample(self.parts.engine, asked, "train", 0, group_size)
        return pad(graded).to(self.policy.device)

    def _update(self, batch: Batch | None, num_updates: int) -> None:
        """Make `num_updates` mini-batch updates as the run would."""
        assert batch is not None
        learner, config = self.learner, self.config
        num_all = max(self.options.updates)
        rows = torch.arange(len(batch) * num_updates // num_all, device=batch.mask.device)
        counts = dataclasses.replace(config.batch, epochs=1, minibatches=num_updates)
        learner.config = dataclasses.replace(config, batch=counts)
        scored = learner.recompute(batch.select(rows), self.options.at)
        trainable = learner.compare(learner.correct(scored), self.parts.advantage)
        learner.update(trainable, self.options.at)
        learner.config = config

    @torch.no_grad()
    def _restore(self, start: Mapping[str, tuple[Sequence[Tensor], Mapping[str, Any]]]) -> None:
        """Weights and optimizers of policy and critic as they were."""
        for name, (model, optimizer) in self.learner.optimizers.items():
            weights, state = start[name]
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
            optimizer.load_state_dict(deepcopy(dict(state)))

    def _compare(
        self, found: dict[str, Tensor], target: dict[str, Tensor], above: dict[str, Tensor]
    ) -> dict[str, dict[str, Estimate]]:
        moments = {g: Moments.of(x, target[g], above[g]) for g, x in found.items()}
        whole = functools.reduce(operator.add, moments.values())
        chunk_size = self.options.problems * self.group_size / self.options.chunks
        batch_size = self.config.sequences_per_step / self.config.batch.minibatches
        scale = chunk_size / batch_size
        named = {"all": whole, **moments}
        return {name: m.describe(scale) | m.sizes() for name, m in named.items()}


def row_of(found: AuditRow) -> str:
    figures = found.groups["all"]
    spans = {name: _span(figures[name]) for name in ("bias", "cosine", "change")}
    arm = {name: getattr(found, name) for name in ("updates", "advantage", "format", "objective")}
    cap, variance = "-" if found.cap is None else f"{found.cap:g}", figures["variance"].value
    spans["variance"] = "-" if math.isnan(variance) else f"{variance:.3g}"
    return ROW.format(**arm, cap=cap, **spans, **found.shares)


def _span(figure: Estimate) -> str:
    if math.isnan(figure.value):
        return "lost in noise"
    return "{:.3f} ({:.3f} to {:.3f})".format(*figure)
