"""Log-probs and entropies of tokens from hidden states, where [N, V] never exists.

    z = (states @ weight^T + bias) * logit_scale / temperature
    log Z = log sum exp z;   log p = z - log Z;   entropy = -sum p log p

    d log p[target] / dz = onehot(target) - p
    d entropy / dz = -p (log p + entropy)

The logits of a chunk of rows exist at a time; what is kept for the backward pass is log Z, and the
logits are made again. The factors of the three products (logits, and the gradients of states and
weight) are rounded to the compute dtype, their sums are FP32 and are not rounded, and everything
between the products is FP32. In FP64 all of it is FP64.

Shapes: N tokens, n of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class PlainHead(NamedTuple):
    """logits = (states @ weight^T + bias) * logit_scale"""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    logit_scale: float


def plain_head(model: nn.Module) -> PlainHead | None:
    """The head of a causal LM of transformers; None where it is more than a linear layer."""
    config: Any = model.config
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or getattr(config, "final_logit_softcapping", None):
        return None
    return PlainHead(head.weight, head.bias, logit_scale(config))


def logit_scale(config: Any) -> float:
    """What a model of transformers multiplies its logits with."""
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    return factor / divisor


def token_scores(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    compute_dtype: torch.dtype,
    logit_scale: float = 1.0,
    needs_entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """log p [N] of the targets [N] and entropies [N], from states [N, H] and the head's weights.

    `chunk` rows are scored at once: beside the logits, n V floats, the backward pass holds as many
    numbers of the compute dtype. A larger one reads and writes the weight's gradient less often.
    Without `needs_entropy_grad` no gradient flows through the entropies.
    """
    assert states.shape[1:] == weight.shape[1:]
    assert targets.shape == states.shape[:1]
    assert compute_dtype in COMPUTE_DTYPES
    assert temperature > 0
    assert logit_scale > 0
    assert chunk > 0
    settings = _Settings(logit_scale / temperature, chunk, compute_dtype, needs_entropy_grad)
    return _TokenScores.apply(states, weight, bias, targets.contiguous(), settings)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Settings:
    factor: float
    """From the head's logits to z."""
    chunk: int
    compute_dtype: torch.dtype
    needs_entropy_grad: bool

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def chunks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self.chunk):
            yield slice(start, start + self.chunk)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        with _without_autocast(states.device):
            x, w = (_as_factor(values, settings.compute_dtype) for values in (states, weight))
            logp, log_z, entropy = (x.new_empty(len(x), dtype=settings.sum_dtype) for _ in range(3))
            for rows in settings.chunks(len(x)):
                logp[rows], log_z[rows], entropy[rows] = _score_rows(
                    _logits(x[rows], w, bias), targets[rows], settings.factor
                )
        ctx.settings, ctx.states_dtype = settings, states.dtype
        if not settings.needs_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        kept = entropy if settings.needs_entropy_grad else None
        ctx.save_for_backward(x, weight, bias, targets, log_z, kept)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        vectors = [targets, log_z, grad_logp.contiguous()]
        if settings.needs_entropy_grad:
            vectors += [entropy, grad_entropy.contiguous()]
        d_states = torch.empty_like(x, dtype=ctx.states_dtype) if needs_states else None
        d_bias = x.new_zeros(len(weight), dtype=settings.sum_dtype) if needs_bias else None
        d_weight = None
        with _without_autocast(x.device):
            w = _as_factor(weight, settings.compute_dtype)
            for rows in settings.chunks(len(x)):
                logits = _logits(x[rows], w, bias)
                dz = _logit_gradients(logits, settings, *(vector[rows] for vector in vectors))
                del logits
                if d_states is not None:
                    d_states[rows] = _multiply(dz, w)
                if needs_weight:
                    d_weight = _add_product(d_weight, dz.T, x[rows])
                if d_bias is not None:
                    d_bias += dz.sum(0, dtype=d_bias.dtype)
                del dz  # the next chunk's logits take its place
        if needs_weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(bias.dtype)
        return d_states, d_weight, d_bias, None, None


def _score_rows(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p of the targets, log Z and entropies, [n] each; the logits [n, V] are used up."""
    if _has_kernels(logits):
        from qurl.trainer.kernels import token_scores

        return token_scores.score_rows(logits, targets, factor)
    z = logits.mul_(factor)
    log_z = z.logsumexp(-1)
    logp = z.gather(-1, targets[:, None]).squeeze(-1) - log_z
    return logp, log_z, torch.special.entr(z.softmax(-1)).sum(-1)


def _logit_gradients(
    logits: Tensor,
    settings: _Settings,
    targets: Tensor,
    log_z: Tensor,
    grad_logp: Tensor,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """d logits [n, V], as a factor of products; the logits are used up."""
    factor = settings.factor
    if _has_kernels(logits):
        from qurl.trainer.kernels import token_scores

        return token_scores.logit_gradients(
            logits,
            targets,
            log_z,
            grad_logp,
            entropy,
            grad_entropy,
            factor=factor,
            dtype=settings.compute_dtype,
        )
    p = logits.mul_(factor).sub_(log_z[:, None]).exp_()
    gradient = -grad_logp[:, None] * p
    if entropy is not None and grad_entropy is not None:
        # Not p * log p: entr knows what a token that cannot be adds.
        gradient += grad_entropy[:, None] * (torch.special.entr(p) - p * entropy[:, None])
    gradient.scatter_add_(-1, targets[:, None], grad_logp[:, None])
    return _as_factor(gradient.mul_(factor), settings.compute_dtype)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = _multiply(states, weight.T)
    return logits if bias is None else logits.add_(bias)


def _as_factor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to `dtype`. A CPU keeps them in FP32, where it can add up their products."""
    rounded = values.to(dtype)
    return rounded if rounded.is_cuda or dtype != torch.bfloat16 else rounded.float()


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, unrounded sums."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, likewise, in total's memory; without one the product alone."""
    if total is None:
        return _multiply(a, b)
    if a.dtype == torch.bfloat16:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return torch.addmm(total, a, b, out=total)


def _without_autocast(device: torch.device) -> torch.autocast:
    """Which dtypes are multiplied is said here and nowhere else."""
    return torch.autocast(device.type, enabled=False)
