"""vLLM's rollout speed on the workloads of `qurl bench rollout`, for comparison.

    python -m benchmarks.vllm_rollout --model 7B --quant int8 --kv none --workload A,B

Takes the flags of `qurl bench rollout`, profiles decode steps too, and adds to the same JSON file.
vLLM runs in this process with the same shapes, formats, prompts and lengths, but with random
weights of its own: we check the number of tokens and compare speed, not log-probs. Written against
vLLM 0.25.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.profile_rollout import profile_rollout
from benchmarks.scripts import run_command
from qurl.bench.limits import find_speed
from qurl.bench.record import Record
from qurl.bench.rollout import HEAD, Figures, RolloutBench, Session, measure, plan
from qurl.bench.shapes import model_config
from qurl.bench.workload import Contender, Setup, Workload
from qurl.errors import ConfigError, EngineError
from qurl.run.export import describe_codes
from qurl.run.shape import Shape
from qurl.types import Completion, Problem, SamplingParams

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "int8": {},  # the model's configuration says so
    "fp8": {"quantization": "fp8"},  # a scale per weight tensor, where ours has one per channel
}
"""Arguments of `vllm.LLM` by our name of the format."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no second process: less overhead, and it can be traced
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled on first use
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is for our table
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
"""vLLM is configured by environment variables; those that are already set win."""
KV_BLOCK = 16
"""Tokens per block of vLLM's KV cache."""
KV_SLACK = 1.1
SHARE_THAT_MUST_BE_FREE = 0.02
"""Share of the GPU's memory that must be free, or vLLM does not start. Unused otherwise, because we
set the size of the KV cache."""


def run(bench: RolloutBench) -> list[Figures]:
    """Measure vLLM on each workload; print a row for each and save it."""
    device = torch.device("cuda")
    setup, workloads = plan_vllm(bench)
    record = Record("rollout", bench.out, device)
    contender = VllmContender(setup, workloads)

    def more(_: Contender, workload: Workload) -> dict[str, Any]:
        return {"engine": contender.facts(), **profile_rollout(contender, workload)}

    session = Session(bench, device, find_speed(device), record, more)
    print(HEAD)
    return [measure(session, contender, workload, judge=None) for workload in workloads]


def plan_vllm(bench: RolloutBench) -> tuple[Setup, list[Workload]]:
    models, workloads = plan(bench)
    setups = [setup for setups in models.values() for setup in setups]
    if len(setups) > 1:
        raise ConfigError(
            "give one model, one quant and one kv per command: vLLM keeps its memory until the "
            "process ends"
        )
    if setups[0].quant not in FORMATS:
        raise ConfigError(f"vLLM can run {', '.join(FORMATS)}, not --quant {setups[0].quant}")
    return Setup("vllm", setups[0].shape, setups[0].quant, setups[0].kv), workloads


def import_vllm() -> Any:
    try:
        return importlib.import_module("vllm")
    except ImportError as error:  # it, one of its many requirements, or another version of torch
        raise EngineError(
            f"the package 'vllm' cannot be imported: {error}. Install it with: pip install vllm"
        ) from error


class VllmContender:
    """`vllm.LLM` with random weights."""

    def __init__(self, setup: Setup, workloads: Sequence[Workload]) -> None:
        self.setup = setup
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._vllm = import_vllm()
        self._folder = tempfile.TemporaryDirectory(prefix="qurl-vllm-")
        config = model_config(setup.shape) | {"torch_dtype": "bfloat16"}
        if setup.quant == "int8":
            config["quantization_config"] = describe_codes("int8", ["lm_head"])
        Path(self._folder.name, "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.llm = self._vllm.LLM(
            model=self._folder.name,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            generation_config="vllm",
            max_model_len=max(w.prompt_tokens + w.new_tokens for w in workloads),
            max_num_seqs=max(w.num_sequences for w in workloads),
            gpu_memory_utilization=SHARE_THAT_MUST_BE_FREE,
            kv_cache_memory_bytes=kv_bytes(setup.shape, setup.kv, workloads),
            kv_cache_dtype="auto" if setup.kv == "none" else setup.kv,
            disable_log_stats=True,
            seed=0,
            **FORMATS[setup.quant],
        )
        if setup.quant == "int8":
            self.llm.apply_model(fill_codes_)

    def generate(self, problems: Sequence[Problem], params: SamplingParams) -> Any:
        return self.llm.generate(
            [{"prompt_token_ids": list(problem.prompt_ids)} for problem in problems],
            self._vllm.SamplingParams(
                n=params.group_size,
                temperature=params.temperature,
                max_tokens=params.max_tokens,
                ignore_eos=params.ignore_eos,
                seed=None,
                logprobs=0,  # of the sampled token only
                detokenize=False,
            ),
            use_tqdm=False,
        )

    def read(self, result: Any) -> list[list[Completion]]:
        return [[_to_completion(output) for output in request.outputs] for request in result]

    def facts(self) -> dict[str, Any]:
        """Facts to save with the figures."""
        config = self.llm.llm_engine.vllm_config
        return {
            "version": self._vllm.__version__,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "block_size": config.cache_config.block_size,
        }


def kv_bytes(shape: Shape, kv: str, workloads: Sequence[Workload]) -> int:
    """Room for every sequence of the largest workload at its full length."""
    tokens = max(
        w.num_sequences * KV_BLOCK * math.ceil((w.prompt_tokens + w.new_tokens) / KV_BLOCK)
        for w in workloads
    )
    return int(KV_SLACK * tokens * shape.kv_numbers_per_token * (2 if kv == "none" else 1))


def fill_codes_(model: nn.Module) -> None:
    """vLLM's random loader leaves integers uninitialised; give them a bell curve."""
    for parameter in model.parameters():
        if parameter.dtype == torch.int8:
            values = torch.randn(parameter.shape, dtype=torch.float16, device=parameter.device)
            parameter.data.copy_(values.mul_(32).round_().clamp_(-127, 127))


def _to_completion(output: Any) -> Completion:
    logprobs = [
        step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return Completion(list(output.token_ids), logprobs, text="", finish="length")


if __name__ == "__main__":
    sys.exit(run_command("vllm_rollout", RolloutBench, run))
