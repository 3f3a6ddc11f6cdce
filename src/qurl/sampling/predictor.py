"""How hard is a problem? Its accuracy, predicted from that of reference problems (DOTS).

    a_j  = softmax_j(f_q(x) . f_r(x_j) / sqrt(H))       base = sum_j a_j v_j
    temp = clamp(softplus(t), 0.01, 10), bias = tanh(b)  with (t, b) = MLP([mean(v), std(v)])
    p    = sigmoid(logit(base) / temp + bias)

Shapes: N problems, K references, E width of the embeddings, H of the projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.errors import ConfigError, ModelError, first_line
from qurl.seeds import generator
from qurl.trainer.weight_files import UNREADABLE
from qurl.types import Problem

NUM_FEATURES = 512
TEMPERATURES = tuple(0.01 * 2.0**i for i in range(10))


def attend(
    queries: Tensor, references: Tensor, values: Tensor, scale: float, own: Tensor | None = None
) -> Tensor:
    """[N]: mean of the references' values, weighted by softmax(q . r / scale).

    `own` [N] is the reference that a query itself is, or -1; it has no weight.
    """
    scores = queries @ references.T / scale  # [N, K]
    if own is not None:
        is_own = own[:, None] == torch.arange(len(references), device=own.device)
        scores = scores.masked_fill(is_own, -math.inf)
    return scores.softmax(-1) @ values


def sharpen(base: Tensor, temp: Tensor | float, bias: Tensor | float) -> Tensor:
    """sigmoid(logit(base) / temp + bias)"""
    return torch.sigmoid(base.clamp(1e-4, 1 - 1e-4).logit() / temp + bias)


def fit_line(predicted: Tensor, values: Tensor) -> tuple[float, float]:
    """Slope and intercept of values ~ predicted by least squares."""
    centered = predicted - predicted.mean()
    variance = float(centered.square().mean())
    if variance < 1e-12:  # all predictions are equal: the mean is the best guess
        return 0.0, float(values.mean())
    slope = float((centered * (values - values.mean())).mean()) / variance
    return slope, float(values.mean()) - slope * float(predicted.mean())


def fit_scale(references: Tensor, values: Tensor) -> float:
    """The scale of `attend` that predicts each reference best from the others."""
    own = torch.arange(len(references))
    errors = [
        float((attend(references, references, values, scale, own) - values).square().mean())
        for scale in TEMPERATURES
    ]
    return TEMPERATURES[errors.index(min(errors))]


class Predictor(nn.Module):
    """The learned predictor, over frozen embeddings."""

    def __init__(self, width: int, hidden: int = 896) -> None:
        super().__init__()
        self.width, self.hidden = width, hidden
        self.query, self.reference = _projection(width, hidden), _projection(width, hidden)
        self.calibration = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 2))

    def forward(
        self, problems: Tensor, references: Tensor, values: Tensor, own: Tensor | None = None
    ) -> Tensor:
        """Predicted accuracies [N]; `own` as in `attend`."""
        scale = math.sqrt(self.hidden)
        base = attend(self.query(problems), self.reference(references), values, scale, own)
        moments = torch.stack((values.mean(), values.std(correction=0)))
        temp, bias = self.calibration(moments)
        return sharpen(base, F.softplus(temp).clamp(0.01, 10), bias.tanh())

    def save(self, path: str | Path) -> None:
        shape = {"width": self.width, "hidden": self.hidden}
        torch.save({**shape, "weights": self.state_dict()}, path)


def load_predictor(path: str | Path, width: int) -> Predictor:
    """A saved predictor, for embeddings of this width."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        predictor = Predictor(saved["width"], saved["hidden"])
        predictor.load_state_dict(saved["weights"])
    except UNREADABLE as error:
        cause = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        message = f"systems.dots.predictor = {str(path)!r} cannot be read: {cause}"
        raise ModelError(message) from error
    if predictor.width != width:
        raise ConfigError(
            f"systems.dots.predictor = {str(path)!r} was trained on embeddings of width "
            f"{predictor.width}, and systems.dots.encoder gives {width}; use its own encoder"
        )
    return predictor.eval()


def _projection(width: int, hidden: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.LayerNorm(width)]
    for size in (width, hidden):
        layers += [nn.Linear(size, hidden), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(hidden, hidden), nn.LayerNorm(hidden))


def train_predictor(
    embeddings: Tensor,
    tables: Tensor,
    *,
    hidden: int = 896,
    epochs: int = 20,
    batch: int = 256,
    references: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
) -> Predictor:
    """Learn from the accuracies [P, N] that P policies had on N embedded problems [N, E]."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        predictor, draw = Predictor(embeddings.shape[1], hidden), generator(seed, "predictor")
        optimizer = torch.optim.AdamW(predictor.parameters(), lr=lr)
        num_batches = -(-len(embeddings) // batch)
        total = epochs * len(tables) * num_batches
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        for _ in range(epochs):
            for table in tables:
                order = torch.randperm(len(embeddings), generator=draw)
                for rows in order.tensor_split(num_batches):
                    known = torch.randperm(len(embeddings), generator=draw)[:references]
                    own = _places(rows, known)
                    found = predictor(embeddings[rows], embeddings[known], table[known], own)
                    F.binary_cross_entropy(found, table[rows]).backward()
                    optimizer.step()
                    decay.step()
                    optimizer.zero_grad()
    return predictor.eval()


def _places(rows: Tensor, known: Tensor) -> Tensor:
    """Where in `known` each of `rows` is, or -1."""
    places = torch.full((int(max(rows.max(), known.max())) + 1,), -1)
    places[known] = torch.arange(len(known))
    return places[rows]


def embed(problems: Sequence[Problem], encoder: str) -> Tensor:
    """[N, E] of unit length, by a model or, without one, by counts of tokens and their pairs."""
    if encoder:
        return F.normalize(_encode([str(p.extra.get("prompt", "")) for p in problems], encoder))
    return F.normalize(torch.stack([_count_tokens(p.prompt_ids) for p in problems]))


def _count_tokens(prompt_ids: Sequence[int]) -> Tensor:
    ids = torch.tensor(prompt_ids, dtype=torch.int64)
    pairs = ids[:-1] * 1_000_003 + ids[1:] * 7_919 + 13
    features = torch.cat((ids * 2_654_435, pairs)) % NUM_FEATURES
    return torch.bincount(features, minlength=NUM_FEATURES).float().log1p()


@torch.no_grad()
def _encode(texts: Sequence[str], path: str) -> Tensor:
    """Mean of the last hidden states of each text."""
    from transformers import AutoModel, AutoTokenizer

    try:
        # Without the False, transformers would ask on the terminal whether it may run its code.
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModel.from_pretrained(path, trust_remote_code=False).eval()
    except (OSError, ValueError) as error:
        raise ModelError(f"systems.dots.encoder = {path!r} cannot be loaded: {error}") from error
    states = []
    for text in texts:  # one by one, so that nothing is padded
        ids = torch.tensor([tokenizer(text).input_ids])
        states.append(model(input_ids=ids).last_hidden_state[0].float().mean(0))
    return torch.stack(states)
