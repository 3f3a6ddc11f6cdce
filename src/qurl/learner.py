"""The trainer's side of a step: recompute what the objective needs, then update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from qurl.batch import microbatches
from qurl.config import Config
from qurl.critic import Critic
from qurl.errors import TrainingError
from qurl.losses import aggregate, count, explained_variance, kl_penalty, policy_loss, value_loss
from qurl.optim import apply_gradients, build_optimizer, learning_rate
from qurl.policy import Policy
from qurl.quant.scaling import uaq_scale, unscaled_grad_norm
from qurl.seeds import generator
from qurl.types import Batch

KL_LIMIT = 10.0
"""Largest KL of one token in the loss, as in verl."""


class Learner:
    """The full-precision models and their optimizers."""

    def __init__(self, policy: Policy, config: Config, *, reference: Policy | None) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.optimizer = build_optimizer(policy.model, config.optim, lr=config.optim.lr)
        self.critic: Critic | None = None
        self.critic_optimizer = None
        if config.algo.advantage == "gae":
            self.critic = Critic(policy)
            self.critic_optimizer = build_optimizer(self.critic, config.optim, lr=config.critic.lr)

    @torch.no_grad()
    def recompute(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with logp_prox, and logp_ref and values where the algorithm wants them.

        logp_prox comes from the trainer's own weights, never from the engine. In bypass mode it is
        logp_behav and this forward is saved.
        """
        is_bypassed = self.config.correction.mode == "bypass"
        prox, entropy, ref, values = (torch.zeros_like(batch.mask) for _ in range(4))
        for rows in microbatches(batch.lengths, self.config.batch.microbatch_tokens):
            piece = batch.select(rows)
            width = piece.mask.shape[1]
            if not is_bypassed:
                scores = self.policy.score(piece)
                prox[rows, :width], entropy[rows, :width] = scores.logp, scores.entropy
            if self.reference is not None:
                ref[rows, :width] = self.reference.score(piece).logp
            if self.critic is not None:
                values[rows, :width] = self.critic(piece)
        batch = batch.replace(
            logp_prox=batch.logp_behav if is_bypassed else prox,
            logp_ref=ref if self.reference is not None else None,
            values=values if self.critic is not None else None,
        )
        metrics = {}
        if not is_bypassed:
            metrics["actor/entropy"] = float(aggregate(entropy, batch.mask))
        if self.reference is not None and not is_bypassed:
            metrics["actor/ref_kl"] = float(aggregate(kl_penalty(prox, ref, "k3"), batch.mask))
        return batch, metrics

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimizer updates of a step: epochs over mini-batches of micro-batches."""
        try:
            return self._update(batch, step)
        except TrainingError as error:
            error.batch = batch
            raise

    def _update(self, batch: Batch, step: int) -> dict[str, float]:
        config, meter = self.config, Meter()
        is_pretraining = self.critic is not None and step < config.critic.pretrain_steps
        num_skipped = 0
        for epoch in range(config.batch.epochs):
            shuffled = batch.shuffle(generator(config.seed, "shuffle", step, epoch))
            for minibatch in shuffled.split(config.batch.minibatches):
                if minibatch.num_tokens == 0:  # every token was rejected
                    num_skipped += 1
                    continue
                if not is_pretraining:
                    self._update_policy(minibatch, step, meter)
                if self.critic is not None:
                    self._update_critic(minibatch, step, meter)
        metrics = meter.summary() | {"actor/skipped_updates": float(num_skipped)}
        if batch.values is not None and batch.returns is not None:
            variance = explained_variance(batch.values, batch.returns, batch.mask)
            metrics["critic/vf_explained_var"] = variance
        return metrics

    def _update_policy(self, minibatch: Batch, step: int, meter: Meter) -> None:
        config = self.config
        for rows in microbatches(minibatch.lengths, config.batch.microbatch_tokens):
            piece = minibatch.select(rows)
            if piece.num_tokens == 0:
                continue
            loss, stats = self._policy_terms(piece, count(minibatch.mask, config.algo.aggregation))
            _check_finite(loss, stats, step)
            loss.backward()
            meter.add(stats, weight=piece.num_tokens)
        if uaq_scale(self.policy.model) != 1.0:
            meter.add({"uaq/unscaled_grad_norm": unscaled_grad_norm(self.policy.model)})
        lr = learning_rate(config.optim.lr, step, config.steps, config.optim)
        norm = apply_gradients(self.optimizer, lr=lr, grad_clip=config.optim.grad_clip)
        meter.finish_update({"actor/grad_norm": norm, "actor/lr": lr})

    def _policy_terms(self, piece: Batch, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one micro-batch: objective, plus KL to the reference, minus entropy."""
        algo = self.config.algo
        assert piece.logp_prox is not None
        assert piece.advantages is not None
        shape = {
            "aggregation": algo.aggregation,
            "horizon": float(self.config.sampling.max_tokens),
            "denominator": denominator,
        }
        scores = self.policy.score(piece, needs_entropy_grad=algo.entropy_coef > 0)
        loss, stats = policy_loss(
            scores.logp,
            piece.logp_prox,
            piece.logp_behav,
            piece.advantages,
            piece.mask,
            objective=algo.objective,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            cap=algo.cap,
            dual_clip=algo.dual_clip,
            acr_max_bound=algo.acr_max_bound,
            weight=piece.weight,
            shrink=piece.shrink,
            **shape,
        )
        stats["actor/pg_loss_sum"] = loss.detach()
        if algo.kl_coef > 0 and not algo.kl_in_reward:
            assert piece.logp_ref is not None
            kl = kl_penalty(scores.logp, piece.logp_ref, algo.kl_estimator, limit=KL_LIMIT)
            if algo.kl_is_correct:
                assert piece.weight is not None
                kl = kl * piece.weight
            kl_loss = aggregate(kl, piece.mask, **shape)
            loss = loss + algo.kl_coef * kl_loss
            stats["actor/kl_loss_sum"] = kl_loss.detach()
        if algo.entropy_coef > 0:
            loss = loss - algo.entropy_coef * aggregate(scores.entropy, piece.mask, **shape)
        return loss, stats

    def _update_critic(self, minibatch: Batch, step: int, meter: Meter) -> None:
        config = self.config
        assert self.critic is not None
        assert self.critic_optimizer is not None
        assert minibatch.returns is not None
        for rows in microbatches(minibatch.lengths, config.batch.microbatch_tokens):
            piece = minibatch.select(rows)
            if piece.num_tokens == 0:
                continue
            assert piece.returns is not None
            loss, stats = value_loss(
                self.critic(piece),
                piece.returns,
                piece.mask,
                old_values=piece.values,
                clip=config.critic.clip,
                denominator=minibatch.num_tokens,
            )
            stats["critic/vf_loss_sum"] = loss.detach()
            _check_finite(loss, stats, step)
            loss.backward()
            meter.add(stats, weight=piece.num_tokens)
        lr = learning_rate(config.critic.lr, step, config.steps, config.optim)
        norm = apply_gradients(self.critic_optimizer, lr=lr, grad_clip=config.optim.grad_clip)
        meter.finish_update({"critic/grad_norm": norm, "critic/lr": lr})


class Meter:
    """Statistics of many pieces as one: means weighted by tokens, and maxima of `max` names.

    The pieces of an update share one denominator: their `_sum` names add up to that update's value,
    and the mean over updates is reported without the suffix.
    """

    def __init__(self) -> None:
        self._total: dict[str, float] = defaultdict(float)
        self._weight: dict[str, float] = defaultdict(float)
        self._max: dict[str, float] = {}
        self._sum: dict[str, float] = defaultdict(float)

    def add(self, stats: Mapping[str, Tensor | float], weight: float = 1.0) -> None:
        for name, value in stats.items():
            value = float(value)
            if "max" in name:
                self._max[name] = max(self._max.get(name, value), value)
            elif name.endswith("_sum"):
                self._sum[name.removesuffix("_sum")] += value
            else:
                self._total[name] += value * weight
                self._weight[name] += weight

    def finish_update(self, stats: Mapping[str, float]) -> None:
        """Close the sums of an update and add what is known of it as a whole."""
        self.add({**self._sum, **stats})
        self._sum.clear()

    def summary(self) -> dict[str, float]:
        return {name: x / self._weight[name] for name, x in self._total.items()} | self._max


def _check_finite(loss: Tensor, stats: Mapping[str, Tensor], step: int) -> None:
    if not torch.isfinite(loss):
        values = ", ".join(f"{name} = {float(value):.4g}" for name, value in stats.items())
        raise TrainingError(
            f"the loss of step {step} is {loss.item()} ({values}). No update was made with it; the "
            "batch and the weights are in the crash folder. A lower optim.lr may help"
        )
