"""From graded rollouts to padded tensors, and from those to pieces that fit in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qurl.types import SHORTEST, Batch, Completion, Graded, Trained


class Row(NamedTuple):
    """One completion as a batch has it; its tokens may be on a shelf."""

    problem_id: str
    prompt_ids: Sequence[int]
    completion: Completion
    reward: float
    accuracy: float
    group: int
    temperature: float
    """The temperature of the whole batch."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)


class Share(NamedTuple):
    """The rows of a step's batch that one rank has."""

    rows: Tensor  # [b], in ascending order
    num_rows: int
    """On all ranks."""

    def of(self, rows: Tensor) -> Tensor:
        """Places on this rank of those of the given rows that it has, in their order."""
        places = torch.full((self.num_rows,), -1)
        places[self.rows] = torch.arange(len(self.rows))
        found = places[rows]
        return found[found >= 0]


def rows_of(graded: Sequence[Graded]) -> list[Row]:
    """One row per completion.

    The trained policy is that of the newest rollout's temperature; replayed ones may have had
    another, which their log-probs hold.
    """
    newest = max((group.rollout for group in graded), key=lambda rollout: rollout.version)
    return [
        Row(
            group.rollout.problem.id,
            group.rollout.problem.prompt_ids,
            completion,
            float(reward),
            float(accuracy),
            index,
            newest.temperature,
        )
        for index, group in enumerate(graded)
        for completion, reward, accuracy in zip(
            group.rollout.completions, group.rewards, group.accuracies, strict=True
        )
    ]


def pad(graded: Sequence[Graded]) -> Batch:
    """One row per completion: prompt and response, right-padded to the longest."""
    return pad_rows(rows_of(graded))


def pad_rows(rows: Sequence[Row]) -> Batch:
    """Causal attention never looks to the right, so padding needs no attention mask."""
    shape = (len(rows), max((row.length for row in rows), default=SHORTEST))
    token_ids = torch.zeros(shape, dtype=torch.int64)
    mask, logp_behav = torch.zeros(shape), torch.zeros(shape)
    for b, row in enumerate(rows):
        completion, response = row.completion, slice(len(row.prompt_ids), row.length)
        token_ids[b, : row.length] = torch.tensor([*row.prompt_ids, *completion.token_ids])
        trained = torch.tensor([*completion.trained], dtype=torch.float32)
        mask[b, response] = trained
        logprobs = torch.tensor([*completion.logprobs], dtype=torch.float32)
        logp_behav[b, response] = trained * logprobs
    return _outcomes(rows, token_ids=token_ids, mask=mask, logp_behav=logp_behav)


def outline(rows: Sequence[Row]) -> Batch:
    """All that is known of rows without their tokens: each has one position, which is trained."""
    ones = torch.ones(len(rows), 1)
    return _outcomes(rows, token_ids=ones.long(), mask=ones, logp_behav=torch.zeros_like(ones))


def _outcomes(rows: Sequence[Row], **per_token: Any) -> Batch:
    return Batch(
        lengths=torch.tensor([row.length for row in rows], dtype=torch.int64),
        rewards=torch.tensor([row.reward for row in rows]),
        accuracies=torch.tensor([row.accuracy for row in rows]),
        group=torch.tensor([row.group for row in rows], dtype=torch.int64),
        temperature=rows[0].temperature if rows else 1.0,
        problem_ids=[row.problem_id for row in rows],
        **per_token,
    )


def deal(lengths: Sequence[int], parts: Sequence[Tensor], count: int) -> list[list[int]]:
    """The rows of each of `count` ranks, which has about as many tokens of every mini-batch."""
    shares: list[list[int]] = [[] for _ in range(count)]
    for part in parts:
        rows = part.tolist()
        for share, places in zip(shares, level([lengths[r] for r in rows], count), strict=True):
            share += [rows[place] for place in places]
    return [sorted(share) for share in shares]


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
        # In larger steps for thousands of pieces, or this takes minutes if few rows fit together.
        # At the latest, when every row is alone, they fit.
        count = min(count + 1 + count // 256, len(lengths))


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


def spread(count: int, num_rows: int) -> Tensor:
    """The numbers of at most `count` rows, evenly spread over a batch."""
    return torch.linspace(0, num_rows - 1, min(count, num_rows)).long()


def sample_records(
    graded: Sequence[Graded], places: Tensor, batch: Trained, tokenizer: Any = None
) -> Iterator[dict[str, Any]]:
    """Readable records of the rows of `batch`, which are the completions at these places."""
    completions = [
        (group, index) for group in graded for index in range(len(group.rollout.completions))
    ]
    for row, place in enumerate(places.tolist()):
        group, index = completions[place]
        rollout, completion = group.rollout, group.rollout.completions[index]
        start = len(rollout.problem.prompt_ids)
        response = slice(start, start + len(completion.token_ids))
        per_token = ("logp_behav", "logp_prox", "logp", "advantages", "shrink", "mask")
        token_ids = batch.token_ids[row, response].tolist()
        yield {
            "problem": rollout.problem.id,
            "prompt": rollout.problem.extra.get("prompt", ""),
            "completion": completion.text,
            "answer": rollout.problem.answer,
            "reward": group.rewards[index],
            "details": dict(group.details[index]),
            "finish": completion.finish,
            "has_prox": bool(batch.has_prox[row]),
            "token_ids": token_ids,
            "tokens": token_texts(tokenizer, token_ids),
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
