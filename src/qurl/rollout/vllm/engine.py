"""vLLM behind the engine's interface: started from a folder, updated in place, verified each time.

A sync packs the trainer's weights (`shipment`), hands them to vLLM's own weight update, and empties
its prefix cache. None of vLLM's known failures raises: scales freed under an INT8 kernel, experts
garbled by a reload, keys of older weights in the cache, weights left as they were. So the receiving
side (`qurl.integrations.vllm`) checks what arrives and what it becomes, and this side compares
log-probs of a prompt and of decoded tokens with the trainer's (`canary`).
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qurl.errors import ConfigError, EngineError, MissingExtra, ModelError, SyncError
from qurl.ops.device import default_dtype
from qurl.quant import get_format
from qurl.quant.linear import check_quantizable
from qurl.rollout.canary import Yardstick, canary_bound, canary_ids, score_with, verify
from qurl.rollout.engine import Stream, check_prompts, generate
from qurl.rollout.stop import StopRule
from qurl.rollout.vllm.requests import Requests, VllmStream
from qurl.rollout.vllm.shipment import Packing, checksums, save_chunk
from qurl.types import Problem, Rollout, SamplingParams, SyncReport

METHODS: Mapping[tuple[str, bool], str | None] = {
    ("none", False): None,
    ("int8", False): "qurl_codes",
    ("int8", True): "qurl_int8",
    ("fp8", False): "fp8_per_channel",
}
"""vLLM's quantization by our format and whether vLLM is to quantize INT8 itself."""
_FIXED: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # no defaults for sampling from the model's folder
    "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": "qurl"},
    "disable_log_stats": True,
    "enable_prefix_caching": True,
}
_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes")
"""Arguments of ours that options may replace."""
_NUM_DECODED = 8
_CPU_CACHE_BYTES = 2**30
"""Of keys and values on a CPU, where vLLM would take most of the memory."""


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
    ) -> None:
        """Options are those of `RolloutConfig` and `VllmConfig`, and these:

        `dtype` of activations and cache; None: `default_dtype`.
        `compute_dtype`: see `build_engine`.
        """
        self.quant, self.tokenizer, self.version = quant, tokenizer, 0
        device = next(model.parameters()).device
        # vLLM's FP8 wants 16 bits around it, also on a CPU.
        self.dtype = dtype or (torch.bfloat16 if quant == "fp8" else default_dtype(device))
        method = _choose_method(quant, online, model)
        format = None if quant == "none" else get_format(quant)
        # On a CPU a head has a packed copy of its own, which vLLM forgets if it is tied.
        is_cpu = device.type == "cpu"
        self._packing = Packing(self.dtype, format, method == "qurl_codes", compute_dtype, is_cpu)
        self._is_remote = own_process or tensor_parallel > 1
        arguments: dict[str, Any] = {
            **_FIXED,
            "quantization": method,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensor_parallel_size": tensor_parallel,
            "max_num_seqs": max_batch,
            **_memory(device, kv_memory_frac),
        }
        _check_options(options or {}, arguments)
        arguments |= options or {}
        self._yardstick = Yardstick()
        self._is_sound = False
        self._start(model, arguments, own_process, device)
        self._requests = Requests(self.llm)
        self._model: Any = model
        self.canary_gap = self._finish(model, 0, time.perf_counter(), 0).canary_gap

    def _start(
        self, model: Any, arguments: dict[str, Any], own_process: bool, device: torch.device
    ) -> None:
        """Load version 0 from a folder, as vLLM loads any model."""
        vllm = _import_vllm()
        if device.type == "cpu":
            _check_head_size(model)
        prefix = {"prefix": "qurl-vllm-", "ignore_cleanup_errors": True}
        with tempfile.TemporaryDirectory(**prefix) as name:
            folder = Path(name)
            config = copy.deepcopy(model.config)
            config.architectures = config.architectures or [type(model).__name__]
            config.tie_word_embeddings = config.tie_word_embeddings and not self._packing.unties
            config.save_pretrained(folder)
            for index, chunk in enumerate(self._packing.pack(model)):
                save_chunk(chunk, folder / f"model-{index:05}.safetensors")
            with _environment(own_process, device), torch.random.fork_rng():
                self.llm: Any = vllm.LLM(model=name, **arguments)
        config = self.llm.llm_engine.vllm_config
        self._max_length: int = config.model_config.max_model_len
        self._block_size: int = config.cache_config.block_size

    def sync(self, source: nn.Module, *, version: int) -> SyncReport:
        """Send the trainer's weights into vLLM's buffers, in place, and verify them.

        Unfinished completions of open streams start over with the new weights.
        """
        start = time.perf_counter()
        unfinished = self._requests.drop_all()
        self._is_sound = False
        num_bytes = self._send(source, version)
        report = self._finish(source, version, start, num_bytes)
        for request in unfinished:
            self._requests.add(request)
        return report

    def _send(self, model: nn.Module, version: int) -> int:
        """All chunks of a shipment, through vLLM's weight update; returns their bytes."""
        num_bytes, llm = 0, self.llm
        try:
            llm.start_weight_update()
            with tempfile.TemporaryDirectory(prefix="qurl-sync-", dir=_shared_memory()) as folder:
                for chunk in self._packing.pack(model):
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
            return {"checksums": sums, "weights": chunk}
        save_chunk(chunk, path)
        return {"checksums": sums, "path": str(path)}

    def _finish(self, model: nn.Module, version: int, start: float, num_bytes: int) -> SyncReport:
        sent = time.perf_counter()
        gap = self._verify(model, version)
        self._model, self.version, self._is_sound = model, version, True
        return SyncReport(
            version=version,
            seconds=sent - start,
            bytes=num_bytes,
            code_flip_frac=math.nan if self._packing.format else 0.0,
            verified=True,
            canary_gap=gap,
            verify_seconds=time.perf_counter() - sent,
        )

    @torch.no_grad()
    def _verify(self, model: nn.Module, version: int) -> float:
        """The canary's mean |log-prob gap|; raises if the copy is not sound.

        vLLM decodes a few tokens after the prompt, longer than a block of the cache, and scores the
        prompt: decoding and prefill run different kernels, and only the first reads cached blocks.
        """
        length = max(len(canary_ids(model)), self._block_size + 1)
        ids = canary_ids(model, min(length, self._max_length - _NUM_DECODED))
        output = self._requests.ask(ids, max_tokens=_NUM_DECODED, logprobs=0)
        if output.num_cached_tokens:
            raise SyncError(
                f"sync of version {version} failed: vLLM took {output.num_cached_tokens} tokens of "
                "the canary prompt from a prefix cache of older weights"
            )
        decoded = list(output.outputs[0].token_ids)
        sampled = _logprobs(decoded, output.outputs[0].logprobs)
        expected = score_with(model, [*ids, *decoded], self.quant)
        bound = canary_bound(self.quant, self.dtype, next(model.parameters()).dtype)
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
        """End vLLM's processes and give its memory back."""
        self._is_sound = False
        self.llm.llm_engine.engine_core.shutdown()

    def _sound_version(self) -> int:
        if not self._is_sound:
            raise EngineError(
                f"the weights of version {self.version} were overwritten by a sync that failed; "
                "sync again before sampling"
            )
        return self.version

    def _check_prompts(self, problems: Sequence[Problem], params: SamplingParams) -> None:
        check_prompts(problems, params, self._model)
        for problem in problems:
            needed = len(problem.prompt_ids) + params.max_tokens
            if needed > self._max_length:
                raise EngineError(
                    f"problem {problem.id!r} needs {needed} tokens with its completion, and "
                    f"vLLM's max_model_len is {self._max_length}; raise rollout.vllm.options."
                    "max_model_len, or lower sampling.max_tokens"
                )


def _logprobs(token_ids: Sequence[int], rows: Sequence[Mapping[int, Any]]) -> Tensor:
    pairs = zip(token_ids, rows, strict=True)
    return torch.tensor([row[token].logprob for token, row in pairs])


def _choose_method(quant: str, online: bool, model: nn.Module) -> str | None:
    if (quant, online) not in METHODS:
        known = ", ".join(name + (" online" if is_online else "") for name, is_online in METHODS)
        asked = quant + (" online" if online else "")
        raise ConfigError(f"quant.format = {asked!r} is not one of vLLM's: {known}")
    if quant == "int8":
        check_quantizable(model)
    return METHODS[quant, online]


def _check_options(options: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    taken = [name for name in options if name == "model" or (name in ours and name not in _MEMORY)]
    if taken:
        raise ConfigError(
            f"rollout.vllm.options.{taken[0]} = {options[taken[0]]!r} is set by QuRL itself; "
            "remove it, and use the keys of quant and rollout"
        )


def _import_vllm() -> Any:
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtra("vllm", "vllm", "rollout.engine = 'vllm'") from error
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "qurl" not in plugins.names:
        raise EngineError(
            "vLLM does not see QuRL's plug-in, which is an entry point of the installed package; "
            "install QuRL into this environment (pip install -e .), or update the installation"
        )
    return vllm


def _memory(device: torch.device, frac: float) -> dict[str, Any]:
    """How much vLLM may take."""
    if device.type != "cuda":
        return {"kv_cache_memory_bytes": _CPU_CACHE_BYTES}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": frac * free / total}


@contextmanager
def _environment(own_process: bool, device: torch.device) -> Iterator[None]:
    """vLLM reads these when it starts; those that are already set win, but for the first."""
    changed = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process))}
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING"}
    if device.type == "cpu" and not own_process:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # these threads are the trainer's, too
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **changed})
    try:
        yield
    finally:
        for name in (*changed, *defaults):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _shared_memory() -> str | None:
    """A folder in memory for what other processes read; None: the usual folder for such files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _check_head_size(model: Any) -> None:
    """vLLM notices on a CPU only when it computes."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise ModelError(
            f"heads of {size} channels have no attention kernel in vLLM on a CPU, which knows "
            f"{', '.join(map(str, sizes))}; choose another model, or for model.path = 'scratch' "
            "a smaller model.scratch.heads"
        )
