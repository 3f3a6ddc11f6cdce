"""How vLLM is started: its arguments, its environment, and what is refused before it loads."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from qurl.errors import ConfigError, EngineError, ModelError
from qurl.plugins import import_extra
from qurl.quant.linear import check_quantizable
from qurl.quant.shipment import CHUNK_BYTES

METHODS: Mapping[tuple[str, bool], str | None] = {
    ("none", False): None,
    ("int8", False): "qurl_codes",
    ("int8", True): "qurl_int8",
    ("fp8", False): "fp8_per_channel",
}
"""vLLM's quantization by our format and whether vLLM is to quantize INT8 itself."""
FIXED: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # no defaults for sampling from the model's folder
    "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": "qurl"},
    "disable_log_stats": True,
    "enable_prefix_caching": True,
}
_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes")
"""Arguments of ours that options may replace."""
_CPU_CACHE_BYTES = 2**30
"""Memory for keys and values on a CPU, where vLLM would take most of it."""


class Companions:
    """vLLMs that run in this process. They share groups, which the first to end would destroy.

    So they end together: one that is closed stays until all are.
    """

    _all: ClassVar[list[Any]] = []
    _num_open: ClassVar[int] = 0

    @classmethod
    def add(cls, llm: Any) -> None:
        cls._all.append(llm)
        cls._num_open += 1

    @classmethod
    def close_one(cls) -> None:
        cls._num_open -= 1
        while cls._num_open == 0 and cls._all:
            cls._all.pop().llm_engine.engine_core.shutdown()


def choose_method(quant: str, online: bool, model: nn.Module) -> str | None:
    if (quant, online) not in METHODS:
        known = ", ".join(name + (" online" if is_online else "") for name, is_online in METHODS)
        asked = quant + (" online" if online else "")
        raise ConfigError(f"quant.format = {asked!r} is not one of vLLM's: {known}")
    if quant == "int8":
        check_quantizable(model)
    return METHODS[quant, online]


def check_options(options: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    taken = [name for name in options if name == "model" or (name in ours and name not in _MEMORY)]
    if taken:
        raise ConfigError(
            f"rollout.vllm.options.{taken[0]} = {options[taken[0]]!r} is set by QuRL itself; "
            "remove it, and use the keys of quant and rollout"
        )


def import_vllm() -> Any:
    vllm = import_extra("vllm", "vllm", "vllm", "rollout.engine = 'vllm'")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "qurl" not in plugins.names:
        raise EngineError(
            "vLLM does not see QuRL's plug-in, which is an entry point of the installed package; "
            "install QuRL into this environment (pip install -e .), or update the installation"
        )
    return vllm


def memory(device: torch.device, frac: float) -> dict[str, Any]:
    """How much vLLM may take."""
    if device.type != "cuda":
        return {"kv_cache_memory_bytes": _CPU_CACHE_BYTES}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": frac * free / total}


@contextmanager
def environment(own_process: bool, device: torch.device) -> Iterator[None]:
    """What vLLM reads when it starts; variables that are already set win, but for the first."""
    changed = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process))}
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if device.type == "cpu" and not own_process:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # these threads are the trainer's, too
    before, dtype = dict(os.environ), torch.get_default_dtype()
    os.environ.update({**defaults, **before, **changed})
    try:
        yield
    except Exception as error:  # of any kind: vLLM starts a lot
        raise EngineError(f"vLLM did not start: {error}") from error
    finally:
        torch.set_default_dtype(dtype)  # a start that fails leaves vLLM's
        for name in (*changed, *defaults):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def shared_memory() -> str | None:
    """A folder in memory for what other processes read; None: the usual folder for such files."""
    folder = "/dev/shm"
    # A chunk may be larger, and lasts until the next was read. A container has 64 MB by default.
    has_room = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 4 * CHUNK_BYTES
    return folder if has_room else None


def check_head_size(model: Any) -> None:
    """vLLM notices on a CPU only when it computes."""
    from vllm.v1.attention.backends import cpu_attn  # pyright: ignore[reportMissingImports]

    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in (sizes := cpu_attn.CPUAttentionBackend.get_supported_head_sizes()):
        raise ModelError(
            f"heads of {size} channels have no attention kernel in vLLM on a CPU, which knows "
            f"{', '.join(map(str, sizes))}; choose another model, or for model.path = 'scratch' "
            "a smaller model.scratch.heads"
        )
