"""The local engine: admit, prefill, reserve, decode, sample, until every request has finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qurl.errors import EngineError
from qurl.rollout.canary import canary_bound, canary_ids, score_with, verify
from qurl.rollout.checks import check_finite, check_prompts
from qurl.rollout.local.cache import SCRATCH_PAGE, PagePool, allocate_kv, copy_pages_
from qurl.rollout.local.decoder import ROWS, Rotations, decode, prefill, table_width, to_logits
from qurl.rollout.local.scheduler import Admission, Group, Request, Scheduler
from qurl.rollout.local.weights import Weights
from qurl.rollout.sampler import RowParams, request_key, sample, uniform
from qurl.rollout.stop import StopRule
from qurl.types import Problem, Rollout, SamplingParams, SyncReport

PREFILL_TOKENS = 8192
"""Most prompt tokens in one forward; a longer prompt goes alone."""
KV_BYTES_CPU = 4 * 2**30
"""Largest cache that `kv_tokens = 0` takes on a CPU; on a GPU it is a share of the free memory."""
KV_SHARE_CUDA = 0.8


class LocalEngine:
    """Samples from a quantized copy of a Llama-family model, in the trainer's process."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        quant: str = "none",
        max_batch: int = 256,
        page_size: int = 16,
        kv_tokens: int = 0,
        dtype: torch.dtype | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`dtype` None: float32 on a CPU, bfloat16 on a GPU.

        `on_progress(num_completions, num_tokens)` is called when completions have finished.
        """
        device = next(model.parameters()).device
        default = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.quant = quant
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.page_size = page_size
        self.kv_tokens = kv_tokens
        self.on_progress = on_progress
        self.version = 0
        self.num_preemptions = 0
        self.weights = Weights(model, quant, dtype or default, device)
        self._rotations = Rotations.up_to(1, self.weights)
        self._kv: Tensor | None = None
        self._model: Any = model
        self.sync(model, version=0)

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into the engine's buffers, in place, and verify them."""
        start = time.perf_counter()
        flip_frac = self.weights.load_(model)
        self._model, self.version = model, version
        ids = canary_ids(model)
        gap = verify(
            score_with(model, ids),
            self.score(ids),
            bound=canary_bound(self.quant, self.weights.dtype),
            version=version,
        )
        self.weights.check(model, version)
        seconds = time.perf_counter() - start
        return SyncReport(version, seconds, self.weights.num_bytes, flip_frac, True, gap)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1, by prefill."""
        self._extend_rotations(len(token_ids))
        hidden = prefill(self.weights, self._rotations, [token_ids])
        logprobs = to_logits(self.weights, hidden[:-1]).log_softmax(-1)
        targets = torch.tensor(token_ids[1:], device=logprobs.device)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1)

    @torch.no_grad()
    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """`params.group_size` completions of each problem, in order."""
        check_prompts(problems, params, self._model)
        stop = StopRule.of(self._model, self.tokenizer, params)
        if not problems:
            return []
        groups = [_make_group(problem, params) for problem in problems]
        requests = [request for group in groups for request in group]
        scheduler = Scheduler(requests, self._prepare_pool(requests, params), self.max_batch)
        row_params = RowParams.stack([params], self.weights.device)
        while scheduler.has_work:
            self._prefill(scheduler.admit())
            self._step(scheduler.reserve(), row_params)
            if self._retire(scheduler, stop) and self.on_progress:
                finished = [r for r in requests if r.finish]
                self.on_progress(len(finished), sum(len(r.token_ids) for r in finished))
        self.num_preemptions += scheduler.num_preemptions
        self._kv = None  # the trainer needs the memory for gradients and activations
        return [
            Rollout(
                problem,
                [stop.complete(r.token_ids, r.logprobs, r.finish) for r in group],  # type: ignore[arg-type]
                self.version,
                params.temperature,
            )
            for problem, group in zip(problems, groups, strict=True)
        ]

    def _prefill(self, admission: Admission) -> None:
        """Compute the keys and values of admitted prompts, several per forward, then copy pages."""
        batch: list[tuple[list[int], list[int]]] = []
        for job in admission.prefills:
            if batch and sum(len(t) for t, _ in [*batch, job]) > PREFILL_TOKENS:
                self._prefill_batch(batch)
                batch = []
            batch.append(job)
        if batch:
            self._prefill_batch(batch)
        assert self._kv is not None
        copy_pages_(self._kv, admission.copies)

    def _prefill_batch(self, batch: Sequence[tuple[list[int], list[int]]]) -> None:
        prompts, tables = zip(*batch, strict=True)
        prefill(self.weights, self._rotations, prompts, self._kv, tables)

    def _step(self, running: Sequence[Request], row_params: RowParams) -> None:
        """One more token for every running request."""
        kv, device = self._kv, self.weights.device
        assert kv is not None
        padding = -len(running) % ROWS
        width = table_width(max(len(r.pages) for r in running), self.page_size)
        table = [r.pages + [SCRATCH_PAGE] * (width - len(r.pages)) for r in running]
        table += [[SCRATCH_PAGE] * width] * padding
        columns = [(r.last_token, r.num_tokens - 1, r.key, len(r.token_ids)) for r in running]
        rows = F.pad(torch.tensor(columns), (0, 0, 0, padding)).to(device)
        tokens, positions, keys, counters = rows.unbind(1)
        logits = decode(
            self.weights, self._rotations, kv, tokens, positions, torch.tensor(table).to(device)
        )
        drawn, logprobs = sample(logits, uniform(keys, counters), row_params)
        # Shorter than the padded batch on purpose.
        results = zip(running, drawn.tolist(), logprobs.tolist(), strict=False)
        for request, token, logprob in results:
            request.token_ids.append(token)
            request.logprobs.append(logprob)

    def _retire(self, scheduler: Scheduler, stop: StopRule) -> int:
        """Let finished requests leave the batch; returns how many."""
        num_before = len(scheduler.running)
        for request in list(scheduler.running):
            check_finite(request.logprobs[-1], request.problem, len(request.logprobs) - 1)
            request.finish = stop.finish(request.token_ids)
            if request.finish:
                scheduler.finish(request)
        return num_before - len(scheduler.running)

    def _prepare_pool(self, requests: Sequence[Request], params: SamplingParams) -> PagePool:
        """A cache for these requests, held until they have finished."""
        longest = max(requests, key=lambda r: r.num_tokens)
        # The last token is never cached.
        num_tokens = longest.num_tokens + params.max_tokens - 1
        self._extend_rotations(num_tokens)
        num_pages = self._choose_num_pages(len(requests), -(-num_tokens // self.page_size))
        if num_pages * self.page_size < num_tokens:
            raise EngineError(
                f"problem {longest.problem.id!r} needs {num_tokens} tokens of KV cache (prompt "
                f"{longest.num_tokens} and max_tokens {params.max_tokens}), but the cache holds "
                f"{num_pages * self.page_size} (kv_tokens = {self.kv_tokens}, page_size = "
                f"{self.page_size}); raise rollout.kv_tokens or lower sampling.max_tokens"
            )
        weights = self.weights
        self._kv = allocate_kv(
            weights.arch, num_pages, self.page_size, weights.dtype, weights.device
        )
        return PagePool(num_pages, self.page_size)

    def _choose_num_pages(self, num_requests: int, pages_each: int) -> int:
        """Capacity: `kv_tokens`, or room for a full batch as far as memory permits."""
        if self.kv_tokens:
            return self.kv_tokens // self.page_size
        # One more page each, for prompts that are held while part of their group waits.
        wanted = min(self.max_batch, num_requests) * (pages_each + 1)
        arch, itemsize = self.weights.arch, self.weights.dtype.itemsize
        page_bytes = 2 * arch.num_layers * self.page_size * arch.num_kv_heads * arch.head_dim
        return min(wanted, self._kv_bytes_limit() // (page_bytes * itemsize))

    def _kv_bytes_limit(self) -> int:
        if self.weights.device.type == "cpu":
            return KV_BYTES_CPU
        device = self.weights.device
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(KV_SHARE_CUDA * (free + cached))

    def _extend_rotations(self, length: int) -> None:
        if length > len(self._rotations):
            self._rotations = Rotations.up_to(length, self.weights)


def _make_group(problem: Problem, params: SamplingParams) -> list[Request]:
    group = Group(num_unadmitted=params.group_size)
    return [
        Request(problem, group, request_key(params.seed, problem.id, sample))
        for sample in range(params.group_size)
    ]
