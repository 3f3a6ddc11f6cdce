"""The vLLM engine beside the local one: weight updates, log-probs against transformers, speed.

    python -m benchmarks.vllm_engine --model 1.5B --quant int8

One format per command, because vLLM keeps its memory until the process ends. vLLM takes a minute to
start; with `--turn FILE`, several commands start at once and measure one after the other. Each
engine starts from the same random weights, which then move as far as a large step of training,
three times. After each update it samples, and transformers scores the samples in full precision.
Adds to benchmarks/results/vllm_engine.json. Written against vLLM 0.25.1 and 0.32.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.scripts import run_command
from qurl.bench.record import Record, time_call
from qurl.bench.shapes import SHAPES, build_model
from qurl.errors import ConfigError
from qurl.rollout import build_engine
from qurl.types import Problem, Rollout, SamplingParams

ENGINES = ("vllm", "local")
NUM_UPDATES = 3
STEP = 1e-3
"""By which share of its size a weight moves in an update."""


@dataclass(frozen=True)
class VllmBench:
    """Flags."""

    model: str = "1.5B"
    quant: str = "none"
    online: bool = False
    """Let vLLM quantize INT8 itself."""
    problems: int = 32
    group_size: int = 16
    prompt_tokens: int = 256
    new_tokens: int = 512
    scored: int = 64
    """Completions that transformers scores."""
    kv_gb: float = 24.0
    """Memory of vLLM's cache on a GPU; the local engine comes after it."""
    turn: Path | None = None
    """A file that is locked from the first measurement to the last."""
    out: Path | None = None


def run(bench: VllmBench) -> None:
    if bench.model not in SHAPES:
        raise ConfigError(f"--model {bench.model} is not one of {', '.join(SHAPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record("vllm_engine", bench.out, device)
    first, second = ENGINES
    started = start(first, bench, device)
    with take_turn(bench.turn):
        measure(first, *started, bench, record)
        del started
        measure(second, *start(second, bench, device), bench, record)


def start(kind: str, bench: VllmBench, device: torch.device) -> tuple[float, Any, Any]:
    """Seconds, engine and model. The model is made anew, so that its updates are the same."""
    model = build_model(SHAPES[bench.model], device)
    options = engine_options(kind, bench, device)
    seconds, engine = time_call(
        lambda: build_engine(kind, model, quant=bench.quant, **options), device
    )
    print(f"{kind} {bench.quant}: started in {seconds:.1f} s")
    return seconds, engine, model


def engine_options(kind: str, bench: VllmBench, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"max_batch": bench.problems * bench.group_size}
    if kind == "local":
        return options
    arguments = {"max_model_len": bench.prompt_tokens + bench.new_tokens + 64}
    if device.type == "cuda":
        # A fixed size: what others take while vLLM starts would confuse its own measurement.
        arguments["kv_cache_memory_bytes"] = int(bench.kv_gb * 1e9)
        options["kv_memory_frac"] = 0.1  # of what must be free
    return options | {"online": bench.online, "options": arguments}


@contextmanager
def take_turn(path: Path | None) -> Iterator[None]:
    """Wait until no other command measures."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(
    kind: str, seconds: float, engine: Any, model: Any, bench: VllmBench, record: Record
) -> None:
    rows = [update(engine, model, bench, version) for version in range(NUM_UPDATES + 1)]
    name = f"{kind} {bench.model} {bench.quant}{' online' if bench.online else ''}"
    settings = {key: str(value) for key, value in vars(bench).items() if key != "turn"}
    record.add(name, settings=settings, start_seconds=seconds, versions=rows, **facts(kind))


def update(engine: Any, model: Any, bench: VllmBench, version: int) -> dict[str, float]:
    """Move the weights, except for version 0; sync, sample, and compare log-probs."""
    if version:
        move_(model, seed=version)
    report = engine.sync(model, version=version)
    vocabulary = model.config.vocab_size
    problems = [
        Problem(
            str(i), tuple((7 * j + 11 * i + 2) % vocabulary for j in range(bench.prompt_tokens))
        )
        for i in range(bench.problems)
    ]
    sizes = {"max_tokens": bench.new_tokens, "group_size": bench.group_size}
    params = SamplingParams(**sizes, seed=version, ignore_eos=True)
    if version == 0:
        engine.generate(problems, params)  # compiles and captures
    seconds, rollouts = time_call(lambda: engine.generate(problems, params), model.device)
    gaps = score_gaps(model, rollouts, bench.scored)
    row = {
        "version": version,
        "sync_seconds": report.seconds,
        "verify_seconds": report.verify_seconds,
        "bytes": report.bytes,
        "canary_gap": report.canary_gap,
        "gap_mean": gaps.mean().item(),
        "gap_max": gaps.max().item(),
        "tokens_per_s": sum(len(c.token_ids) for r in rollouts for c in r.completions) / seconds,
    }
    print("  " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    return row


@torch.no_grad()
def move_(model: Any, seed: int) -> None:
    draw = torch.Generator(model.device).manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.empty_like(parameter).normal_(generator=draw)
        parameter += STEP * parameter.std() * noise


@torch.no_grad()
def score_gaps(model: Any, rollouts: list[Rollout], count: int) -> torch.Tensor:
    """|log-prob of the engine - log-prob of transformers| of the tokens of some completions."""
    pairs = [(r.problem, c) for r in rollouts for c in r.completions][:count]
    gaps = []
    for problem, completion in pairs:
        ids = torch.tensor([[*problem.prompt_ids, *completion.token_ids]], device=model.device)
        start = len(problem.prompt_ids)
        logits = model(input_ids=ids).logits[0, start - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(-1, ids[0, start:, None]).squeeze(-1).cpu()
        gaps.append((logps - torch.tensor(completion.logprobs)).abs())
    return torch.cat(gaps)


def facts(kind: str) -> dict[str, str]:
    if kind != "vllm":
        return {}
    import vllm

    return {"vllm": vllm.__version__}


if __name__ == "__main__":
    sys.exit(run_command("vllm_engine", VllmBench, run))
