"""The trainer's side of a step: recompute what the objective needs, then update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from qurl.config import Config
from qurl.errors import TrainingError
from qurl.losses import (
    Stats,
    Surrogate,
    aggregate,
    count,
    explained_variance,
    kl_penalty,
    policy_loss,
    value_loss,
)
from qurl.quant.scaling import learning_rate_scales, uaq_scale, unscaled_grad_norm
from qurl.seeds import generator
from qurl.trainer.batches import microbatches, padded_microbatches
from qurl.trainer.critic import Critic
from qurl.trainer.meter import Meter
from qurl.trainer.optimizer import apply_gradients, build_optimizer, learning_rate
from qurl.trainer.packing import BatchLayout
from qurl.trainer.policy import Policy
from qurl.types import Batch, Scored, Stage, Trainable

K3_LIMIT = 10.0
"""Largest k3 of one token in the loss, as in verl: it grows exponentially, the others do not."""


@dataclass(frozen=True)
class Piece(Generic[Stage]):
    """A micro-batch: what one forward and backward sees."""

    rows: Tensor  # [b] of the batch that it is a piece of
    batch: Stage
    layout: BatchLayout

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return self.layout.num_scored


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
        reference: Policy | None = None,
        objective: Surrogate,
        has_critic: bool,
    ) -> None:
        self.config = config
        self.objective = objective
        self.policy = policy
        self.reference = reference
        self.optimizer = build_optimizer(
            policy.model, config.optim, lr=config.optim.lr, scales=_scales(policy, config)
        )
        self.critic: Critic | None = None
        self.critic_optimizer = None
        if has_critic:
            self.critic = Critic(policy)
            self.critic_optimizer = build_optimizer(self.critic, config.optim, lr=config.critic.lr)

    @torch.no_grad()
    def recompute(self, batch: Batch) -> tuple[Scored, dict[str, float]]:
        """The batch with logp_prox, logp_ref and values, and the metrics of these forwards.

        logp_prox comes from the trainer's own weights, never from the engine. In bypass mode it is
        logp_behav, which saves that forward.
        """
        is_bypassed = self.config.correction.mode == "bypass"
        prox, entropy, ref, values = (torch.zeros_like(batch.mask) for _ in range(4))
        with _within_memory(self.config):
            for piece in self._pieces(batch):
                rows, width = piece.rows, piece.batch.mask.shape[1]
                if not is_bypassed:
                    scores = self.policy.score(piece.batch, piece.layout)
                    prox[rows, :width], entropy[rows, :width] = scores.logp, scores.entropy
                if self.reference is not None:
                    is_alike = self.reference.is_packed == self.policy.is_packed
                    layout = piece.layout if is_alike else None
                    ref[rows, :width] = self.reference.score(piece.batch, layout).logp
                if self.critic is not None:
                    values[rows, :width] = self.critic(piece.batch, piece.layout)
        prox = batch.logp_behav if is_bypassed else prox
        ref = prox if self.reference is None else ref
        scored = batch.into(Scored, logp_prox=prox, logp_ref=ref, values=values)
        metrics = {}
        if not is_bypassed:
            metrics["actor/entropy"] = float(aggregate(entropy, batch.mask))
        if self.reference is not None and not is_bypassed:
            metrics["actor/ref_kl"] = float(aggregate(kl_penalty(prox, ref, "k3"), batch.mask))
        return scored, metrics

    def update(self, batch: Trainable, step: int) -> dict[str, float]:
        """All optimizer updates of a step: epochs over mini-batches of micro-batches."""
        try:
            with deterministic_sums(self.config.model.deterministic), _within_memory(self.config):
                return self._update(batch, step)
        except TrainingError as error:
            error.batch = batch
            raise

    def _update(self, batch: Trainable, step: int) -> dict[str, float]:
        config, meter = self.config, Meter()
        is_pretraining = self.critic is not None and step < config.critic.pretrain_steps
        num_skipped = 0
        for epoch in range(config.batch.epochs):
            shuffled = batch.shuffle(generator(config.seed, "shuffle", step, epoch))
            for minibatch in shuffled.split(config.batch.minibatches):
                pieces = [piece for piece in self._pieces(minibatch) if piece.num_tokens]
                if not pieces:  # every token was rejected
                    num_skipped += 1
                    continue
                if not is_pretraining:
                    self._update_policy(minibatch, pieces, step, meter)
                if self.critic is not None:
                    self._update_critic(pieces, step, meter)
        metrics = meter.summary() | {"actor/skipped_updates": float(num_skipped)}
        if self.critic is not None:
            variance = explained_variance(batch.values, batch.returns, batch.mask)
            metrics["critic/vf_explained_var"] = variance
        return metrics

    def _pieces(self, batch: Stage) -> list[Piece[Stage]]:
        """All micro-batches of a batch, cut before the first forward."""
        cut = microbatches if self.policy.is_packed else padded_microbatches
        pieces = []
        for indices in cut(batch.lengths.tolist(), self.config.batch.microbatch_tokens):
            rows = torch.tensor(indices, device=batch.mask.device)
            part = batch.select(rows)
            pieces.append(Piece(rows, part, self.policy.layout(part)))
        return pieces

    def _update_policy(
        self, minibatch: Trainable, pieces: Sequence[Piece[Trainable]], step: int, meter: Meter
    ) -> None:
        config = self.config
        denominator = count(minibatch.mask, config.algo.aggregation)
        _backward(pieces, lambda piece: self._policy_terms(piece, denominator), step, meter)
        if uaq_scale(self.policy.model) != 1.0:
            meter.add({"uaq/unscaled_grad_norm": unscaled_grad_norm(self.policy.model)})
        lr = learning_rate(config.optim.lr, step, config.steps, config.optim)
        norm = apply_gradients(self.optimizer, lr=lr, grad_clip=config.optim.grad_clip)
        meter.finish_update({"actor/grad_norm": norm, "actor/lr": lr})

    def _policy_terms(self, piece: Piece[Trainable], denominator: float) -> tuple[Tensor, Stats]:
        """Loss of one micro-batch: objective, plus KL to the reference, minus entropy."""
        algo, batch = self.config.algo, piece.batch
        shape = {
            "aggregation": algo.aggregation,
            "horizon": float(self.config.sampling.max_tokens),
            "denominator": denominator,
        }
        scores = self.policy.score(batch, piece.layout, needs_entropy_grad=algo.entropy_coef > 0)
        loss, stats = policy_loss(
            scores.logp,
            batch.logp_prox,
            batch.logp_behav,
            batch.advantages,
            batch.mask,
            objective=self.objective,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            cap=algo.cap,
            dual_clip=algo.dual_clip,
            acr_max_bound=self.config.experimental.acr_max_bound,
            weight=batch.weight,
            shrink=batch.shrink,
            **shape,
        )
        stats["actor/pg_loss_sum"] = loss.detach()
        if algo.kl_coef > 0 and not algo.kl_in_reward:
            limit = K3_LIMIT if algo.kl_estimator == "k3" else None
            kl = kl_penalty(scores.logp, batch.logp_ref, algo.kl_estimator, limit=limit)
            if self.config.experimental.weighted_kl:
                kl = kl * batch.weight
            kl_loss = aggregate(kl, batch.mask, **shape)
            loss = loss + algo.kl_coef * kl_loss
            stats["actor/kl_loss_sum"] = kl_loss.detach()
        if algo.entropy_coef > 0:
            loss = loss - algo.entropy_coef * aggregate(scores.entropy, batch.mask, **shape)
        return loss, stats

    def _update_critic(self, pieces: Sequence[Piece[Trainable]], step: int, meter: Meter) -> None:
        config = self.config
        assert self.critic_optimizer is not None
        num_tokens = sum(piece.num_tokens for piece in pieces)
        _backward(pieces, lambda piece: self._critic_terms(piece, num_tokens), step, meter)
        lr = learning_rate(config.critic.lr, step, config.steps, config.optim)
        norm = apply_gradients(self.critic_optimizer, lr=lr, grad_clip=config.optim.grad_clip)
        meter.finish_update({"critic/grad_norm": norm, "critic/lr": lr})

    def _critic_terms(self, piece: Piece[Trainable], denominator: float) -> tuple[Tensor, Stats]:
        batch = piece.batch
        assert self.critic is not None
        loss, stats = value_loss(
            self.critic(batch, piece.layout),
            batch.returns,
            batch.mask,
            old_values=batch.values,
            clip=self.config.critic.clip,
            denominator=denominator,
        )
        stats["critic/vf_loss_sum"] = loss.detach()
        return loss, stats


@contextmanager
def deterministic_sums(is_wanted: bool) -> Iterator[None]:
    """torch's deterministic mode, for as long as gradients are computed.

    Not for the whole process: it also slows down or refuses what engines do, which is exact.
    """
    if not is_wanted:
        yield
        return
    settings: Any = torch.utils.deterministic
    mode, is_filling = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
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


def _scales(policy: Policy, config: Config) -> dict[torch.nn.Parameter, float] | None:
    scale = config.experimental.norm_fed_lr_scale
    return None if scale == 1 else learning_rate_scales(policy.model, scale)


def _backward(
    pieces: Sequence[Piece[Trainable]],
    terms: Callable[[Piece[Trainable]], tuple[Tensor, Stats]],
    step: int,
    meter: Meter,
) -> None:
    """The gradients of an update, piece by piece; once, at the end, losses must be finite."""
    losses = []
    for piece in pieces:
        loss, stats = terms(piece)
        loss.backward()
        losses.append((loss.detach(), stats))
        meter.add(stats, weight=piece.num_tokens)
    _check_finite(losses, step)


def _check_finite(losses: Sequence[tuple[Tensor, Mapping[str, Tensor]]], step: int) -> None:
    if torch.stack([loss for loss, _ in losses]).isfinite().all():
        return
    broken, stats = next((loss, stats) for loss, stats in losses if not loss.isfinite())
    listed = ", ".join(f"{name} = {float(value):.4g}" for name, value in stats.items())
    raise TrainingError(
        f"the loss of step {step} is {broken.item()} ({listed}). No update was made with it; "
        "the batch and the weights are in the crash folder. A lower optim.lr may help"
    )
