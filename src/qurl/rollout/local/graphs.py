"""Decode steps over fixed buffers: computed at once on a CPU, replayed CUDA graphs on a GPU.

The state of the rows lies on the device, and each step moves it on to the next token. So the host
can launch step n + 1 before it has seen what step n sampled. A step with drafts takes several
tokens of a row. The host writes these drafts, so it waits for each such step.

Shapes: B rows of the buffers, P pages of a row, N tokens of a step with drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qurl.errors import EngineError
from qurl.rollout.local.cache import KVCache, upload
from qurl.rollout.local.decoder import decode, table_width
from qurl.rollout.local.ops import Ops
from qurl.rollout.sampler import RowParams
from qurl.types import SamplingParams

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
ROW_STEP = 512
"""Between the buckets beyond the last of `ROW_BUCKETS`."""
FEWEST_KEYS = 1024
"""Width buckets are this many keys, twice as many, and so on."""
TOKEN, POSITION, COUNTER, KEY, ACTIVE, OWNER = range(6)


def row_bucket(num_rows: int) -> int:
    """Rows of the smallest graph that has so many."""
    return next((b for b in ROW_BUCKETS if num_rows <= b), _round_up(num_rows, ROW_STEP))


def key_bucket(num_keys: int) -> int:
    """Keys of the narrowest graph that has so many."""
    return max(FEWEST_KEYS, 1 << (num_keys - 1).bit_length())


class Rows:
    """The state of the batch on the device.

    An unused row is all zero: token 0 at position 0 of the scratch page. It stays so because it is
    not active.
    """

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        self.numbers = torch.zeros(5, num_rows, dtype=torch.int64, device=device)
        """TOKEN to decode, its POSITION, COUNTER and KEY of the random number, ACTIVE (0 or 1)."""
        self.table = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
        self.output = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        """Tokens, and the bits of their FP32 log-probs: one copy brings both to the host."""
        self._num_used = 0

    def start_(self, rows: Sequence[int], numbers: Sequence[tuple[int, int, int, int]]) -> None:
        """Let rows begin with token, position, counter and key each."""
        columns = torch.tensor([(row, *n, 1) for row, n in zip(rows, numbers, strict=True)])
        columns = upload(columns.T.contiguous(), self.numbers.device)
        self._num_used = max(self._num_used, 1 + max(rows))
        self.numbers.index_copy_(1, columns[0], columns[1:])

    def move_(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows, (source, target) each. Only the device knows their newest token."""
        if moves:
            sources, targets = upload(torch.tensor(moves).T.contiguous(), self.numbers.device)
            self.numbers.index_copy_(1, targets, self.numbers.index_select(1, sources))

    def keep_(self, num_rows: int) -> None:
        """Empty all rows but the first ones, so that they can be padding."""
        if self._num_used > num_rows:
            self.numbers[:, num_rows : self._num_used] = 0
            self.table[num_rows : self._num_used] = 0
        self._num_used = num_rows

    def write_table_(self, table: np.ndarray) -> None:
        """The pages [rows, pages] of the first rows."""
        rows, columns = table.shape
        self.table[:rows, :columns] = upload(torch.from_numpy(table), self.table.device)


Step = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Waits for a launched step, and for no later one; gives tokens and log-probs of its rows."""


class Stepper:
    """Launches decode steps and hands out their results."""

    def __init__(self, ops: Ops, max_batch: int, max_drafted: int = 0) -> None:
        """`max_drafted` tokens are the most of a step with drafts."""
        self.ops, self.max_batch, self.max_drafted = ops, max_batch, max_drafted
        self.device = ops.weights.device
        self.use_graphs = self.is_bucketed = self.device.type == "cuda"
        """Rows and keys are rounded up to few sizes, so that there are few graphs."""
        self.depth = int(self.device.type == "cuda")
        """Steps that are launched before the results of the first of them are read."""
        self.rows = Rows(0, 0, self.device)
        size = _round_up(max_drafted, ops.row_multiple)
        self._drafted = torch.zeros(6, size, dtype=torch.int64, device=self.device)
        """As `Rows.numbers`, for each token of a step with drafts, and the row that OWNs it."""
        self._drawn = torch.zeros(2, size, dtype=torch.int32, device=self.device)
        self.num_launched = 0
        self._cache: KVCache | None = None
        self._params = RowParams.stack([SamplingParams()], self.device)
        self._graphs: dict[tuple[int, int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._addresses: tuple[object, ...] = ()
        self._pool: Any = None
        self._stream = torch.cuda.Stream(self.device) if self.use_graphs else None
        self._results: list[Tensor] = []

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "the stepper has not been prepared"
        return self._cache

    def forget(self) -> None:
        """Let go of the cache. Graphs stay: they hold addresses only."""
        self._cache = None

    def prepare(self, cache: KVCache, num_tokens: int, params: SamplingParams) -> None:
        """Empty rows for sequences of up to `num_tokens`, sampled like this."""
        self._cache = cache
        num_rows = _round_up(self.max_batch, self.ops.row_multiple)
        num_pages = -(-_round_up(num_tokens, FEWEST_KEYS) // cache.page_size)
        num_columns = table_width(num_pages, cache.page_size)
        if self.rows.table.shape[0] != num_rows or self.rows.table.shape[1] < num_columns:
            self.rows = Rows(num_rows, num_columns, self.device)
            # A ring: while the host reads one, the steps in flight write the others.
            shape, is_pinned = (self.depth + 1, 2, num_rows), self.device.type == "cuda"
            self._results = list(torch.empty(shape, dtype=torch.int32, pin_memory=is_pinned))
        self.rows.keep_(0)
        self._set_params(params)
        if self.use_graphs:
            rows = self.rows
            addresses = (*self.ops.weights.addresses(), *cache.addresses())
            addresses += (rows.numbers.data_ptr(), rows.table.data_ptr(), rows.table.shape)
            if addresses != self._addresses:
                self._graphs.clear()
                self._pool = torch.cuda.graph_pool_handle()
            self._addresses = addresses

    def launch(self, num_rows: int, num_keys: int) -> Step:
        """One more token for the first rows, none of which sees more than `num_keys` keys.

        What the step gives is valid until `depth` more have been launched.
        """
        self._run(*self._padded(num_rows, num_keys, self.max_batch))
        results = self._results[self.num_launched % len(self._results)]
        self.num_launched += 1
        results.copy_(self.rows.output, non_blocking=True)
        is_done = torch.cuda.Event() if self.device.type == "cuda" else None
        if is_done is not None:
            is_done.record()

        def read() -> tuple[np.ndarray, np.ndarray]:
            if is_done is not None:
                is_done.synchronize()
            tokens, logprobs = results.numpy()[:, :num_rows]
            return tokens, logprobs.view(np.float32)

        return read

    def verify(self, numbers: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token after each of the given ones: tokens [N] and their log-probs [N].

        `numbers` [6, N] has the tokens of a row one behind the other, the newest known one first.
        Keys of all of them are stored before any of them attends, so each sees those before it.
        The state of the rows stays; only their pages are used.
        """
        count = numbers.shape[1]
        rows, columns = self._padded(count, num_keys, self.max_drafted)
        padded = np.zeros((6, rows), np.int64)
        padded[:, :count] = numbers
        self._drafted[:, :rows] = upload(torch.from_numpy(padded), self.device)
        self._run(rows, columns, is_drafted=True)
        self.num_launched += 1
        tokens, logprobs = self._drawn[:, :count].cpu().numpy()
        return tokens, logprobs.view(np.float32)

    def _run(self, rows: int, columns: int, *, is_drafted: bool = False) -> None:
        if self.use_graphs:
            self._graph(rows, columns, is_drafted).replay()
        else:
            self._compute(rows, columns, is_drafted)

    def _padded(self, num_rows: int, num_keys: int, most_rows: int) -> tuple[int, int]:
        """Rows and pages of the step."""
        page_size = self.cache.page_size
        columns = table_width(-(-num_keys // page_size), page_size)
        if self.is_bucketed:
            num_rows = min(row_bucket(num_rows), most_rows)
            columns = -(-key_bucket(num_keys) // page_size)
        columns = min(columns, self.rows.table.shape[1])
        return _round_up(num_rows, self.ops.row_multiple), columns

    def _compute(self, rows: int, columns: int, is_drafted: bool) -> None:
        """Decode and sample; without drafts, also move the state on to the next token."""
        table = self.rows.table[:, :columns]
        if is_drafted:
            numbers, output = self._drafted[:, :rows], self._drawn
            # Padding belongs to no row: its pages are the scratch page.
            table = table.index_select(0, numbers[OWNER]).mul_(numbers[ACTIVE, :, None])
        else:
            numbers, output, table = self.rows.numbers[:, :rows], self.rows.output, table[:rows]
        token, position, counter, key, active = numbers[: ACTIVE + 1]
        logits = decode(self.ops, self.cache, token, position, table)
        drawn, logprobs = self.ops.sample(logits, key, counter, self._params)
        output[0, :rows] = drawn
        output[1, :rows] = logprobs.float().view(torch.int32)
        if not is_drafted:
            torch.mul(drawn, active, out=token)
            numbers[POSITION : COUNTER + 1].add_(active)

    def _graph(self, rows: int, columns: int, is_drafted: bool) -> torch.cuda.CUDAGraph:
        key = (rows, columns, self._params.has_filter, is_drafted)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(rows, columns, is_drafted)
            except RuntimeError as error:
                raise EngineError(
                    f"the CUDA graph of a decode step of {rows} rows and {columns} pages cannot be "
                    f"captured: {error}; lower rollout.kv_memory_frac or rollout.max_batch if "
                    "memory is short"
                ) from error
        return self._graphs[key]

    def _capture(self, rows: int, columns: int, is_drafted: bool) -> torch.cuda.CUDAGraph:
        """Record one step. It runs once before: kernels cannot be compiled during a capture."""
        assert self._stream is not None
        main = torch.cuda.current_stream(self.device)
        numbers = self.rows.numbers.clone()
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                self._compute(rows, columns, is_drafted)
                # It wrote keys that the replay writes again, but it does not count as a step.
                self.rows.numbers.copy_(numbers)
        finally:
            main.wait_stream(self._stream)  # also what was launched before an exception
        graph = torch.cuda.CUDAGraph()
        # Other threads of the trainer may use the GPU meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._compute(rows, columns, is_drafted)
        return graph

    def _set_params(self, params: SamplingParams) -> None:
        """In place: graphs hold the addresses."""
        fresh = RowParams.stack([params], self.device)
        for name in ("temperature", "top_p", "top_k"):
            getattr(self._params, name).copy_(getattr(fresh, name))
        self._params = replace(self._params, has_filter=fresh.has_filter)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
