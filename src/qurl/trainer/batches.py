"""From graded rollouts to padded tensors, and from those to pieces that fit in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qurl.types import Batch, Graded, Trained


def pad(graded: Sequence[Graded]) -> Batch:
    """One row per completion: prompt and response, right-padded to the longest.

    Causal attention never looks to the right, so padding needs no attention mask. The trained
    policy is that of the newest rollout's temperature; replayed ones may have had another, which
    their log-probs hold.
    """
    newest = max((group.rollout for group in graded), key=lambda rollout: rollout.version)
    rows = [
        (index, group.rollout.problem, completion, reward)
        for index, group in enumerate(graded)
        for completion, reward in zip(group.rollout.completions, group.rewards, strict=True)
    ]
    accuracies = [float(accuracy) for group in graded for accuracy in group.accuracies]
    lengths = [len(problem.prompt_ids) + len(c.token_ids) for _, problem, c, _ in rows]
    shape = (len(rows), max(lengths))
    token_ids = torch.zeros(shape, dtype=torch.int64)
    mask, logp_behav = torch.zeros(shape), torch.zeros(shape)
    for b, (_, problem, completion, _) in enumerate(rows):
        response = slice(len(problem.prompt_ids), lengths[b])
        token_ids[b, : lengths[b]] = torch.tensor([*problem.prompt_ids, *completion.token_ids])
        trained = torch.tensor(completion.trained, dtype=torch.float32)
        mask[b, response] = trained
        logp_behav[b, response] = trained * torch.tensor(completion.logprobs, dtype=torch.float32)
    return Batch(
        token_ids=token_ids,
        lengths=torch.tensor(lengths),
        mask=mask,
        logp_behav=logp_behav,
        rewards=torch.tensor([float(reward) for *_, reward in rows]),
        accuracies=torch.tensor(accuracies),
        group=torch.tensor([index for index, *_ in rows]),
        temperature=newest.temperature,
        problem_ids=[problem.id for _, problem, *_ in rows],
    )


def minibatches(
    num_rows: int, count: int, generator: torch.Generator, bundle: int = 1
) -> list[Tensor]:
    """The rows of each mini-batch: all in random order; sizes differ by at most one bundle.

    A bundle is so many rows that follow each other.
    """
    order = torch.randperm(num_rows // bundle, generator=generator)
    bundles = order[:, None] * bundle + torch.arange(bundle)
    return [rows.flatten() for rows in bundles.tensor_split(count) if len(rows)]


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The rows of each micro-batch: few of them, of about equal size, of at most `max_tokens`.

    A row longer than `max_tokens` gets a micro-batch of its own.
    """
    tokens = sum(min(length, max_tokens) for length in lengths)
    count = -(-tokens // max_tokens)
    while True:
        pieces = level(lengths, count)
        shared = (rows for rows in pieces if len(rows) > 1)
        if all(sum(lengths[row] for row in rows) <= max_tokens for rows in shared):
            return pieces
        count += 1  # at the latest, when every row is alone, they fit


def level(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Rows in `count` pieces: the longest first, each where the fewest tokens are so far."""
    pieces: list[list[int]] = [[] for _ in range(count)]
    fullness = [(0, index) for index in range(count)]  # a heap
    for row in _by_length(lengths):
        size, index = fullness[0]
        heapq.heapreplace(fullness, (size + lengths[row], index))
        pieces[index].append(row)
    return pieces


def padded_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The same for forwards that pad: rows of similar length, and padding counts."""
    order, pieces = _by_length(lengths), []
    while order:
        size = max(1, max_tokens // lengths[order[0]])
        piece, order = order[:size], order[size:]
        pieces.append(piece)
    return pieces


def _by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def sample_records(
    graded: Sequence[Graded],
    batch: Trained,
    count: int,
    tokenizer: Any = None,
    rows: Tensor | None = None,
) -> Iterator[dict[str, Any]]:
    """Readable records of `count` completions, evenly spread over the batch.

    `rows` says which completion of the step each row is, where some were left out.
    """
    completions = [
        (group, index) for group in graded for index in range(len(group.rollout.completions))
    ]
    kept = range(len(completions)) if rows is None else rows.tolist()
    for row in torch.linspace(0, len(kept) - 1, min(count, len(kept))).long():
        group, index = completions[kept[row]]
        rollout, completion = group.rollout, group.rollout.completions[index]
        start = len(rollout.problem.prompt_ids)
        response = slice(start, start + len(completion.token_ids))
        per_token = ("logp_behav", "logp_prox", "logp", "advantages", "shrink", "mask")
        yield {
            "problem": rollout.problem.id,
            "prompt": rollout.problem.extra.get("prompt", ""),
            "completion": completion.text,
            "answer": rollout.problem.answer,
            "reward": group.rewards[index],
            "details": dict(group.details[index]),
            "finish": completion.finish,
            "has_prox": bool(batch.has_prox[row]),
            "token_ids": list(completion.token_ids),
            "tokens": token_texts(tokenizer, completion.token_ids),
        } | {
            name: [round(x, 6) for x in getattr(batch, name)[row, response].tolist()]
            for name in per_token
        }


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; empty without a tokenizer.

    A character that several tokens spell stands with the last of them. The token before is decoded
    too, as some tokenizers drop the space before a first word.
    """
    if tokenizer is None:
        return []
    texts: list[str] = []
    start, shown = 0, ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
        is_partial = text.endswith("\ufffd") and end - start <= 4  # UTF-8 has up to four bytes
        texts.append("" if is_partial else text[len(shown) :])
        if not is_partial:
            start = end - 1
            shown = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
    return texts
