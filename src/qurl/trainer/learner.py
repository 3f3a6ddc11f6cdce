"""The trainer's side of a step: recompute what the objective needs, then update.

The first update of a step needs no prox forward. The weights have not moved yet, so its training
forward is that of prox, and there is no dropout: pi_prox = the detached pi_theta. `recompute`
leaves these rows out and `update` fills them in, unless something reads prox before.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from qurl.config import Config
from qurl.config.rules import prox_readers
from qurl.correction import LARGEST_TAIL, correction_metrics, gap_tail, weigh
from qurl.errors import ConfigError, TrainingError
from qurl.losses import (
    Stats,
    Surrogate,
    Symmetric,
    aggregate,
    count,
    explained_variance,
    facts_of,
    kl_penalty,
    policy_loss,
    value_loss,
)
from qurl.objectives import Advantage
from qurl.quant.kv import set_kv_scales_
from qurl.quant.scaling import learning_rate_scales, uaq_scale, unscaled_grad_norm
from qurl.seeds import generator
from qurl.trainer.batches import microbatches, minibatches, padded_microbatches
from qurl.trainer.critic import Critic
from qurl.trainer.masters import narrow_masters_
from qurl.trainer.optimizer import (
    apply_gradients,
    build_optimizer,
    learning_rate,
    optimizer_metrics,
)
from qurl.trainer.packing import BatchLayout
from qurl.trainer.policy import Policy, TokenScores, Untrained
from qurl.types import Batch, KVScales, Scored, Stage, Trainable, Trained

Number = Tensor | float
ScoredStage = TypeVar("ScoredStage", bound=Scored)
K3_LIMIT = 10.0
"""Largest k3 of one token in the loss, as in verl: it grows exponentially, the others do not."""


class Piece(NamedTuple, Generic[Stage]):
    """A micro-batch: what one forward and backward sees."""

    rows: Tensor  # [b] of the batch that it is a piece of
    batch: Stage
    layout: BatchLayout


class Meter:
    """Statistics of many pieces as one: means weighted by tokens, and maxima of `max` names.

    `_sum` names add up over the pieces of an update; their mean over updates loses the suffix. The
    device is read in `summary` only.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Number]] = defaultdict(list)
        self._weights: dict[str, list[float]] = defaultdict(list)
        self._sums: dict[str, Number] = {}

    def add(self, stats: Mapping[str, Number], weight: float = 1.0) -> None:
        for name, value in stats.items():
            if name.endswith("_sum"):
                name = name.removesuffix("_sum")
                value = value.double() if isinstance(value, Tensor) else value
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._values[name].append(value)
                self._weights[name].append(weight)

    def finish_update(self, stats: Mapping[str, Number]) -> None:
        self.add({**self._sums, **stats})
        self._sums.clear()

    def summary(self) -> dict[str, float]:
        numbers = (value for column in self._values.values() for value in column)
        tensors = [value.double() for value in numbers if isinstance(value, Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else [])  # the device is asked once
        summary = {}
        for name, weights in self._weights.items():
            column = [next(read) if isinstance(x, Tensor) else x for x in self._values[name]]
            mean = sum(x * w for x, w in zip(column, weights, strict=True)) / sum(weights)
            is_max = "max" in re.split("[/_]", name)
            summary[name] = max(column) if is_max else mean
        return summary


class Learner:
    """The full-precision models and their optimizers.

    A GPU runs behind the host, which waits for it only between mini-batches: to cut the next one
    into pieces, and to see that losses and gradients are finite before they touch the weights.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        *,
        reference: Policy | Untrained | None = None,
        objective: Surrogate,
        advantage: Advantage,
    ) -> None:
        self.config, self.objective, self.advantage = config, objective, advantage
        self.policy, self.reference = policy, reference
        scale = config.experimental.norm_fed_lr_scale
        scales = {} if scale == 1 else learning_rate_scales(policy.model, scale)
        self.optimizer = build_optimizer(
            policy.model, config.optim, lr=config.optim.lr, scales=scales
        )
        self.version: int | None = 0
        """Changes with the weights; None if they are between two steps, in or after a failure."""
        self.critic = Critic(policy) if advantage.needs_critic else None
        self.critic_optimizer = None
        if self.critic is not None:
            self.critic_optimizer = build_optimizer(self.critic, config.optim, lr=config.critic.lr)

    def narrow_masters_(self) -> None:
        """Keep masters as `optim.masters` says, before the first update and before any engine."""
        if self.config.optim.masters == "fp32":
            return
        if self.policy.compute_dtype != torch.bfloat16:
            raise ConfigError(
                f'optim.masters = "bf16", but the trainer computes in {self.policy.compute_dtype} '
                'and would see rounded weights; set model.compute_dtype = "bfloat16"'
            )
        narrow_masters_(self.policy.model, self.optimizer)
        if self.critic is not None and self.critic_optimizer is not None:
            narrow_masters_(self.critic, self.critic_optimizer)

    @property
    def cap(self) -> float | None:
        """C as the objective applies it."""
        return facts_of(self.objective).cap(self.config.algo.cap)

    def round_kv_(self, scales: KVScales) -> None:
        """Unified policies see keys and values as an engine's cache with these scales does."""
        for policy in (self.policy, self.reference):
            if isinstance(policy, Policy):  # an `Untrained` one is the policy itself
                set_kv_scales_(policy.model, scales)

    @torch.no_grad()
    def recompute(self, batch: Batch, step: int) -> Scored:
        """The batch with logp_ref, values, and the prox of all rows that need a forward for it."""
        ref, values, entropy = (torch.zeros_like(batch.mask) for _ in range(3))
        with _within_memory(self.config):
            scores = self._score(batch, self._rows_to_score(len(batch), step))
            has_others = self.reference is not None or self.critic is not None
            for rows, part, layout in self._pieces(batch) if has_others else ():
                at = (rows, slice(part.mask.shape[1]))
                if self.reference is not None:
                    is_alike = self.reference.is_packed == self.policy.is_packed
                    ref[at] = self.reference.score(part, layout if is_alike else None).logp
                if self.critic is not None:
                    values[at] = self.critic(part, layout)
        prox, has_prox = batch.logp_behav, torch.zeros_like(batch.lengths, dtype=torch.bool)
        added = {"logp_prox": prox, "logp_ref": ref, "values": values, "entropy": entropy}
        return self._with_prox(batch.into(Scored, **added, has_prox=has_prox), scores)

    def _rows_to_score(self, num_rows: int, step: int) -> Tensor:
        """The rows whose prox is computed before the update.

        decoupled   all but those of the first mini-batch
        auto        none yet: see `_complete`
        bypass      none

        Except in bypass, all rows are scored if something reads prox before the update, and in
        steps that train the critic only.
        """
        mode = self.config.correction.mode
        first, *others = self._minibatches(num_rows, step, epoch=0)
        is_read = self._is_pretraining(step) or prox_readers(self.config, self.advantage)
        if mode != "bypass" and is_read:
            return torch.arange(num_rows, device=first.device)
        if mode != "decoupled" or not others:
            return first[:0]
        return torch.cat(others).sort().values

    def _is_pretraining(self, step: int) -> bool:
        return self.critic is not None and step < self.config.critic.pretrain_steps

    def _minibatches(self, num_rows: int, step: int, epoch: int) -> list[Tensor]:
        order = generator(self.config.seed, "shuffle", step, epoch)
        rows = minibatches(num_rows, self.config.batch.minibatches, order)
        return [part.to(self.policy.device) for part in rows]

    @torch.no_grad()
    def _score(self, batch: Batch, rows: Tensor) -> list[tuple[Tensor, TokenScores]]:
        """The policy's scores of these rows, piece by piece."""
        pieces = self._pieces(batch.select(rows)) if len(rows) else []
        return [(rows[p.rows], self.policy.score(p.batch, p.layout)) for p in pieces]

    def _with_prox(
        self, batch: ScoredStage, scores: Sequence[tuple[Tensor, TokenScores]]
    ) -> ScoredStage:
        """The batch with scores of some rows as their prox."""
        prox, entropy, has_prox = (
            x.clone() for x in (batch.logp_prox, batch.entropy, batch.has_prox)
        )
        for rows, found in scores:
            at = (rows, slice(found.logp.shape[1]))
            prox[at], entropy[at] = found
            has_prox[rows] = True
        ref = prox if self.reference is None else batch.logp_ref
        return batch.replace(logp_prox=prox, entropy=entropy, has_prox=has_prox, logp_ref=ref)

    def describe(self, trained: Trainable, sampled: Tensor) -> dict[str, float]:
        """Advantages; entropy, KL to the reference and mismatch of the rows with a prox.

        `sampled` is the mask before rejection.
        """
        advantages = trained.advantages[sampled.bool()]
        metrics: dict[str, float] = {}
        if len(advantages):
            low, high = advantages.aminmax()
            metrics = {"critic/advantages/max": float(high), "critic/advantages/min": float(low)}
        known = sampled * trained.has_prox[:, None]
        if not known.any():
            return metrics
        metrics["actor/entropy"] = float(aggregate(trained.entropy, known))
        if self.reference is not None:
            kl = kl_penalty(trained.logp_prox, trained.logp_ref, "k3")
            metrics["actor/ref_kl"] = float(aggregate(kl, known))
        correction = self.config.correction
        return metrics | correction_metrics(
            trained,
            sampled,
            cap=self.cap,
            batch_normalize=correction.batch_normalize,
            **correction.weighting,
        )

    def update(self, batch: Trainable, step: int) -> tuple[Trained, dict[str, float]]:
        """All optimizer updates of a step: epochs over mini-batches of micro-batches.

        Returns the batch as it was trained on, with the prox that the first update added.
        """
        self.version = None
        try:
            with deterministic_sums(self.config.model.deterministic), _within_memory(self.config):
                updated = self._update(batch, step)
            self.version = step + 1
            return updated
        except TrainingError as error:
            error.batch = batch
            raise
        finally:
            self.policy.free_copies_()  # the engine may need the memory

    def _update(self, batch: Trainable, step: int) -> tuple[Trained, dict[str, float]]:
        config, meter, num_skipped = self.config, Meter(), 0
        logp = batch.logp_prox.clone()
        lacks_prox = config.correction.mode != "bypass" and not bool(batch.has_prox.all())
        for epoch in range(config.batch.epochs):
            for rows in self._minibatches(len(batch), step, epoch):
                minibatch = batch.select(rows)
                pieces = [p for p in self._pieces(minibatch) if len(p.layout.scored)]
                if not pieces:  # every token was rejected
                    num_skipped += 1
                    continue
                if not self._is_pretraining(step):
                    denominator = count(minibatch.mask, config.algo.aggregation)
                    options = {"denominator": denominator, "is_prox": lacks_prox}
                    scores: list[tuple[Tensor, TokenScores]] = []
                    terms = partial(self._policy_terms, scores=scores, **options)
                    self._accumulate(pieces, terms, step, meter)
                    scores = [(rows[part], found) for part, found in scores]
                    for part, found in scores:
                        logp[part, : found.logp.shape[1]] = found.logp
                    if lacks_prox:  # before the weights move
                        batch, lacks_prox = self._complete(batch, rows, scores, meter), False
                    self._apply("actor", self.optimizer, step, meter)
                if self.critic_optimizer is not None:
                    num_tokens = sum(len(piece.layout.scored) for piece in pieces)
                    terms = partial(self._critic_terms, denominator=num_tokens)
                    self._accumulate(pieces, terms, step, meter)
                    self._apply("critic", self.critic_optimizer, step, meter)
        metrics = meter.summary() | {"actor/skipped_updates": float(num_skipped)}
        if self.critic is not None:
            variance = explained_variance(batch.values, batch.returns, batch.mask)
            metrics["critic/vf_explained_var"] = variance
        return batch.into(Trained, logp=logp), metrics

    def _complete(
        self,
        batch: Trainable,
        rows: Tensor,
        scores: Sequence[tuple[Tensor, TokenScores]],
        meter: Meter,
    ) -> Trainable:
        """The batch with the prox and the weights of `rows`, the first mini-batch.

        In auto mode behav stays the prox of the others if P(|gap| > log(1 + eh)) <= 1e-5 on the
        first mini-batch; else their prox forward is made now, with weights that have not moved.
        """
        batch = self._with_prox(batch, scores)
        if self.config.correction.mode == "auto":
            limit = math.log1p(self.config.algo.clip_high)
            tail = gap_tail(batch.select(rows), limit)
            is_skipped = tail <= LARGEST_TAIL
            meter.add({"correction/gap_tail": tail, "correction/prox_skipped": float(is_skipped)})
            if not is_skipped:
                others = (~batch.has_prox).nonzero().squeeze(-1)
                batch = self._with_prox(batch, self._score(batch, others))
        return self._weighed(batch)

    def _weighed(self, batch: Trainable) -> Trainable:
        weighting = self.config.correction.weighting
        weight, shrink = weigh(batch, cap=self.cap, **weighting)
        return batch.replace(weight=weight, shrink=shrink)

    def _pieces(self, batch: Stage) -> list[Piece[Stage]]:
        """All micro-batches of a batch, cut before the first forward."""
        cut = microbatches if self.policy.is_packed else padded_microbatches
        pieces = []
        for indices in cut(batch.lengths.tolist(), self.config.batch.microbatch_tokens):
            rows = torch.tensor(indices, device=batch.mask.device)
            part = batch.select(rows)
            pieces.append(Piece(rows, part, self.policy.layout(part)))
        return pieces

    def _accumulate(
        self,
        pieces: Sequence[Piece[Trainable]],
        terms: Callable[[Piece[Trainable]], tuple[Tensor, Stats]],
        step: int,
        meter: Meter,
    ) -> None:
        """Gradients of one mini-batch, piece by piece; all losses must be finite."""
        results = []
        for piece in pieces:
            loss, stats = terms(piece)
            loss.backward()
            results.append((loss.detach(), stats))
            meter.add(stats, weight=len(piece.layout.scored))
        _check_finite(results, step)

    def _apply(
        self, name: Literal["actor", "critic"], optimizer: Optimizer, step: int, meter: Meter
    ) -> None:
        """One update with the gradients so far."""
        config = self.config
        if name == "actor" and uaq_scale(self.policy.model) != 1.0:
            meter.add({"uaq/unscaled_grad_norm": unscaled_grad_norm(self.policy.model)})
        peak = config.optim.lr if name == "actor" else config.critic.lr
        lr = learning_rate(peak, step, config.steps, config.optim)
        norm = apply_gradients(optimizer, lr=lr, grad_clip=config.optim.grad_clip)
        if name == "actor":
            found = optimizer_metrics(optimizer)
            meter.finish_update({"actor/grad_norm": norm, "actor/lr": lr, **found})
        else:
            meter.finish_update({"critic/grad_norm": norm, "critic/lr": lr})

    def _policy_terms(
        self,
        piece: Piece[Trainable],
        denominator: float,
        is_prox: bool,
        scores: list[tuple[Tensor, TokenScores]],
    ) -> tuple[Tensor, Stats]:
        """Loss of one micro-batch: objective, plus KL to the reference, minus entropy.

        What the forward finds is added to `scores`. With `is_prox`, it is that of prox.
        """
        algo, batch, horizon = self.config.algo, piece.batch, self.config.sampling.max_tokens
        shape = {"aggregation": algo.aggregation, "horizon": float(horizon)}
        shape["denominator"] = denominator
        logp, entropy = self.policy.score(
            batch, piece.layout, needs_entropy_grad=algo.entropy_coef > 0
        )
        scores.append((piece.rows, TokenScores(logp.detach(), entropy.detach())))
        if is_prox:
            batch = self._weighed(batch.replace(logp_prox=logp.detach()))
        logps = (logp, batch.logp_prox, batch.logp_behav)
        loss, stats = policy_loss(
            *logps,
            batch.advantages,
            batch.mask,
            objective=self.objective,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            dual_clip=algo.dual_clip,
            acr_max_bound=self.config.experimental.acr_max_bound,
            symmetric=Symmetric(algo.symmetric, algo.symmetric_alpha, algo.symmetric_beta),
            weight=batch.weight,
            shrink=batch.shrink,
            **shape,
        )
        stats["actor/pg_loss_sum"] = loss.detach()
        if algo.kl_coef > 0 and not algo.kl_in_reward:
            limit = K3_LIMIT if algo.kl_estimator == "k3" else None
            kl = kl_penalty(logp, batch.logp_ref, algo.kl_estimator, limit=limit)
            if self.config.experimental.weighted_kl:
                kl = kl * batch.weight
            kl_loss = aggregate(kl, batch.mask, **shape)
            loss = loss + algo.kl_coef * kl_loss
            stats["actor/kl_loss_sum"] = kl_loss.detach()
        if algo.entropy_coef > 0:
            loss = loss - algo.entropy_coef * aggregate(entropy, batch.mask, **shape)
        return loss, stats

    def _critic_terms(self, piece: Piece[Trainable], denominator: float) -> tuple[Tensor, Stats]:
        batch = piece.batch
        assert self.critic is not None
        values = self.critic(batch, piece.layout)
        shape = {"clip": self.config.critic.clip, "denominator": denominator}
        loss, stats = value_loss(
            values, batch.returns, batch.mask, old_values=batch.values, **shape
        )
        stats["critic/vf_loss_sum"] = loss.detach()
        return loss, stats


@contextmanager
def deterministic_sums(is_wanted: bool) -> Iterator[None]:
    """torch's deterministic mode while gradients are computed; it would slow down an engine."""
    settings: Any = torch.utils.deterministic
    mode, is_filling = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    if is_wanted:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # nothing is read that was not written
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = is_filling


@contextmanager
def _within_memory(config: Config) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the trainer ran out of GPU memory ({str(error).split('.')[0]}); lower "
            f"batch.microbatch_tokens = {config.batch.microbatch_tokens} or "
            f"rollout.kv_memory_frac = {config.rollout.kv_memory_frac:g}, or set "
            "rollout.release_kv or, in another run_dir, model.gradient_checkpointing"
        ) from error


def _check_finite(results: Sequence[tuple[Tensor, Stats]], step: int) -> None:
    if torch.stack([loss for loss, _ in results]).isfinite().all():
        return
    broken, stats = next((loss, stats) for loss, stats in results if not loss.isfinite())
    listed = ", ".join(f"{name} = {float(value):.4g}" for name, value in stats.items())
    raise TrainingError(
        f"the loss of step {step} is {broken.item()} ({listed}). No update was made with it; "
        "the batch and the weights are in the crash folder. A lower optim.lr may help"
    )
