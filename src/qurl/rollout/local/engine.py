"""The local engine: a quantized copy of the model in the trainer's process, and what it samples."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import ConfigError, EngineError
from qurl.ops.device import default_dtype
from qurl.ops.target import Target
from qurl.quant.shipment import Packing, Shipment
from qurl.rollout.canary import Yardstick, as_shipment, canary_bound, canary_ids, verify
from qurl.rollout.engine import Asked, check_prompts, generate, token_logprobs
from qurl.rollout.local.cache import CacheMemory, CacheOptions, PagePool
from qurl.rollout.local.decoder import choose_ops, decode_sequence, prefill
from qurl.rollout.local.drafts import DraftCounts, Drafter, Pace, check_earlier
from qurl.rollout.local.generation import Generation, Resources
from qurl.rollout.local.graphs import Stepper
from qurl.rollout.local.kv_range import KVRange
from qurl.rollout.local.receive import Receiver
from qurl.rollout.local.requests import LengthHistory
from qurl.rollout.local.scheduler import GPU_PATIENCE, Scheduler
from qurl.rollout.local.sync import WeightSync
from qurl.rollout.local.weights import Weights
from qurl.rollout.stop import StopRule
from qurl.types import Problem, Rollout, SamplingParams, SyncReport

PAGE_SIZE, PAGE_SIZE_CUDA = 16, 64
"""What `page_size = 0` means: attention on a GPU reads 64 keys at once, fastest from one page."""


class LocalEngine:
    """Samples from a quantized copy of a Llama-family model, in the trainer's process."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        quant: str = "none",
        kv: str = "none",
        full_layers: int = 0,
        max_batch: int = 256,
        page_size: int = 0,
        kv_tokens: int = 0,
        kv_memory_frac: float = 0.8,
        release_kv: bool = False,
        deterministic: bool = False,
        unified: bool = False,
        draft_tokens: int = 0,
        draft_window: str = "double_halve",
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        is_empty: bool = False,
        scales: Mapping[str, Tensor] | None = None,
        has_noise: bool = False,
    ) -> None:
        """Options are those of `RolloutConfig`, `kv` and `full_layers` of `QuantConfig`, and these:

        `page_size` in tokens; 0: by device.
        `dtype` of activations and cache; None: `default_dtype`.
        `compute_dtype`: see `build_engine`.
        `scales` of weights that every sync keeps, by projection (`quant.frozen_scales`).
        `has_noise`: norms get noise after a sync, so they are copies (`add_noise_`).
        `unified`: the trainer multiplies the same codes, so products must add up alike.
        `device` that computes; None: the model's.
        `is_empty`: the model only says what there is, and the first sync brings weights.
        `draft_tokens`: most tokens of a decode step with drafts from earlier responses, which
        `Stream.submit` takes; 0 = no drafts. `draft_window`: a name of `WINDOWS` (`drafts`).
        """
        device = device or next(model.parameters()).device
        is_cuda = device.type == "cuda"
        page_size = page_size or (PAGE_SIZE_CUDA if is_cuda else PAGE_SIZE)
        cache = CacheOptions(page_size, kv_tokens, kv_memory_frac, kv == "fp8", release_kv)
        _check_options(kv, max_batch, cache, Target.of(device))
        self.quant, self.kv, self.deterministic = quant, kv, deterministic
        self.tokenizer, self.max_batch = tokenizer, max_batch
        self.patience = GPU_PATIENCE if is_cuda else 0.0
        """How long requests wait for company; see `Scheduler`."""
        self.version = self.num_preemptions = 0
        self.kv_saturated_frac: float | None = None
        """Share of saturated codes in a sample of an FP8 cache, after the last generation."""
        self.lengths = LengthHistory()
        dtype = dtype or default_dtype(device)
        precision = {"compute_dtype": compute_dtype, "full_layers": full_layers}
        self.weights = Weights(model, quant, dtype, device, **precision)
        self.memory = CacheMemory(self.weights.arch, dtype, device, cache)
        self._ops = choose_ops(self.weights, deterministic=deterministic, unified=unified)
        pace = Pace() if is_cuda and draft_tokens else None
        self.drafter = Drafter(draft_tokens, draft_window, pace)
        self.stepper = Stepper(self._ops, max_batch, draft_tokens)
        self._sync = WeightSync(self.weights, scales, owns_norms=has_noise)
        self._receiver = Receiver(model, self.weights, full_layers)
        self._active: tuple[Generation, Scheduler] | None = None
        """Who has the pages."""
        self._yardstick = Yardstick()
        self._model: Any = model
        self._flaw = "no weights have arrived yet"
        """Why there is nothing to sample from; empty if there is."""
        if not is_empty:
            self.sync(model, version=0)

    @property
    def packing(self) -> Packing:
        """How the weights of a shipment are wanted."""
        return self._receiver.packing

    @property
    def num_steps(self) -> int:
        """Decode steps so far: a sign of life."""
        return self.stepper.num_launched

    def sync(self, source: nn.Module | Shipment, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into the engine's buffers, in place, and verify them.

        A stream under way gives its pages back, and goes on with the new weights.
        """
        if self._active is not None:
            self._active[0].release()
        self._flaw = f"the weights of version {self.version} were overwritten by a sync that failed"
        start = self._clock()
        is_shipped = not isinstance(source, nn.Module)
        flip_frac = self._receiver.load_(source) if is_shipped else self._sync.load_(source)
        loaded = self._clock()
        gap = self._verify(source, version)
        self._model, self.version = self._model if is_shipped else source, version
        self._flaw = ""
        num_bytes = sum(p.num_bytes for p in self.weights.projections())
        times = {"seconds": loaded - start, "verify_seconds": self._clock() - loaded}
        return SyncReport(
            version=version,
            bytes=num_bytes,
            code_flip_frac=flip_frac,
            verified=True,
            canary_gap=gap,
            kv_scales=copy.deepcopy(self.memory.scales),
            **times,
        )

    def add_noise_(self, sigma: float, seed: int) -> None:
        """Add N(0, sigma^2) to the norms that feed projections; the next sync takes it away."""
        self._sync.add_noise_(sigma, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1, by prefill."""
        if self.kv == "none":
            return self._score(token_ids)
        cache = self.memory.make_small(len(token_ids))
        return self._score(token_ids, cache, [range(1, cache.data.shape[2])])

    def _score(self, token_ids: Sequence[int], *prefill_options: Any) -> Tensor:
        self.weights.extend_rotations_(len(token_ids))
        hidden = prefill(self._ops, [token_ids], *prefill_options)
        return token_logprobs(self._ops.head(hidden[:-1]), token_ids[1:])

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """`params.group_size` completions of each problem, in order."""
        return generate(self, problems, params)

    def stream(self, params: SamplingParams) -> Generation:
        """Completions that are drawn like this; see `qurl.rollout.engine.Stream`.

        One stream at a time has pages. It gives them back when another one needs them, and computes
        keys and values again when it goes on.
        """
        resources = Resources(
            stepper=self.stepper,
            stop=StopRule.of(self._model, self.tokenizer, params),
            lengths=self.lengths,
            drafter=self.drafter,
            check=lambda asked: self._check(asked, params),
            acquire=self._acquire,
            release=self._release,
            get_version=lambda: self.version,
        )
        return Generation(params, resources)

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What drafts did so far; None if the engine makes none."""
        return dataclasses.replace(self.drafter.counts) if self.drafter.step_tokens else None

    def _check(self, asked: Sequence[Asked], params: SamplingParams) -> None:
        check_prompts([one.problem for one in asked], params, self._model)
        if self.drafter.step_tokens:
            vocabulary = self.weights.embedding.shape[0]
            for problem, _, earlier in asked:
                check_earlier(problem, earlier, vocabulary)

    def _acquire(self, generation: Generation, problem: Problem, num_sequences: int) -> Scheduler:
        """Pages and rows for a generation, until it releases them."""
        if self._flaw:
            raise EngineError(f"{self._flaw}; sync again before sampling")
        if self._active is not None and self._active[0] is not generation:
            self._active[0].release()
        self._release(generation)
        params = generation.params
        # The last token is never cached.
        num_tokens = len(problem.prompt_ids) + params.limit(problem) - 1
        num_pages = self.memory.choose_num_pages(num_sequences, num_tokens)
        self._check_room(problem, params.limit(problem), num_pages)
        self.weights.extend_rotations_(num_tokens)
        cache = self.memory.acquire(num_pages)
        pool = PagePool(num_pages, cache.page_size)
        save = cache.save if self.deterministic else None
        scheduler = Scheduler(pool, self.max_batch, patience=self.patience, save=save)
        self._active = generation, scheduler  # before what may fail: the generation gives it back
        self.stepper.prepare(cache, num_tokens, params)
        return scheduler

    def _release(self, generation: Generation) -> None:
        """Take the pages and rows back, if the generation has them."""
        if self._active is not None and self._active[0] is generation:
            scheduler = self._active[1]
            self.num_preemptions += scheduler.num_preemptions
            if self.kv == "fp8" and scheduler.sampled_slots:
                slots = scheduler.sampled_slots
                self.kv_saturated_frac = self.stepper.cache.saturated_frac(slots)
            self._active = None
            self.stepper.forget()
            self.memory.release()

    def _check_room(self, problem: Problem, max_tokens: int, num_pages: int) -> None:
        options, num_prompt = self.memory.options, len(problem.prompt_ids)
        needed, held = num_prompt + max_tokens - 1, num_pages * options.page_size
        if held < needed:
            available = self.memory.available_bytes() / 2**30
            raise EngineError(
                f"problem {problem.id!r} needs {needed} tokens of KV cache (prompt {num_prompt}, "
                f"max_tokens {max_tokens}), but it holds {held} (kv_tokens = {options.kv_tokens}; "
                f"0 = what fits into {options.memory_frac:g} of {available:.2f} GiB); raise "
                "rollout.kv_tokens or rollout.kv_memory_frac, or lower sampling.max_tokens"
            )

    @torch.no_grad()
    def _verify(self, source: nn.Module | Shipment, version: int) -> float:
        """The canary's mean |log-prob gap|; raises if the copy is not sound.

        It is scored by prefill without a cache, whose keys and values give an FP8 cache its range,
        and by what samples tokens: the decode step and its cache.
        """
        ids, shipment = canary_ids(self._model), as_shipment(source)
        dtypes = (self.weights.dtype, shipment.dtype)
        expected = shipment.score(ids, self.quant)
        # A base that the trainer has in the same codes leaves nothing to quantize.
        rounded = "none" if self.weights.has_shared_base else self.quant
        bound = canary_bound(rounded, *dtypes)
        sample = KVRange.empty(self.weights) if self.kv == "fp8" else None
        scores = self._score(ids, None, (), sample)
        judge = partial(verify, expected, version=version, yardstick=self._yardstick)
        gap = judge(scores, bound=bound)
        if sample is not None:
            self.memory.set_range_(sample)
        logits = decode_sequence(self._ops, self.memory.make_small(len(ids) - 1), ids[:-1])
        bound = canary_bound(rounded, *dtypes, kv=self.kv)
        judge(token_logprobs(logits, ids[1:]), bound=bound, path="decoded with the KV cache")
        (self._sync if isinstance(source, nn.Module) else self._receiver).check(version)
        return gap

    def _clock(self) -> float:
        """Seconds, once the device is idle."""
        if self.weights.device.type == "cuda":
            torch.cuda.synchronize(self.weights.device)
        return time.perf_counter()


def _check_options(kv: str, max_batch: int, cache: CacheOptions, target: Target) -> None:
    """Raise an error that names every option whose value is not allowed."""
    rules = {
        f"kv = {kv!r} is not one of none, fp8": kv in ("none", "fp8"),
        f"max_batch = {max_batch} must be at least 1": max_batch >= 1,
        f"page_size = {cache.page_size} must be at least 0 (0 = by device)": cache.page_size >= 0,
        f"kv_tokens = {cache.kv_tokens} must be at least 0 (0 = as needed)": cache.kv_tokens >= 0,
        f"kv_memory_frac = {cache.memory_frac} must be in (0, 1)": 0 < cache.memory_frac < 1,
    }
    if mistakes := [mistake for mistake, is_kept in rules.items() if not is_kept]:
        raise ConfigError("; ".join(mistakes))
    if kv == "fp8" and not target.has_fp8:
        capability = ".".join(map(str, target.capability or ()))
        raise EngineError(
            f"quant.kv = 'fp8' needs a GPU of compute capability 8.9 or later, and {target.name} "
            f"has {capability}; set quant.kv = 'none'"
        )
