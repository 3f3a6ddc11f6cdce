"""vLLM behind the engine's interface: started from a folder, updated in place, verified each time.

A sync packs the trainer's weights (`shipment`), hands them to vLLM's own weight update, and empties
its prefix cache. None of vLLM's known failures raises: scales freed under an INT8 kernel, experts
garbled by a reload, keys of older weights in the cache, weights left as they were. So the receiving
side (`qurl.integrations.vllm`) checks what arrives and what it becomes, and this side compares
log-probs of a prompt and of decoded tokens with the trainer's (`canary`).
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import EngineError, SyncError
from qurl.ops.device import default_dtype
from qurl.quant import get_format
from qurl.quant.shipment import Packing, Shipment, checksums, save_chunk
from qurl.rollout.canary import Yardstick, as_shipment, canary_bound, canary_ids, verify
from qurl.rollout.engine import Stream, check_prompts, generate
from qurl.rollout.stop import StopRule
from qurl.rollout.vllm.requests import Requests, VllmStream
from qurl.rollout.vllm.start import (
    FIXED,
    Companions,
    check_head_size,
    check_options,
    choose_method,
    environment,
    import_vllm,
    memory,
    shared_memory,
)
from qurl.types import Problem, Rollout, SamplingParams, SyncReport

_NUM_DECODED = 8


class VllmEngine:
    """Samples with vLLM, in this process or in others."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        quant: str = "none",
        online: bool = False,
        tensor_parallel: int = 1,
        own_process: bool = False,
        max_batch: int = 256,
        kv_memory_frac: float = 0.8,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        options: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        is_empty: bool = False,
    ) -> None:
        """Options are those of `RolloutConfig` and `VllmConfig`, and these:

        `dtype` of activations and cache; None: `default_dtype`.
        `compute_dtype`: see `build_engine`.
        `device` and `is_empty` are those of `LocalEngine`.
        """
        self.quant, self.tokenizer, self.version = quant, tokenizer, 0
        device = device or next(model.parameters()).device
        # vLLM's FP8 wants 16 bits around it, also on a CPU.
        self.dtype = dtype or (torch.bfloat16 if quant == "fp8" else default_dtype(device))
        method = choose_method(quant, online, model)
        format = None if quant == "none" else get_format(quant)
        # On a CPU a head has a packed copy of its own, which vLLM forgets if it is tied.
        is_cpu = device.type == "cpu"
        self.packing = Packing(self.dtype, format, method == "qurl_codes", compute_dtype, is_cpu)
        self._is_remote = own_process or tensor_parallel > 1
        arguments: dict[str, Any] = {
            **FIXED,
            "quantization": method,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensor_parallel_size": tensor_parallel,
            "max_num_seqs": max_batch,
            **memory(device, kv_memory_frac),
        }
        check_options(options or {}, arguments)
        arguments |= options or {}
        self._yardstick = Yardstick()
        self._flaw = "no weights have arrived yet"
        """Why there is nothing to sample from; empty if there is."""
        self._start(model, arguments, own_process, device)
        self._requests = Requests(self.llm)
        self._model: Any = model
        if not is_empty:
            try:
                self.canary_gap = self._finish(model, 0, time.perf_counter(), 0).canary_gap
            except BaseException:
                self.close()  # nobody else gets hold of it
                raise

    def _start(
        self, model: Any, arguments: dict[str, Any], own_process: bool, device: torch.device
    ) -> None:
        """Load version 0 from a folder, as vLLM loads any model."""
        vllm = import_vllm()
        if device.type == "cpu":
            check_head_size(model)
        prefix = {"prefix": "qurl-vllm-", "ignore_cleanup_errors": True}
        with tempfile.TemporaryDirectory(**prefix) as name:
            folder = Path(name)
            config = copy.deepcopy(model.config)
            config.architectures = config.architectures or [type(model).__name__]
            config.tie_word_embeddings = config.tie_word_embeddings and not self.packing.unties
            config.save_pretrained(folder)
            for index, chunk in enumerate(self.packing.pack(model)):
                save_chunk(chunk, folder / f"model-{index:05}.safetensors")
            devices = [device] if device.type == "cuda" else []
            with environment(own_process, device), torch.random.fork_rng(devices):
                self.llm: Any = vllm.LLM(model=name, **arguments)
        self._is_open, self._is_companion = True, not own_process
        if self._is_companion:
            Companions.add(self.llm)
        config = self.llm.llm_engine.vllm_config
        self._max_length: int = config.model_config.max_model_len
        self._block_size: int = config.cache_config.block_size

    @property
    def num_steps(self) -> int:
        """Steps so far: a sign of life."""
        return self._requests.num_steps

    def sync(self, source: nn.Module | Shipment, *, version: int) -> SyncReport:
        """Send the trainer's weights into vLLM's buffers, in place, and verify them.

        Unfinished completions of open streams start over with the new weights; if the sync fails,
        with those of the next.
        """
        start = time.perf_counter()
        self._requests.pause()
        self._flaw = f"the weights of version {self.version} were overwritten by a sync that failed"
        num_bytes = self._send(as_shipment(source), version)
        report = self._finish(source, version, start, num_bytes)
        self._requests.restart()
        return report

    def _send(self, shipment: Shipment, version: int) -> int:
        """All chunks of a shipment, through vLLM's weight update; returns their bytes."""
        num_bytes, llm = 0, self.llm
        try:
            llm.start_weight_update()
            with tempfile.TemporaryDirectory(prefix="qurl-sync-", dir=shared_memory()) as folder:
                for chunk in shipment.pack(self.packing):
                    update = self._wrap(chunk, Path(folder, "chunk.safetensors"))
                    llm.update_weights({"update_info": {"version": version, **update}})
                    num_bytes += sum(tensor.nbytes for tensor in chunk.values())
            last = {"version": version, "checksums": {}, "is_last": True}
            llm.update_weights({"update_info": last})
            llm.finish_weight_update()
        except SyncError:
            raise
        except Exception as error:  # vLLM raises this very class for what fails in its processes
            raise SyncError(f"sync of version {version} failed in vLLM: {error}") from error
        if not llm.reset_prefix_cache():
            raise SyncError(
                f"sync of version {version} failed: vLLM did not empty its prefix cache, which "
                "holds keys and values of older weights"
            )
        return num_bytes

    def _wrap(self, chunk: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
        """A chunk as vLLM's processes can read it: in a file, if they are others."""
        sums = checksums(chunk)
        if not self._is_remote:
            # vLLM keeps what it gets of a layer until it has all of it, and a chunk may be lent.
            return {"checksums": sums, "weights": {n: x.clone() for n, x in chunk.items()}}
        save_chunk(chunk, path)
        return {"checksums": sums, "path": str(path)}

    def _finish(
        self, source: nn.Module | Shipment, version: int, start: float, num_bytes: int
    ) -> SyncReport:
        sent = time.perf_counter()
        gap = self._verify(as_shipment(source), version)
        self._model = source if isinstance(source, nn.Module) else self._model
        self.version, self._flaw = version, ""
        return SyncReport(
            version=version,
            seconds=sent - start,
            bytes=num_bytes,
            code_flip_frac=math.nan if self.packing.format else 0.0,
            verified=True,
            canary_gap=gap,
            verify_seconds=time.perf_counter() - sent,
        )

    @torch.no_grad()
    def _verify(self, shipment: Shipment, version: int) -> float:
        """The canary's mean |log-prob gap|; raises if the copy is not sound.

        vLLM decodes a few tokens after the prompt, longer than a block of the cache, and scores the
        prompt: decoding and prefill run different kernels, and only the first reads cached blocks.
        """
        length = max(len(canary_ids(self._model)), self._block_size + 1)
        ids = canary_ids(self._model, min(length, self._max_length - _NUM_DECODED))
        output = self._requests.ask(ids, max_tokens=_NUM_DECODED, logprobs=0)
        if output.num_cached_tokens:
            raise SyncError(
                f"sync of version {version} failed: vLLM took {output.num_cached_tokens} tokens of "
                "the canary prompt from a prefix cache of older weights"
            )
        decoded = list(output.outputs[0].token_ids)
        sampled = _logprobs(decoded, output.outputs[0].logprobs)
        expected = shipment.score([*ids, *decoded], self.quant)
        bound = canary_bound(self.quant, self.dtype, shipment.dtype)
        judge = partial(verify, bound=bound, version=version, yardstick=self._yardstick)
        gap = judge(expected[: len(ids) - 1], self._score(ids))
        judge(expected[len(ids) - 1 :], sampled, path="decoded with the KV cache")
        return gap

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs [T - 1] of tokens 1.. given their prefix, at temperature 1, by prefill."""
        self._sound_version()
        if len(token_ids) >= self._max_length:
            raise EngineError(
                f"vLLM cannot score {len(token_ids)} tokens: it needs room for one more, and its "
                f"max_model_len is {self._max_length}"
            )
        return self._score(token_ids)

    def _score(self, token_ids: Sequence[int]) -> Tensor:
        output = self._requests.ask(token_ids, max_tokens=1, prompt_logprobs=0)
        return _logprobs(output.prompt_token_ids[1:], output.prompt_logprobs[1:])

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> list[Rollout]:
        """`params.group_size` completions of each problem, in order."""
        return generate(self, problems, params)

    def stream(self, params: SamplingParams) -> Stream:
        """Completions that are drawn like this; see `qurl.rollout.engine.Stream`."""
        return VllmStream(
            self._requests,
            params,
            StopRule.of(self._model, self.tokenizer, params),
            partial(self._check_prompts, params=params),
            self._sound_version,
        )

    def close(self) -> None:
        """End vLLM, or in this process the last of several, and give its memory back."""
        was_open, self._is_open, self._flaw = self._is_open, False, "the engine was closed"
        if was_open and self._is_companion:
            Companions.close_one()
        elif was_open:
            self.llm.llm_engine.engine_core.shutdown()

    def _sound_version(self) -> int:
        if self._flaw:
            raise EngineError(f"{self._flaw}; sync again before sampling")
        return self.version

    def _check_prompts(self, problems: Sequence[Problem], params: SamplingParams) -> None:
        check_prompts(problems, params, self._model)
        for problem in problems:
            needed = len(problem.prompt_ids) + params.limit(problem)
            if needed > self._max_length:
                raise EngineError(
                    f"problem {problem.id!r} needs {needed} tokens with its completion, and "
                    f"vLLM's max_model_len is {self._max_length}; raise rollout.vllm.options."
                    "max_model_len, or lower sampling.max_tokens"
                )


def _logprobs(token_ids: Sequence[int], rows: Sequence[Mapping[int, Any]]) -> Tensor:
    pairs = zip(token_ids, rows, strict=True)
    return torch.tensor([row[token].logprob for token, row in pairs])
