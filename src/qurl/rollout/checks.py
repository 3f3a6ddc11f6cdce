"""What every engine refuses: prompts it cannot continue, and log-probs that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qurl.errors import DataError, EngineError
from qurl.types import Problem, SamplingParams


def context_length(config: Any) -> int | None:
    """The number of positions that a model was made for; None if its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_prompts(problems: Sequence[Problem], params: SamplingParams, model: Any) -> None:
    """Raise unless every prompt is in the vocabulary and leaves room for `max_tokens`."""
    vocabulary = model.get_input_embeddings().num_embeddings
    longest = context_length(model.config)
    for problem in problems:
        _check_ids(problem, vocabulary)
        total = len(problem.prompt_ids) + params.max_tokens
        if longest is not None and total > longest:
            raise EngineError(
                f"problem {problem.id!r}: a prompt of {len(problem.prompt_ids)} tokens and "
                f"max_tokens = {params.max_tokens} make {total}, beyond the model's "
                f"max_position_embeddings = {longest}; lower sampling.max_tokens"
            )


def check_finite(logprob: float, problem: Problem, position: int) -> None:
    """Raise if a token was drawn from a broken distribution."""
    if not math.isfinite(logprob):
        raise EngineError(
            f"problem {problem.id!r}: the log-prob of completion token {position} is {logprob}; "
            "the engine's weights or activations are not finite"
        )


def _check_ids(problem: Problem, vocabulary: int) -> None:
    if len(problem.prompt_ids) == 0:
        raise DataError(f"problem {problem.id!r} has an empty prompt; at least one token is needed")
    for i, token in enumerate(problem.prompt_ids):
        if not 0 <= token < vocabulary:
            raise DataError(
                f"problem {problem.id!r}: prompt_ids[{i}] = {token} is outside the vocabulary "
                f"[0, {vocabulary}) of the model; was the prompt made by another tokenizer?"
            )
