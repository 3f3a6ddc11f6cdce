"""The local engine: a quantized copy of the model in the trainer's process, and what it samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import ConfigError, EngineError
from qurl.ops.device import default_dtype
from qurl.ops.target import Target
from qurl.rollout.canary import canary_bound, canary_ids, score_with, verify
from qurl.rollout.checks import check_prompts
from qurl.rollout.engine import generate
from qurl.rollout.local.cache import CacheMemory, CacheOptions, PagePool
from qurl.rollout.local.decoder import Decoder, choose_ops, decode_sequence, prefill
from qurl.rollout.local.generation import Generation, Resources
from qurl.rollout.local.graphs import Stepper
from qurl.rollout.local.kv_range import KVRange
from qurl.rollout.local.ops import Rotations
from qurl.rollout.local.requests import LengthHistory
from qurl.rollout.local.scheduler import GPU_PATIENCE
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
        max_batch: int = 256,
        page_size: int = 0,
        kv_tokens: int = 0,
        kv_memory_frac: float = 0.8,
        release_kv: bool = False,
        deterministic: bool = False,
        cuda_graphs: bool = True,
        depth: int | None = None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Options are those of `qurl.config.RolloutConfig` and `QuantConfig.kv`, and these:

        `cuda_graphs` False launches every kernel of a decode step by itself, for debugging.
        `depth` steps are launched before the first of them is read; None: 1 on a GPU, 0 on a CPU.
        `dtype` of activations and cache; None: `default_dtype`.
        `compute_dtype`: see `build_engine`.
        `on_progress(num_completions, num_tokens)` is called now and then, and at the end. Tokens
        of unfinished completions count. It may interrupt the stream, but not sync or generate.
        """
        device = next(model.parameters()).device
        is_cuda = device.type == "cuda"
        page_size = page_size or (PAGE_SIZE_CUDA if is_cuda else PAGE_SIZE)
        is_fp8 = kv == "fp8"
        cache = CacheOptions(page_size, kv_tokens, kv_memory_frac, is_fp8, is_released=release_kv)
        _check_options(kv, max_batch, depth, cache)
        _check_device(kv, device)
        self.quant = quant
        self.kv = kv
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.deterministic = deterministic
        self.patience = GPU_PATIENCE if is_cuda else 0.0
        """How long requests wait for company; see `Scheduler`."""
        self.on_progress = on_progress
        self.version = 0
        self.num_preemptions = 0
        self.lengths = LengthHistory()
        dtype = dtype or default_dtype(device)
        self.weights = Weights(model, quant, dtype, device, compute_dtype=compute_dtype)
        self._sync = WeightSync(self.weights)
        self.memory = CacheMemory(self.weights.arch, dtype, device, cache)
        depth, use_graphs = int(is_cuda) if depth is None else depth, is_cuda and cuda_graphs
        self.stepper = Stepper(
            max_batch, device, use_graphs=use_graphs, is_bucketed=is_cuda, depth=depth
        )
        self._ops = choose_ops(self.weights, deterministic=deterministic)
        self._rotations = Rotations.up_to(1, self.weights)
        self._active: Generation | None = None
        self._model: Any = model
        self.sync(model, version=0)

    @property
    def num_steps(self) -> int:
        """Decode steps so far."""
        return self.stepper.num_launched

    def sync(self, source: nn.Module, *, version: int) -> SyncReport:
        """Quantize the trainer's weights into the engine's buffers, in place, and verify them.

        A stream under way gives its pages back, and goes on with the new weights.
        """
        self._release_active()
        self._is_sound = False
        start = self._clock()
        flip_frac = self._sync.load_(source)
        loaded = self._clock()
        gap = self._verify(source, version)
        self._model, self.version, self._is_sound = source, version, True
        num_bytes = sum(p.num_bytes for p in self.weights.projections())
        seconds, verify_seconds = loaded - start, self._clock() - loaded
        return SyncReport(version, seconds, num_bytes, flip_frac, True, gap, verify_seconds)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], kv_range: KVRange | None = None) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1, by prefill.

        `kv_range` learns from the keys and values.
        """
        self._extend_rotations(len(token_ids))
        hidden = prefill(self.weights, self._ops, self._rotations, [token_ids], kv_range=kv_range)
        return _logprobs(self._ops.head(hidden[:-1], self.weights.lm_head), token_ids[1:])

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
            vocabulary=self.weights.lm_head.shape[0],
            max_batch=self.max_batch,
            patience=self.patience,
            saves_pages=self.deterministic,
            check=lambda problems: check_prompts(problems, params, self._model),
            acquire=self._acquire,
            release=self._release,
            get_version=lambda: self.version,
            report=lambda *counts: self.on_progress(*counts) if self.on_progress else None,
            count_preemptions=self._count_preemptions,
        )
        return Generation(params, resources)

    def _acquire(self, generation: Generation, problem: Problem, num_sequences: int) -> PagePool:
        """A cache and rows for a generation, until it releases them."""
        if not self._is_sound:
            raise EngineError(
                f"the weights of version {self.version} were overwritten by a sync that failed; "
                "sync again before sampling"
            )
        if self._active is not generation:
            self._release_active()
        self._release(generation)
        params = generation.params
        # The last token is never cached.
        num_tokens = len(problem.prompt_ids) + params.max_tokens - 1
        num_pages = self.memory.choose_num_pages(num_sequences, num_tokens)
        self._check_room(problem, params, num_pages)
        self._extend_rotations(num_tokens)
        cache = self.memory.acquire(num_pages)
        decoder = Decoder(self.weights, self._ops, self._rotations, cache)
        self.stepper.prepare(decoder, num_tokens, params)
        self._active = generation
        return PagePool(num_pages, cache.page_size)

    def _release(self, generation: Generation) -> None:
        """Take the cache and the rows back, if the generation has them."""
        if self._active is generation:
            self._active = None
            self.stepper.forget()
            self.memory.release()

    def _release_active(self) -> None:
        if self._active is not None:
            self._active.release()

    def _count_preemptions(self, number: int) -> None:
        self.num_preemptions += number

    def _check_room(self, problem: Problem, params: SamplingParams, num_pages: int) -> None:
        options, num_prompt = self.memory.options, len(problem.prompt_ids)
        num_tokens = num_prompt + params.max_tokens - 1
        if num_pages * options.page_size >= num_tokens:
            return
        room, remedy = f"{self.memory.available_bytes() / 2**30:.2f} GiB free", "rollout.kv_tokens"
        if self.weights.device.type == "cuda":
            room = f"kv_memory_frac = {options.memory_frac:g} of {room}"
            remedy += " or rollout.kv_memory_frac"
        raise EngineError(
            f"problem {problem.id!r} needs {num_tokens} tokens of KV cache (prompt {num_prompt} "
            f"and max_tokens {params.max_tokens}), but the cache holds "
            f"{num_pages * options.page_size} (kv_tokens = {options.kv_tokens}, page_size = "
            f"{options.page_size}; with kv_tokens = 0 what max_batch = {self.max_batch} sequences "
            f"need, within {room}); raise {remedy}, or lower sampling.max_tokens"
        )

    def _verify(self, model: nn.Module, version: int) -> float:
        """The canary's mean |log-prob gap|; raises if the copy is not sound."""
        ids, dtypes = canary_ids(model), (self.weights.dtype, next(model.parameters()).dtype)
        expected = score_with(model, ids)
        bound = canary_bound(self.quant, *dtypes)
        gap = verify(expected, self._score_canary(ids), bound=bound, version=version)
        verify(
            expected,
            self._decode_canary(ids),
            bound=canary_bound(self.quant, *dtypes, kv=self.kv),
            version=version,
            path="decoded with the KV cache",
        )
        self._sync.check(version)
        return gap

    def _score_canary(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs by prefill; the keys and values give an FP8 cache its range."""
        if self.memory.scale is None:
            return self.score(token_ids)
        sample = KVRange.empty(self.weights)
        scores = self.score(token_ids, sample)
        self.memory.set_range_(sample)
        return scores

    @torch.no_grad()
    def _decode_canary(self, token_ids: Sequence[int]) -> Tensor:
        """The same log-probs from what samples the tokens: the decode step and its cache."""
        *prefix, _ = token_ids
        cache = self.memory.make_small(len(prefix))
        logits = decode_sequence(self.weights, self._ops, self._rotations, cache, prefix)
        return _logprobs(logits, token_ids[1:])

    def _extend_rotations(self, length: int) -> None:
        if length > len(self._rotations):
            self._rotations = Rotations.up_to(length, self.weights)

    def _clock(self) -> float:
        """Seconds, once the device is idle."""
        if self.weights.device.type == "cuda":
            torch.cuda.synchronize(self.weights.device)
        return time.perf_counter()


def _check_options(kv: str, max_batch: int, depth: int | None, cache: CacheOptions) -> None:
    """Raise a ConfigError that names every option whose value is not allowed."""
    page_size, kv_tokens, kv_memory_frac = cache.page_size, cache.kv_tokens, cache.memory_frac
    rules = {
        f"kv = {kv!r} is not one of none, fp8": kv in ("none", "fp8"),
        f"max_batch = {max_batch} must be at least 1": max_batch >= 1,
        f"page_size = {page_size} must be at least 0 (0 = by device)": page_size >= 0,
        f"kv_tokens = {kv_tokens} must be at least 0 (0 = as needed)": kv_tokens >= 0,
        f"kv_memory_frac = {kv_memory_frac} must be in (0, 1)": 0 < kv_memory_frac < 1,
        f"depth = {depth} must be at least 0, or None": depth is None or depth >= 0,
    }
    if mistakes := [mistake for mistake, is_kept in rules.items() if not is_kept]:
        raise ConfigError("; ".join(mistakes))


def _check_device(kv: str, device: torch.device) -> None:
    target = Target.of(device)
    if kv == "fp8" and not target.has_fp8:
        assert target.capability is not None, "a CPU emulates FP8"
        major, minor = target.capability
        raise EngineError(
            f"quant.kv = 'fp8' needs a GPU of compute capability 8.9 or later, and {target.name} "
            f"has {major}.{minor}; set quant.kv = 'none'"
        )


def _logprobs(logits: Tensor, targets: Sequence[int]) -> Tensor:
    """Log-probs [T] of tokens under logits [T, V]."""
    index = torch.tensor(targets, device=logits.device)
    return logits.float().log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)
