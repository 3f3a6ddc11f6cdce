"""`qurl doctor --gpus N`: engines in processes of their own, one of which is killed.

The trainer has the first GPU, and one or two engines have the next. On a CPU, two engines are
checked, with gloo in place of NCCL.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qurl.config.schema import ScratchConfig
from qurl.rollout import build_engine
from qurl.rollout.engine import Engine
from qurl.rollout.group.engine import EngineGroup
from qurl.rollout.group.fleet import Fleet
from qurl.rollout.group.worker import EngineSpec
from qurl.run.machine import Finding
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.scratch import build_tiny_llama
from qurl.types import Problem, SamplingParams

MOST_ENGINES = 2
SECONDS = 120.0
"""Until an engine has to be there, or to answer."""
QUANT = "int8"
OPTIONS = {"max_batch": 4, "deterministic": True}
"""Tokens must not depend on which problems an engine decodes together."""
PROBLEMS = [Problem(f"problem-{i}", list(range(4 + i, 9 + 2 * i))) for i in range(6)]
PARAMS = SamplingParams(max_tokens=48, group_size=3, seed=5, ignore_eos=True)
ADVICE = "do not set parallel.engines, and please report the output"
Sampled = dict[str, list[tuple[int, ...]]]
"""Tokens of the completions, by the problem's id."""


def check_engine_group(size: int, device: torch.device) -> Iterator[Finding]:
    """A sync, tokens against those of an engine in this process, a kill, and a replacement."""
    if find_spec("ray") is None:
        found = "not tested: pip install 'qurl-rl[ray]'"
        yield Finding("note", "engines in other processes", found)
        return
    from qurl.rollout.group.ray import starter

    gpus = list(range(1, size))[:MOST_ENGINES] if device.type == "cuda" else []
    count = len(gpus) or MOST_ENGINES
    with TemporaryDirectory() as folder:
        fleet = Fleet(
            count,
            starter("", Path(folder), threads=torch.get_num_threads(), gpus=gpus),
            min_engines=count,  # so that a sync waits for the replacement
            timeout=SECONDS,
            device=torch.device("cuda", 0) if gpus else torch.device("cpu"),
            carrier="nccl" if gpus else "gloo",
        )
        try:
            yield from check_fleet(fleet, device)
        finally:
            fleet.close()


def check_fleet(fleet: Fleet, device: torch.device) -> Iterator[Finding]:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model: Any = build_tiny_llama(ScratchConfig(), tokenizer).to(device)
    configs = (model.config, model.generation_config)
    group = EngineGroup(
        fleet, EngineSpec("local", *configs, tokenizer, QUANT, OPTIONS, device.type)
    )
    report = group.sync(model, version=1)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    found = f"{report.bytes / 1e6:.1f} MB, {report.canary_gap:.2g} from the model (log-probs)"
    yield Finding("ok", f"sync to {len(fleet.members)} engines ({backend})", found)
    expected = sample(build_engine("local", model, tokenizer, quant=QUANT, **OPTIONS))
    yield compare("tokens of engines in other processes", sample(group), expected)
    yield check_kill(fleet, group, expected)
    group.sync(model, version=2)
    yield check_replacement(fleet, group, expected)


def sample(engine: Engine, interrupt: Callable[[], None] = lambda: None) -> Sampled:
    """Answers to all problems; `interrupt` is called when an engine has begun."""
    with engine.stream(PARAMS) as stream:
        stream.submit(PROBLEMS)
        interrupt()
        rollouts = list(stream)
    return {r.problem.id: [tuple(c.token_ids) for c in r.completions] for r in rollouts}


def compare(name: str, found: Sampled, expected: Sampled) -> Finding:
    same = [key for key in expected if found.get(key) == expected[key]]
    text = f"{len(same)} of {len(expected)} problems are answered as by an engine here"
    if len(same) == len(expected) == len(found):
        return Finding("ok", name, text)
    return Finding("FAIL", name, text, ADVICE)


def check_kill(fleet: Fleet, group: EngineGroup, expected: Sampled) -> Finding:
    """Kill an engine that has work; what it was asked is asked of another."""
    name, start = "kill -9 of an engine", time.perf_counter()
    process = int(fleet.members[0].where.result(SECONDS).rpartition(" ")[2])
    found = compare(name, sample(group, lambda: os.kill(process, signal.SIGKILL)), expected)
    if not any(member.num_deaths for member in fleet.members):
        return Finding("FAIL", name, "nobody noticed", ADVICE)
    if found.verdict == "FAIL":
        return found
    return Finding("ok", name, f"{found.found}, {time.perf_counter() - start:.1f} s later")


def check_replacement(fleet: Fleet, group: EngineGroup, expected: Sampled) -> Finding:
    """After a sync all engines hold its weights, the new one too."""
    name = "replacement of the engine"
    late = [str(m) for m in fleet.members if m.versions.get(group.name) != group.version]
    if late:
        return Finding("FAIL", name, f"{', '.join(late)} did not join at the sync", ADVICE)
    return compare(name, sample(group), expected)
