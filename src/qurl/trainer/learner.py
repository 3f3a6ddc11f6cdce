"""The trainer's side of a step: recompute what the objective needs, then update.

The first update of a step needs no prox forward. The weights have not moved yet, so its training
forward is that of prox, and there is no dropout: pi_prox = the detached pi_theta. `recompute`
leaves these rows out and `update` fills them in, unless something reads prox before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qurl.advantages import Estimator, compare, length_lambda
from qurl.config import Config
from qurl.config.rules import prox_readers
from qurl.correction import LARGEST_TAIL, correct, correction_metrics, gap_tail, weigh
from qurl.errors import ConfigError, QurlError, TrainingError
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
from qurl.ops.pooling import summarize
from qurl.quant.kv import set_kv_scales_
from qurl.quant.scaling import learning_rate_scales, uaq_scale, unscaled_grad_norm
from qurl.quant.shipment import checksums
from qurl.quant.tracking import UpdateTracker
from qurl.seeds import generator
from qurl.trainer.batches import (
    Share,
    microbatches,
    minibatches,
    pad_rows,
    padded_microbatches,
    rows_of,
)
from qurl.trainer.critic import Critic
from qurl.trainer.masters import narrow_masters_
from qurl.trainer.meter import Meter
from qurl.trainer.optimizer import (
    add_up_gradients_,
    apply_gradients,
    build_optimizer,
    learning_rate,
    optimizer_metrics,
)
from qurl.trainer.packing import BatchLayout
from qurl.trainer.policy import Policy, TokenScores, Untrained
from qurl.trainer.ranks import ALONE, Ranks
from qurl.trainer.saving import load_for, load_optimizers, save_optimizers, share_of
from qurl.types import (
    SHORTEST,
    Batch,
    Corrected,
    Graded,
    KVScales,
    Scored,
    Stage,
    Trainable,
    Trained,
)

ScoredStage = TypeVar("ScoredStage", bound=Scored)
CRITIC = "critic.pt"
K3_LIMIT = 10.0
"""Largest k3 of one token in the loss, as in verl: it grows exponentially, the others do not."""


class Piece(NamedTuple, Generic[Stage]):
    """A micro-batch: what one forward and backward sees."""

    rows: Tensor  # [b] of the batch that it is a piece of
    batch: Stage
    layout: BatchLayout


class Found(NamedTuple):
    """What forwards found of some rows of a batch; 0 in the other rows."""

    is_scored: Tensor  # [B] bool
    scores: TokenScores


class Learner:
    """The full-precision models and their optimizers.

    A GPU runs behind the host, which waits for it only between mini-batches: to cut the next one
    into pieces, and to see that losses and gradients are finite before they touch the weights.

    One of several ranks has a batch of its own rows, and a `Share` says which rows of the step they
    are. What counts all rows is summed over the ranks.
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
        self.policy, self.reference, self.device = policy, reference, policy.device
        self.version: int | None = 0
        """Changes with the weights; None if they are between two steps, in or after a failure."""
        self.critic = Critic(policy) if advantage.needs_critic else None
        self.ranks = ALONE
        self.is_replica = False
        """Whether other ranks have the same weights, and not shards of these."""
        self.build_optimizers_()

    def build_optimizers_(self) -> None:
        """Fresh optimizers of the parameters that the models have now."""
        model, config = self.policy.model, self.config
        scale = config.experimental.norm_fed_lr_scale
        scales = {} if scale == 1 else learning_rate_scales(model, scale)
        optimizer = build_optimizer(model, config.optim, lr=config.peak_lr, scales=scales)
        self.optimizers = {"policy": (model, optimizer)}
        if self.critic is not None:
            optimizer = build_optimizer(self.critic, config.optim, lr=config.critic.lr)
            self.optimizers["critic"] = self.critic, optimizer

    def narrow_masters_(self) -> None:
        """Keep masters as `optim.masters` says, before the first update and before any engine."""
        if self.config.optim.masters == "fp32":
            return
        if self.policy.compute_dtype != torch.bfloat16:
            raise ConfigError(
                f'optim.masters = "bf16", but the trainer computes in {self.policy.compute_dtype} '
                'and would see rounded weights; set model.compute_dtype = "bfloat16"'
            )
        for model, optimizer in self.optimizers.values():
            narrow_masters_(model, optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The policy's."""
        return self.optimizers["policy"][1]

    @property
    def _holders(self) -> Ranks:
        """Those that share the weights and moments among them."""
        return ALONE if self.is_replica else self.ranks

    def source(self, engine: Any) -> nn.Module:
        """The policy's weights as they are now, for this engine to copy."""
        return self.policy.model

    def whole_model(self) -> nn.Module:
        return self.policy.model

    def watch(self, tracker: UpdateTracker) -> UpdateTracker:
        """A tracker of this learner's weights."""
        return tracker

    def save(self, folder: Path) -> None:
        """Write weights and optimizer states."""
        self.policy.save(folder / "policy")
        if self.critic is not None:
            torch.save(self.critic.state_dict(), folder / CRITIC)
        save_optimizers(folder, self.optimizers, self._holders)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read all that `save` wrote but the policy, which is loaded before."""
        if self.critic is not None:
            weights = load_for(folder / CRITIC, self.policy.device, self._holders)
            own = self.critic.state_dict()
            shares = {name: share_of(x, own[name]) for name, x in weights.items() if name in own}
            self.critic.load_state_dict(weights | shares)
        load_optimizers(folder, self.optimizers, self._holders)

    @property
    def cap(self) -> float | None:
        """C as the objective applies it."""
        return facts_of(self.objective).cap(self.config.algo.cap)

    def check_alike(self, *, is_trained: bool) -> None:
        """Raise unless replicas have the same bits in all weights, or in those that are trained."""
        weights = {
            f"{role} {name}": weight
            for role, (model, _) in self.optimizers.items()
            for name, weight in model.named_parameters()
            if weight.requires_grad or not is_trained
        }
        sums = self.ranks.pool(checksums(weights))
        differing = [name for name in weights if any(x[name] != sums[0][name] for x in sums)]
        if differing:
            raise TrainingError(
                f"parallel.shard = false, and the trainers have different weights: {differing[0]}, "
                f"and {len(differing) - 1} others of {len(weights)}. Use GPUs of one kind, and the "
                "same model, torch and QuRL everywhere"
            )

    def round_kv_(self, scales: KVScales) -> None:
        """Unified policies see keys and values as an engine's cache with these scales does."""
        for policy in (self.policy, self.reference):
            if isinstance(policy, Policy):  # an `Untrained` one is the policy itself
                set_kv_scales_(policy.model, scales)

    def deal(self, graded: Sequence[Graded], rows: Tensor, bundle: int, step: int) -> Batch:
        """The given completions of a step; so many that follow each other stay together."""
        sampled = rows_of(graded)
        batch = pad_rows([sampled[row] for row in rows.tolist()])
        return batch.replace(bundle=bundle).to(self.policy.device)

    def fetch(self, batch: Stage, rows: Tensor) -> Stage:
        """Some rows of a batch, in the driver's process."""
        return batch.select(rows.to(batch.mask.device))

    def whole(self, batch: Stage) -> Stage:
        """All rows of a batch, in the driver's process."""
        return batch

    @torch.no_grad()
    def recompute(self, batch: Batch, step: int, share: Share | None = None) -> Scored:
        """The batch with logp_ref, values, and the prox of all rows that need a forward for it."""
        ref, values, entropy = (torch.zeros_like(batch.mask) for _ in range(3))
        with _within_memory(self.config):
            found = self.score(batch, self._rows_to_score(batch, step, share))
            has_others = self.reference is not None or self.critic is not None
            for rows, part, layout in self.pieces(batch) if has_others else ():
                at = (rows, slice(part.mask.shape[1]))
                if self.reference is not None:
                    is_alike = self.reference.is_packed == self.policy.is_packed
                    ref[at] = self.reference.score(part, layout if is_alike else None).logp
                if self.critic is not None:
                    values[at] = self.critic(layout)
        prox, has_prox = batch.logp_behav, torch.zeros_like(batch.lengths, dtype=torch.bool)
        added = {"logp_prox": prox, "logp_ref": ref, "values": values, "entropy": entropy}
        return self.with_prox(batch.into(Scored, **added, has_prox=has_prox), found)

    def correct(self, scored: Scored) -> Corrected:
        options = vars(self.config.correction)
        return correct(scored, cap=self.cap, pool=self.ranks.pool, **options)

    def compare(self, corrected: Corrected, advantage: Estimator) -> Trainable:
        return compare(
            corrected,
            advantage,
            is_whitened=self.config.algo.whiten,
            pool=self.ranks.pool,
            agreeing=self.ranks.agreeing(QurlError),
        )

    def _rows_to_score(self, batch: Batch, step: int, share: Share | None) -> Tensor:
        """The rows whose prox is computed before the update.

        decoupled   all but those of the first mini-batch
        auto        none yet: see `_complete`
        bypass      none

        Except in bypass, all rows are scored if something reads prox before the update, and in
        steps that train the critic only.
        """
        mode = self.config.correction.mode
        first, *others = self._minibatches(batch, step, 0, share)
        is_read = self._is_pretraining(step) or prox_readers(self.config, self.advantage)
        if mode != "bypass" and is_read:
            return torch.arange(len(batch), device=first.device)
        if mode != "decoupled" or not others:
            return first[:0]
        return torch.cat(others).sort().values

    def _is_pretraining(self, step: int) -> bool:
        return self.critic is not None and step < self.config.critic.pretrain_steps

    def _minibatches(
        self, batch: Batch, step: int, epoch: int, share: Share | None
    ) -> list[Tensor]:
        """The rows of each mini-batch that this rank has."""
        num_rows = len(batch) if share is None else share.num_rows
        parts = step_minibatches(self.config, num_rows, batch.bundle, step, epoch)
        own = parts if share is None else [share.of(part) for part in parts]
        return [part.to(self.policy.device) for part in own]

    @torch.no_grad()
    def score(self, batch: Batch, rows: Tensor) -> Found:
        """The policy's scores of these rows, computed piece by piece."""
        is_any = self.ranks.most(len(rows))
        pieces = self.pieces(batch.select(rows)) if is_any else []
        return self._collect(
            batch, [(rows[p.rows], self.policy.score(p.batch, p.layout)) for p in pieces]
        )

    def _collect(self, batch: Batch, scores: Sequence[tuple[Tensor, TokenScores]]) -> Found:
        """Scores of pieces at their places in the batch."""
        is_scored = torch.zeros_like(batch.lengths)
        logp, entropy = torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)
        for rows, found in scores:
            at = (rows, slice(found.logp.shape[1]))
            logp[at], entropy[at] = found
            is_scored[rows] = 1
        return Found(is_scored.bool(), TokenScores(logp, entropy))

    def with_prox(self, batch: ScoredStage, found: Found) -> ScoredStage:
        """The batch with what was found as the prox of its rows."""
        is_new = found.is_scored[:, None]
        prox = torch.where(is_new, found.scores.logp, batch.logp_prox)
        entropy = torch.where(is_new, found.scores.entropy, batch.entropy)
        has_prox = batch.has_prox | found.is_scored
        ref = prox if self.reference is None else batch.logp_ref
        return batch.replace(logp_prox=prox, entropy=entropy, has_prox=has_prox, logp_ref=ref)

    def describe(self, trained: Trainable, batch: Batch) -> dict[str, float]:
        """Advantages; entropy, KL to the reference and mismatch of the rows with a prox.

        `batch` is the one that was sampled, before tokens were rejected.
        """
        pool, sampled = self.ranks.pool, batch.mask.bool()
        known = sampled & trained.has_prox[:, None]
        columns = {
            "critic/advantages/max": trained.advantages[sampled],
            "critic/advantages/min": trained.advantages[sampled],
            "actor/entropy": trained.entropy[known],
        }
        if self.reference is not None:
            kl = kl_penalty(trained.logp_prox, trained.logp_ref, "k3")
            columns["actor/ref_kl"] = kl[known]
        if alpha := self.config.algo.lam_alpha:
            lengths = trained.mask.sum(-1)
            columns["critic/lam_policy"] = length_lambda(lengths[lengths > 0], alpha)
        correction = self.config.correction
        return summarize(columns, pool) | correction_metrics(
            trained,
            batch.mask,
            cap=self.cap,
            batch_normalize=correction.batch_normalize,
            pool=pool,
            **correction.weighting,
        )

    def update(
        self, batch: Trainable, step: int, share: Share | None = None
    ) -> tuple[Trained, dict[str, float]]:
        """All optimizer updates of a step: epochs over mini-batches of micro-batches.

        Returns the batch as it was trained on, with the prox that the first update added.
        """
        self.version = None
        try:
            with deterministic_sums(self.config.model.deterministic), _within_memory(self.config):
                updated = self._update(batch, step, share)
            self.version = step + 1
            return updated
        except TrainingError as error:
            error.batch = batch
            raise
        finally:
            self.policy.free_copies_()  # the engine may need the memory

    def _update(
        self, batch: Trainable, step: int, share: Share | None
    ) -> tuple[Trained, dict[str, float]]:
        config, meter, num_skipped = self.config, Meter(self.ranks), 0
        logp, lacks_prox = batch.logp_prox, bool(self.ranks.most(int(not batch.has_prox.all())))
        lacks_prox = lacks_prox and config.correction.mode != "bypass"
        for epoch in range(config.batch.epochs):
            for rows in self._minibatches(batch, step, epoch, share):
                minibatch = batch.select(rows)
                pieces = self.pieces(minibatch, is_scored=True)
                if not pieces:  # every token was rejected
                    num_skipped += 1
                    continue
                if not self._is_pretraining(step):
                    options = self._denominators(minibatch) | {"is_prox": lacks_prox}
                    scores: list[tuple[Tensor, TokenScores]] = []
                    terms = partial(self._policy_terms, scores=scores, **options)
                    self._accumulate(pieces, terms, step, meter)
                    found = self._collect(batch, [(rows[part], x) for part, x in scores])
                    logp = torch.where(found.is_scored[:, None], found.scores.logp, logp)
                    if lacks_prox:  # before the weights move
                        batch, lacks_prox = self._complete(batch, rows, found, meter), False
                    self._apply("actor", self.optimizer, step, meter)
                if self.critic is not None:
                    num_tokens = sum(len(piece.layout.scored) for piece in pieces)
                    terms = partial(self._critic_terms, denominator=self.ranks.total(num_tokens))
                    self._accumulate(pieces, terms, step, meter)
                    self._apply("critic", self.optimizers["critic"][1], step, meter)
        if self.is_replica:
            with self.ranks.agreeing(TrainingError):
                self.check_alike(is_trained=True)
        metrics = meter.summary() | {"actor/skipped_updates": float(num_skipped)}
        if self.critic is not None:
            known = (batch.values, batch.returns, batch.mask)
            metrics["critic/vf_explained_var"] = explained_variance(*known, self.ranks.pool)
        return batch.into(Trained, logp=logp), metrics

    def _denominators(self, minibatch: Trainable) -> dict[str, float]:
        """What the losses of a mini-batch are divided by, on all ranks."""
        algo, total = self.config.algo, self.ranks.total
        num_right = int(right_tokens(minibatch).sum()) if algo.positive_coef else 0
        denominator = total(int(count(minibatch.mask, algo.aggregation)))
        return {"denominator": float(denominator), "num_right": float(total(num_right))}

    def _complete(self, batch: Trainable, rows: Tensor, found: Found, meter: Meter) -> Trainable:
        """The batch with the prox and the weights of `rows`, the first mini-batch.

        In auto mode behav stays the prox of the others if P(|gap| > log(1 + eh)) is at most
        LARGEST_TAIL on the first mini-batch; else their prox forward is made now, with weights
        that have not moved.
        """
        batch = self.with_prox(batch, found)
        if self.config.correction.mode == "auto":
            limit = math.log1p(self.config.algo.clip_high)
            tail = gap_tail(batch.select(rows), limit, self.ranks.pool)
            is_skipped = tail <= LARGEST_TAIL
            meter.add({"correction/gap_tail": tail, "correction/prox_skipped": float(is_skipped)})
            if not is_skipped:
                others = (~batch.has_prox).nonzero().squeeze(-1)
                batch = self.with_prox(batch, self.score(batch, others))
        return self._weighed(batch)

    def _weighed(self, batch: Trainable) -> Trainable:
        weighting = self.config.correction.weighting
        weight, shrink = weigh(batch, cap=self.cap, **weighting)
        return batch.replace(weight=weight, shrink=shrink)

    def pieces(self, batch: Stage, *, is_scored: bool = False) -> list[Piece[Stage]]:
        """Micro-batches, cut before the first forward; every rank has as many.

        With `is_scored`, those without a token to score are left out.
        """
        cut = microbatches if self.policy.is_packed else padded_microbatches
        pieces = []
        for part in cut(batch.lengths.tolist(), self.config.batch.microbatch_tokens):
            rows = torch.tensor(part, device=batch.mask.device)
            pieces.append(self._piece(batch.select(rows), rows))
        pieces = [p for p in pieces if len(p.layout.scored) or not is_scored]
        num_missing = self.ranks.most(len(pieces)) - len(pieces)
        return pieces + [self._idle_piece(batch) for _ in range(num_missing)]

    def _piece(self, batch: Stage, rows: Tensor) -> Piece[Stage]:
        return Piece(rows, batch, self.policy.layout(batch))

    def _idle_piece(self, batch: Stage) -> Piece[Stage]:
        """No row, and two tokens that are not scored, for a forward that other ranks need."""
        idle = batch.map(lambda x: x.new_zeros((1, SHORTEST) if x.dim() == 2 else 1))
        idle = idle.replace(lengths=idle.lengths + SHORTEST, problem_ids=[""])
        return self._piece(idle, idle.group[:0])

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
        with self.ranks.agreeing(TrainingError):
            _check_finite(results, step)

    def _apply(
        self, name: Literal["actor", "critic"], optimizer: Optimizer, step: int, meter: Meter
    ) -> None:
        """One update with the gradients so far."""
        config = self.config
        if self.is_replica:
            add_up_gradients_(optimizer, self.ranks)
        if name == "actor" and uaq_scale(self.policy.model) != 1.0:
            meter.add({"uaq/unscaled_grad_norm": unscaled_grad_norm(self.policy.model)})
        peak = config.peak_lr if name == "actor" else config.critic.lr
        lr = learning_rate(peak, step, config.steps, config.optim)
        with self.ranks.agreeing(TrainingError):
            norm = apply_gradients(optimizer, lr=lr, grad_clip=config.optim.grad_clip)
        found = optimizer_metrics(optimizer) if name == "actor" else {}
        meter.finish_update({f"{name}/grad_norm": norm, f"{name}/lr": lr, **found})

    def _policy_terms(
        self,
        piece: Piece[Trainable],
        denominator: float,
        is_prox: bool,
        scores: list[tuple[Tensor, TokenScores]],
        num_right: float = 0.0,
    ) -> tuple[Tensor, Stats]:
        """Loss of one micro-batch: objective, plus KL to the reference, minus entropy, plus the
        negative log-likelihood of the `num_right` tokens of right answers in the mini-batch.

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
            **clip_options(self.config),
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
        if num_right:
            likelihood = aggregate(-logp, right_tokens(batch), denominator=num_right)
            loss = loss + algo.positive_coef * likelihood
            stats["actor/positive_nll_sum"] = likelihood.detach()
        return loss, stats

    def _critic_terms(self, piece: Piece[Trainable], denominator: float) -> tuple[Tensor, Stats]:
        batch = piece.batch
        assert self.critic is not None
        values = self.critic(piece.layout)
        shape = {"clip": self.config.critic.clip, "denominator": denominator}
        loss, stats = value_loss(
            values, batch.returns, batch.mask, old_values=batch.values, **shape
        )
        stats["critic/vf_loss_sum"] = loss.detach()
        return loss, stats


def step_minibatches(
    config: Config, num_rows: int, bundle: int, step: int, epoch: int = 0
) -> list[Tensor]:
    """The rows of each mini-batch of a step, on all ranks."""
    order = generator(config.seed, "shuffle", step, epoch)
    return minibatches(num_rows, config.batch.minibatches, order, bundle)


def clip_options(config: Config) -> dict[str, Any]:
    """Arguments of `policy_loss` that bound the ratio, as the recipe has them."""
    algo = config.algo
    return {
        "clip_low": algo.clip_low,
        "clip_high": algo.clip_high,
        "dual_clip": algo.dual_clip,
        "acr_max_bound": config.experimental.acr_max_bound,
        "symmetric": Symmetric(algo.symmetric, algo.symmetric_alpha, algo.symmetric_beta),
    }


def right_tokens(batch: Batch) -> Tensor:
    """[B, T]: the mask, without the sequences whose answer is wrong."""
    return batch.mask * (batch.accuracies >= 1)[:, None]


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
