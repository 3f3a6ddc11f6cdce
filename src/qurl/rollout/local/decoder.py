"""The forward pass of the Llama family, on packed tokens and on paged keys and values.

One code path for CPU and GPU: what differs are the operations (`qurl.rollout.local.ops`). The
residual stream x is FP32 and updated in place; `delta` is what the next norm adds to it.

Shapes: N packed tokens, B sequences, P pages of a sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl.errors import EngineError
from qurl.rollout.local.cache import KVCache
from qurl.rollout.local.kv_range import KVRange
from qurl.rollout.local.ops import Ops
from qurl.rollout.local.reference import KEYS, ReferenceOps
from qurl.rollout.local.weights import Weights

PREFILL_TOKENS = 8192
"""Most prompt tokens in one forward; a longer prompt goes alone."""


def choose_ops(weights: Weights, *, deterministic: bool = False, unified: bool = False) -> Ops:
    """Triton's on a GPU, torch's on a CPU."""
    if weights.device.type == "cuda":
        try:
            from qurl.rollout.local.fused import FusedOps
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise EngineError(
                "the local engine needs Triton on a GPU, and it is not installed; install triton, "
                'or set rollout.engine = "hf"'
            ) from error
        return FusedOps(weights, deterministic=deterministic, unified=unified)
    if deterministic and torch.get_num_threads() > 1:
        raise EngineError(
            "rollout.deterministic = true needs threads = 1 on a CPU, and torch has "
            f"{torch.get_num_threads()}: with more, attention depends on the batch in its last bits"
        )
    return ReferenceOps(weights)


def prefill(
    ops: Ops,
    prompts: Sequence[Sequence[int]],
    cache: KVCache | None = None,
    tables: Sequence[Sequence[int]] = (),
    kv_range: KVRange | None = None,
) -> Tensor:
    """Final hidden states [N, hidden] of packed prompts, normed; fills the pages of `tables`.

    A cache of codes rounds the keys and values that queries see. `kv_range` learns from them
    unrounded, so without a cache.
    """
    assert cache is None or kv_range is None
    weights, lengths = ops.weights, [len(p) for p in prompts]

    def packed(x: Tensor) -> Tensor:
        return _pad(x, ops.row_multiple).to(weights.device)

    tokens = packed(torch.tensor([t for p in prompts for t in p]))
    positions = packed(torch.cat([torch.arange(n) for n in lengths]))
    slots = None if cache is None else packed(_slots(lengths, tables, cache.page_size))
    x, delta = weights.embedding[tokens].float(), None
    for index, layer in enumerate(weights.layers):
        h = ops.input_norm(layer, x, delta)
        qkv = ops.project(layer.qkv, h)
        pages = cache and cache.layer(index, slots)
        q, k, v = ops.rotate(qkv, layer, positions, pages, keep_kv=True)
        if kv_range is not None:
            kv_range.observe_(index, k[: sum(lengths)], v[: sum(lengths)])
        h = ops.attend_prompts(layer, q, k, v, lengths)
        delta = ops.mlp(layer, x, ops.project((layer.o,), h))
    return ops.final_norm(x, delta)[: sum(lengths)]


def prefill_jobs(ops: Ops, cache: KVCache, jobs: Iterable[tuple[list[int], list[int]]]) -> None:
    """Compute keys and values of (tokens, pages) each, several jobs per forward."""
    waiting = deque(jobs)
    while waiting:
        batch = [waiting.popleft()]
        room = PREFILL_TOKENS - len(batch[0][0])
        while waiting and len(waiting[0][0]) <= room:
            room -= len(waiting[0][0])
            batch.append(waiting.popleft())
        prompts, tables = zip(*batch, strict=True)
        prefill(ops, prompts, cache, tables)


def decode(ops: Ops, cache: KVCache, tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Logits [B, V] after one token [B] per sequence at positions [B], with pages table [B, P].

    Writes the tokens' keys and values. B must be a multiple of the operations' `row_multiple`; a
    padding row is position 0 of the scratch page.
    """
    x, slots = ops.begin(tokens, positions, table, cache.page_size)
    delta = None
    for index, layer in enumerate(ops.weights.layers):
        h = ops.input_norm(layer, x, delta)
        qkv = ops.project(layer.qkv, h)
        pages = cache.layer(index, slots)
        (q,) = ops.rotate(qkv, layer, positions, pages, keep_kv=False)
        h = ops.attend_pages(layer, q, pages, table, positions)
        delta = ops.mlp(layer, x, ops.project((layer.o,), h))
    return ops.head(ops.final_norm(x, delta))


def decode_sequence(ops: Ops, cache: KVCache, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] after each token of one sequence, whose pages are 1, 2, ... of the cache.

    All tokens are rows of one decode step. That is sound because in each layer the keys of all rows
    are stored before any of them attends.
    """
    length, page_size = len(token_ids), cache.page_size
    num_pages = -(-length // page_size)
    tokens = _pad(torch.tensor(token_ids), ops.row_multiple)
    positions = _pad(torch.arange(length), ops.row_multiple)
    table = torch.zeros(len(tokens), table_width(num_pages, page_size), dtype=torch.int32)
    table[:length, :num_pages] = torch.arange(1, 1 + num_pages)
    tokens, positions, table = (x.to(cache.data.device) for x in (tokens, positions, table))
    return decode(ops, cache, tokens, positions, table)[:length]


def table_width(num_pages: int, page_size: int) -> int:
    """Columns of a page table whose number of keys is a multiple of KEYS."""
    step = KEYS // math.gcd(KEYS, page_size)
    return -(-num_pages // step) * step


def _slots(lengths: Sequence[int], tables: Sequence[Sequence[int]], page_size: int) -> Tensor:
    """Flat cache slots of packed prompts, position by position."""
    offsets = torch.arange(max(lengths))
    return torch.cat(
        [
            torch.tensor(table)[offsets[:n] // page_size] * page_size + offsets[:n] % page_size
            for n, table in zip(lengths, tables, strict=True)
        ]
    )


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Zeros up to the next multiple; token 0 at position 0, or slot 0 of the scratch page."""
    return F.pad(x, (0, -x.shape[0] % multiple))
