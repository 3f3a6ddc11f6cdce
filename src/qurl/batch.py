"""From graded rollouts to padded tensors, and from those to pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qurl.types import Batch, Graded


def pack(graded: Sequence[Graded]) -> Batch:
    """One row per completion: prompt and response, right-padded to the longest.

    Causal attention never looks to the right, so padding needs no attention mask.
    """
    rows = [
        (index, group.rollout.problem.prompt_ids, completion, reward)
        for index, group in enumerate(graded)
        for completion, reward in zip(group.rollout.completions, group.rewards, strict=True)
    ]
    lengths = [len(prompt) + len(completion.token_ids) for _, prompt, completion, _ in rows]
    shape = (len(rows), max(lengths))
    token_ids = torch.zeros(shape, dtype=torch.int64)
    mask, logp_behav = torch.zeros(shape), torch.zeros(shape)
    for b, (_, prompt, completion, _) in enumerate(rows):
        response = slice(len(prompt), lengths[b])
        token_ids[b, : lengths[b]] = torch.tensor([*prompt, *completion.token_ids])
        mask[b, response] = 1.0
        logp_behav[b, response] = torch.tensor(completion.logprobs, dtype=torch.float32)
    return Batch(
        token_ids=token_ids,
        lengths=torch.tensor(lengths),
        mask=mask,
        logp_behav=logp_behav,
        rewards=torch.tensor([float(reward) for *_, reward in rows]),
        group=torch.tensor([index for index, *_ in rows]),
        temperature=graded[0].rollout.temperature,
    )


def microbatches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Row indices of pieces of similar length whose padded size stays within `max_tokens`.

    A row longer than that makes a piece of its own.
    """
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        size = max(1, max_tokens // longest)
        yield order[start : start + size]
        start += size


def sample_records(graded: Sequence[Graded], batch: Batch, count: int) -> Iterator[dict]:
    """Readable records of `count` rows, evenly spread over the batch that `pack` made."""
    assert batch.logp_prox is not None
    completions = [
        (group, index) for group in graded for index in range(len(group.rollout.completions))
    ]
    for row in torch.linspace(0, len(completions) - 1, min(count, len(completions))).long():
        group, index = completions[row]
        rollout, completion = group.rollout, group.rollout.completions[index]
        start = len(rollout.problem.prompt_ids)
        response = slice(start, start + len(completion.token_ids))
        yield {
            "problem": rollout.problem.id,
            "prompt": rollout.problem.extra.get("prompt", ""),
            "completion": completion.text,
            "answer": rollout.problem.answer,
            "reward": group.rewards[index],
            "details": dict(group.details[index]),
            "finish": completion.finish,
            "token_ids": list(completion.token_ids),
            "logp_behav": [round(x, 6) for x in batch.logp_behav[row, response].tolist()],
            "logp_prox": [round(x, 6) for x in batch.logp_prox[row, response].tolist()],
        }
