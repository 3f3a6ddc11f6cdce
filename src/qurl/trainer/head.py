"""Log-probs and entropies of tokens from hidden states; the logits [N, V] never exist as a whole.

    z = (states @ weight^T + bias) * logit_scale / temperature
    log Z = log sum exp z;   log p = z - log Z;   entropy = -sum p log p

    d log p[target] / dz = onehot(target) - p
    d entropy / dz = -p (log p + entropy)

Rows are scored in chunks. The backward pass has log Z and computes the logits again, or it has kept
g = d log p / dz, which takes memory and saves one of four products:

    d states = grad_logp g weight;   d weight = g^T (grad_logp states)

The factors of products are rounded to the compute dtype; their sums and everything between the
products are FP32. In FP64 all of it is FP64.

Shapes: N tokens, n of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from qurl.trainer.lora import FrozenHead
from qurl.trainer.products import as_factor, multiply


@dataclass(frozen=True)
class Scoring:
    """How tokens are scored."""

    temperature: float
    chunk: int
    """Rows scored at once. The backward pass holds n V logits and as many of their gradients."""
    compute_dtype: torch.dtype
    needs_entropy_grad: bool
    keeps_gradients: bool = False
    """Whether the forward pass keeps g [N, V]; not if entropies want gradients."""

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self.chunk):
            yield slice(start, start + self.chunk)


class PlainHead(NamedTuple):
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    logit_scale: float

    def score(self, states: Tensor, targets: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """log p [N] of the targets [N] and entropies [N], from states [N, H]."""
        factor = self.logit_scale / scoring.temperature
        is_kept = scoring.keeps_gradients and not scoring.needs_entropy_grad
        others = (targets.contiguous(), factor, scoring, is_kept and torch.is_grad_enabled())
        return _TokenScores.apply(states, self.weight, self.bias, *others)


def plain_head(model: nn.Module) -> PlainHead | None:
    """The head of a causal LM of transformers, or None if it is more than a linear layer."""
    config: Any = model.config
    head = model.get_output_embeddings()  # type: ignore[operator]
    is_linear = type(head) in (nn.Linear, FrozenHead)
    if not is_linear or getattr(config, "final_logit_softcapping", None):
        return None
    return PlainHead(head.weight, head.bias, _logit_scale(config))


def apply_head(model: nn.Module, states: Tensor) -> Tensor:
    """The logits [N, V] that the model's own forward computes from hidden states."""
    config: Any = model.config
    logits = model.get_output_embeddings()(states) * _logit_scale(config)  # type: ignore[operator]
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    return logits


def _logit_scale(config: Any) -> float:
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    return factor / divisor


def score_tokens(
    model: nn.Module, states: Tensor, targets: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """log p [N] of the targets [N] and entropies [N] under any head, from states [N, H]."""
    if (head := plain_head(model)) is not None:
        return head.score(states, targets, scoring)
    scores = [
        checkpoint(_score_any_head, model, *chunk, scoring, use_reentrant=False)
        for chunk in zip(states.split(scoring.chunk), targets.split(scoring.chunk), strict=True)
    ]
    logps, entropies = zip(*scores, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _score_any_head(
    model: nn.Module, states: Tensor, targets: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    with autocast(states.device, scoring.compute_dtype):
        logits = apply_head(model, states)
    logits = logits.float() / scoring.temperature  # [n, V]
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
    with torch.set_grad_enabled(scoring.needs_entropy_grad and torch.is_grad_enabled()):
        entropy = log_z - (logits.softmax(-1) * logits).sum(-1)
    return logp, entropy


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Products in BF16 if that is the dtype, else in the dtype of their factors.

    Weights are cast anew each time: a forward reads each once, and a cache would hold all casts to
    its end, also those of shards and of checkpointed layers.
    """
    options = {"dtype": torch.bfloat16, "cache_enabled": False}
    return torch.autocast(device.type, enabled=dtype == torch.bfloat16, **options)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        factor: float,
        scoring: Scoring,
        is_kept: bool,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(states.device.type, enabled=False):
            x, w = (as_factor(values, scoring.compute_dtype) for values in (states, weight))
            logp, log_z, entropy = (x.new_empty(len(x), dtype=scoring.sum_dtype) for _ in range(3))
            g = x.new_empty(len(x), len(w)) if is_kept else None
            for rows in scoring.chunks(len(x)):
                logits = _logits(x[rows], w, bias)
                scores = _score_rows(logits, targets[rows], factor)
                logp[rows], log_z[rows], entropy[rows] = scores
                if g is not None:
                    vectors = (targets[rows], log_z[rows], torch.ones_like(log_z[rows]))
                    _logit_gradients(logits, factor, scoring.compute_dtype, vectors, g[rows])
        ctx.factor, ctx.scoring, ctx.states_dtype = factor, scoring, states.dtype
        if not scoring.needs_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        kept = entropy if scoring.needs_entropy_grad else None
        ctx.save_for_backward(x, weight, bias, targets, log_z, kept, g)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        compute = _gradients_again if ctx.saved_tensors[-1] is None else _gradients_kept
        with torch.autocast(grad_logp.device.type, enabled=False):
            return (*compute(ctx, grad_logp, grad_entropy), None, None, None, None)


def _gradients_again(
    ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of states, weight and bias from logits that are computed again."""
    x, weight, bias, targets, log_z, entropy, _ = ctx.saved_tensors
    scoring: Scoring = ctx.scoring
    needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    vectors = [targets, log_z, grad_logp.contiguous()]
    if scoring.needs_entropy_grad:
        vectors += [entropy, grad_entropy.contiguous()]
    d_states = torch.empty_like(x, dtype=ctx.states_dtype) if needs_states else None
    d_bias = x.new_zeros(len(weight), dtype=scoring.sum_dtype) if needs_bias else None
    d_weight = None
    w = as_factor(weight, scoring.compute_dtype)
    for rows in scoring.chunks(len(x)):
        logits = _logits(x[rows], w, bias)
        chunk = [vector[rows] for vector in vectors]
        dz = _logit_gradients(logits, ctx.factor, scoring.compute_dtype, chunk)
        del logits
        if d_states is not None:
            d_states[rows] = multiply(dz, w)
        if needs_weight:
            d_weight = multiply(dz.T, x[rows], d_weight)
        if d_bias is not None:
            d_bias += dz.sum(0, dtype=d_bias.dtype)
        del dz  # the next chunk's logits take its place
    if needs_weight:
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
    return d_states, d_weight, None if d_bias is None else d_bias.to(bias.dtype)


def _gradients_kept(
    ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of states, weight and bias from g [N, V]; entropies have none."""
    del grad_entropy
    x, weight, bias, *_, g = ctx.saved_tensors
    dtype, slope = ctx.scoring.compute_dtype, grad_logp[:, None]
    d_states = d_weight = d_bias = None
    if ctx.needs_input_grad[0]:
        d_states = (multiply(g, as_factor(weight, dtype)) * slope).to(ctx.states_dtype)
    if ctx.needs_input_grad[1]:
        d_weight = multiply(g.T, as_factor(x * slope, dtype)).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        d_bias = (g.to(slope.dtype).T @ grad_logp).to(bias.dtype)
    return d_states, d_weight, d_bias


def _score_rows(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p of the targets, log Z and entropies, [n] each, from logits [n, V]."""
    if _has_kernels(logits):
        from qurl.trainer.kernels import token_scores

        return token_scores.score_rows(logits, targets, factor)
    z = logits * factor
    log_z = z.logsumexp(-1)
    logp = z.gather(-1, targets[:, None]).squeeze(-1) - log_z
    return logp, log_z, torch.special.entr(z.softmax(-1)).sum(-1)


def _logit_gradients(
    logits: Tensor,
    factor: float,
    dtype: torch.dtype,
    vectors: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """d logits [n, V] as a factor in `dtype`, in `out` if given; overwrites the logits.

    The vectors [n] are targets, log_z and grad_logp; entropy and grad_entropy if it has a gradient.
    """
    if _has_kernels(logits):
        from qurl.trainer.kernels import token_scores

        return token_scores.logit_gradients(logits, *vectors, factor=factor, dtype=dtype, out=out)
    targets, log_z, grad_logp, *of_entropy = vectors
    p = logits.mul_(factor).sub_(log_z[:, None]).exp_()
    gradient = -grad_logp[:, None] * p
    if of_entropy:
        entropy, grad_entropy = of_entropy
        # entr and not p log p, which is NaN for impossible tokens.
        gradient += grad_entropy[:, None] * (torch.special.entr(p) - p * entropy[:, None])
    gradient.scatter_add_(-1, targets[:, None], grad_logp[:, None])
    found = as_factor(gradient.mul_(factor), dtype)
    return found if out is None else out.copy_(found)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = multiply(states, weight.T)
    return logits if bias is None else logits.add_(bias)
