"""Numbers that several ranks hold are summed up as if one held them all."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import random_batch, tiny_policy

from qurl.advantages import whiten
from qurl.correction import correction_metrics, gap_tail
from qurl.losses import explained_variance
from qurl.ops.pooling import Spread, alone, spreads, summarize


def on_ranks(function, parts):
    """What each of several threads finds, which exchange items as ranks do."""
    items, barrier = [None] * len(parts), threading.Barrier(len(parts))

    def call(rank):
        def pool(item):
            items[rank] = item
            barrier.wait(10)
            found = list(items)
            barrier.wait(10)
            return found

        return function(*parts[rank], pool=pool)

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(call, range(len(parts))))


def split(*tensors):
    """Rows 0 and 1, none, and the others."""
    return [tuple(x[rows] for x in tensors) for rows in (slice(2), slice(2, 2), slice(2, None))]


def test_by_hand():
    assert spreads({"x": torch.tensor([1.0, 2.0, 6.0])})["x"] == Spread(3, 3.0, 14.0, 1.0, 6.0)
    joined = Spread(1, 1.0, 0.0, 1.0, 1.0).join(Spread(2, 4.0, 8.0, 2.0, 6.0))
    assert joined == Spread(3, 3.0, 14.0, 1.0, 6.0)
    columns = dict.fromkeys(("a/max", "a_min", "a_std", "maximal"), torch.tensor([1.0, 2.0, 6.0]))
    found = summarize({**columns, "empty": torch.zeros(0)})
    expected = {"a/max": 6.0, "a_min": 1.0, "a_std": math.sqrt(14 / 3), "maximal": 3.0}
    assert found == pytest.approx(expected)


def make(rows=5, width=4):
    draw = torch.Generator().manual_seed(0)
    values, returns = (torch.randn(rows, width, generator=draw) for _ in range(2))
    mask = (torch.rand(rows, width, generator=draw) < 0.7).float()
    return values, returns, mask


def test_parts_are_the_whole():
    values, returns, mask = make()
    expected = explained_variance(values, returns, mask)
    found = on_ranks(explained_variance, split(values, returns, mask))
    assert found == pytest.approx([expected] * 3)
    parts = torch.cat(on_ranks(whiten, split(values, mask)))
    torch.testing.assert_close(parts, whiten(values, mask))


def test_metrics_of_parts_are_those_of_the_whole():
    batch = random_batch(tiny_policy(), rows=6)
    sampled, mask = batch.mask, batch.mask.clone()
    mask[0] = 0  # a row that was rejected
    batch = batch.replace(mask=mask)
    options = {"cap": 1.1, "batch_normalize": True}

    def describe(own, before, pool=alone):
        metrics = correction_metrics(own, before[:, : own.mask.shape[1]], pool=pool, **options)
        return metrics | {"tail": gap_tail(own, 0.1, pool)}

    parts = [torch.tensor(rows, dtype=torch.int64) for rows in ([0, 3], [], [1, 2, 4, 5])]
    found = on_ranks(describe, [(batch.select(rows), sampled[rows]) for rows in parts])
    assert found == [pytest.approx(describe(batch, sampled), rel=1e-6)] * 3
