"""A step's batch on the ranks: each has the rows that it trains on, and no other.

    deal      the driver says which rows are whose; each rank takes their tokens off the shelves
    recompute, correct, compare, update   each rank turns its rows into the next stage
    fetch     some rows come back, for samples.jsonl and for parts that read whole batches

The driver holds a `Dealt` in place of each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from qurl.advantages import Estimator, known_advantages
from qurl.errors import QurlError
from qurl.trainer.batches import Row, Share, pad_rows
from qurl.trainer.parallel.processes import Post, Workers
from qurl.types import Batch, Corrected, Scored, Trainable, Trained


@dataclass(frozen=True)
class Dealt:
    """What the driver knows of a batch: all but its tokens."""

    stage: type[Batch]
    outline: Batch
    """One position for each row."""
    num_tokens: int = 0
    """Trained tokens, after the update."""

    def __len__(self) -> int:
        return len(self.outline)


def deal_rows(
    workers: Workers,
    rows: Sequence[Row],
    bundle: int,
    shares: Sequence[Sequence[int]],
    drop: Mapping[int, list[str]],
) -> None:
    """Give each rank its rows. `drop` has the keys that the shelf of each rank can forget."""
    bare = [row._replace(completion=replace(row.completion, text="")) for row in rows]
    workers.post.held["dealt"] = [
        (list(share), [bare[row] for row in share], drop.get(rank, []))
        for rank, share in enumerate(shares)
    ]
    workers.run(_take_rows, len(rows), bundle)


def _take_rows(post: Post, num_rows: int, bundle: int) -> None:
    numbers, rows, dropped = post.scatter("dealt")
    device = post.learner.policy.device
    with post.ranks.agreeing(QurlError):
        batch = pad_rows(rows).replace(bundle=bundle).to(device)
    post.held["shelf"].drop(dropped)
    post.held["share"] = Share(torch.tensor(numbers, dtype=torch.int64), num_rows)
    post.held["stages"] = {Batch: batch}


def recompute(post: Post, step: int) -> None:
    stages = post.held["stages"]
    stages[Scored] = post.learner.recompute(stages[Batch], step, post.held["share"])


def correct(post: Post) -> None:
    stages = post.held["stages"]
    stages[Corrected] = post.learner.correct(stages[Scored])


def compare(post: Post, advantage: Estimator) -> None:
    stages = post.held["stages"]
    stages[Trainable] = post.learner.compare(stages[Corrected], advantage)


def compare_known(post: Post, advantages: Tensor) -> None:
    """With an advantage for each row of the whole batch."""
    compare(post, known_advantages(advantages[post.held["share"].rows]))


def take_compared(post: Post, advantages: Tensor, returns: Tensor) -> None:
    """With those of all tokens of the whole batch."""
    stages, rows = post.held["stages"], post.held["share"].rows
    corrected: Corrected = stages[Corrected]
    width, device = corrected.mask.shape[1], corrected.mask.device
    advantages, returns = (x[rows, :width].to(device) for x in (advantages, returns))
    stages[Trainable] = corrected.into(Trainable, advantages=advantages, returns=returns)


def update(post: Post, step: int) -> tuple[int, dict[str, float]]:
    stages = post.held["stages"]
    stages[Trained], metrics = post.learner.update(stages[Trainable], step, post.held["share"])
    return post.ranks.total(stages[Trained].num_tokens), metrics


def describe(post: Post, stage: type[Trainable]) -> dict[str, float]:
    stages = post.held["stages"]
    return post.learner.describe(stages[stage], stages[Batch])


def fetch(post: Post, stage: type[Batch], rows: Tensor) -> Batch | None:
    """The given rows of all ranks, on the leader."""
    share: Share = post.held["share"]
    own, batch = share.of(rows), post.held["stages"][stage]
    found = batch.select(own.to(batch.mask.device)).to("cpu")
    gathered = post.gather((share.rows[own], found))
    return _join(gathered, rows) if gathered else None


def _join(parts: Sequence[tuple[Tensor, Batch]], rows: Tensor) -> Batch:
    """The batches of several ranks as one, in the order of `rows`."""
    numbers = torch.cat([numbers for numbers, _ in parts])
    batches = [batch for _, batch in parts]
    places = {number: place for place, number in enumerate(numbers.tolist())}
    order = torch.tensor([places[row] for row in rows.tolist()], dtype=torch.int64)
    width = max(batch.mask.shape[1] for batch in batches)
    names = [name for name, x in vars(batches[0]).items() if isinstance(x, Tensor)]
    tensors = {}
    for name in names:
        columns = [getattr(batch, name) for batch in batches]
        columns = [pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in columns]
        tensors[name] = torch.cat(columns)[order]
    ids = [id for batch in batches for id in batch.problem_ids]
    return batches[0].replace(**tensors, problem_ids=[ids[place] for place in order.tolist()])
