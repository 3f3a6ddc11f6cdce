"""`qurl doctor --gpus N`: do several ranks compute what one does, and does a run outlive a kill?

A rank is a process with a GPU of its own. On a CPU the same checks run with gloo in place of NCCL.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl.advantages import ESTIMATORS
from qurl.config import build_config
from qurl.errors import QurlError, TrainingError, first_line
from qurl.losses import SURROGATES
from qurl.objectives import ADVANTAGES
from qurl.ops.device import pick_device
from qurl.rollout import build_engine
from qurl.run.checkpoint import AnyLearner, load_saved_policy
from qurl.run.engine_checks import check_engine_group
from qurl.run.machine import Finding
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.learner import Learner
from qurl.trainer.parallel.group import LearnerGroup
from qurl.trainer.parallel.processes import Post, Workers, lead
from qurl.trainer.parallel.replicas import ReplicaGroup
from qurl.trainer.policy import Policy
from qurl.trainer.scratch import build_tiny_llama
from qurl.types import Completion, Graded, Problem, Rollout

RECIPE: Mapping[str, Any] = {
    "steps": 2,
    "model": {"scratch": {"hidden_size": 32}, "compute_dtype": "float32"},
    "batch": {"problems": 3, "minibatches": 2, "microbatch_tokens": 25},
    "sampling": {"group_size": 2, "max_tokens": 8},
    "algo": {"objective": "ppo_prox", "kl_coef": 0.0},
    # A large epsilon keeps AdamW's first step, g / (|g| + eps), from magnifying rounding.
    "optim": {"lr": 1e-2, "eps": 1e-2},
}
LENGTHS = (11, 9, 7, 8, 5, 6)
PROMPT = 2
CLOSE = 1e-4
"""Largest difference of a weight that another order of sums in FP32 explains."""
EXCHANGED = {"cuda": 2**28, "cpu": 2**24}
"""Bytes of a timed exchange."""
REPEATS = 5
SLOW = 10e9
"""Bytes per second between GPUs; PCIe 4.0 reaches twice as much."""
ADVICE = "run it again with NCCL_DEBUG=INFO, see docs/nodes.md, and please report the output"


def check_ranks(size: int, device_name: str) -> Iterator[Finding]:
    """Exchanges, training, a sync, a kill and a resume, then engines; an error ends the checks."""
    device = pick_device(device_name)
    found = torch.cuda.device_count()
    if device.type == "cuda" and found < size:
        yield Finding("FAIL", f"{size} GPUs", f"torch sees {found}", "check CUDA_VISIBLE_DEVICES")
        return
    with TemporaryDirectory() as folder:
        is_sound = yield from _guard(f"{size} ranks", check_trainers, size, device, Path(folder))
    if is_sound:
        yield from _guard("engines in other processes", check_engine_group, size, device)


def _guard(
    name: str, check: Callable[..., Iterable[Finding]], *arguments: Any
) -> Generator[Finding, None, bool]:
    """The findings of a check; an error ends them, and is one. Returns whether there was none."""
    try:
        yield from check(*arguments)
    except (QurlError, RuntimeError, TimeoutError) as error:
        yield Finding("FAIL", name, f"{type(error).__name__}: {first_line(error)}", ADVICE)
        return False
    return True


def check_trainers(size: int, device: torch.device, folder: Path) -> Iterator[Finding]:
    """Two steps on `size` ranks, the second after a kill, against two steps on one device."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    alone = make_learner(device.type)
    alone.policy.model.to(device)  # whole, where ranks keep shards
    fused = make_learner(device.type, is_sharded=False)
    take_step(fused, 0)
    take_step(alone, 0)
    expected = copy_weights(alone.policy.model)
    take_step(alone, 1)
    with lead(size, device.type, threads=1) as workers:
        for name in EXCHANGES:
            yield check_exchange(workers, name, device)
        replicas = ReplicaGroup(
            workers, functools.partial(make_learner, device.type, is_sharded=False)
        )
        take_step(replicas, 0)
        gap = largest_gap(copy_weights(replicas.whole_model()), copy_weights(fused.policy.model))
        yield judge_gap(f"{size} replicas against one", gap)
        group = LearnerGroup(workers, make_learner(device.type))
        take_step(group, 0)
        gap = largest_gap(copy_weights(group.whole_model()), expected)
        yield judge_gap(f"{size} trainers against one", gap)
        yield check_sync(group)
        group.save(folder)
        yield check_kill(workers, group)
    with lead(size, device.type, threads=1) as workers:
        group = LearnerGroup(workers, make_learner(device.type, folder))
        group.load(folder)
        take_step(group, 1)
        weights = copy_weights(group.whole_model())
    yield judge_gap("resume after the kill", largest_gap(weights, copy_weights(alone.policy.model)))


def _all_reduce(x: Tensor, ranks: int) -> float:
    dist.all_reduce(x)
    return ranks * (ranks + 1) / 2


def _broadcast(x: Tensor, ranks: int) -> float:
    dist.broadcast(x, src=0)
    return 1.0


EXCHANGES = {"all-reduce": _all_reduce, "broadcast": _broadcast}


def _exchange(post: Post, name: str, device: str) -> tuple[int, float]:
    """(how many ranks got a wrong result, bytes per second of the fastest repetition)."""
    size, fastest, wrong = EXCHANGED[device], float("inf"), 0
    for _ in range(REPEATS):
        x = torch.full((size // 4,), post.ranks.rank + 1.0, device=device)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        post.ranks.most(0)  # all begin together
        start = time.perf_counter()
        expected = EXCHANGES[name](x, post.ranks.size)
        wait()
        fastest = min(fastest, time.perf_counter() - start)
        wrong = max(wrong, int(not bool((x == expected).all())))
    return post.ranks.total(wrong), size / fastest


def check_exchange(workers: Workers, name: str, device: torch.device) -> Finding:
    num_wrong, rate = workers.run(_exchange, name, device.type)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    title = f"{name} of {workers.post.ranks.size} ranks ({backend})"
    if num_wrong:
        return Finding("FAIL", title, f"wrong on {num_wrong} ranks", ADVICE)
    found = f"right, {rate / 1e9:.1f} GB/s"
    if device.type == "cuda" and rate < SLOW:
        return Finding("note", title, found, "slow: see nvidia-smi topo -m and docs/nodes.md")
    return Finding("ok", title, found)


def make_learner(device: str, saved: Path | None = None, *, is_sharded: bool = True) -> Learner:
    """A whole learner, untrained or with the saved policy; one to be sharded is in main memory."""
    config = build_config({**RECIPE, "device": device})
    precision = (config.model, torch.device(device), config.quant)
    if saved is not None:
        policy = load_saved_policy(saved, *precision, is_sharded=is_sharded)
    else:
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_tiny_llama(config.model.scratch, tokenizer)
        policy = Policy(model, tokenizer, *precision, is_sharded=is_sharded)
    algo = config.algo
    parts = {"objective": SURROGATES[algo.objective], "advantage": ADVANTAGES[algo.advantage]}
    return Learner(policy, config, **parts)


def make_groups(seed: int) -> list[Graded]:
    """Completions of several lengths, so that ranks have different work; one of two is right."""
    draw, groups = torch.Generator().manual_seed(seed), []
    for number in range(0, len(LENGTHS), 2):
        prompt, *answers = (
            torch.randint(4, 99, (size,), generator=draw).tolist()
            for size in (PROMPT, *(n - PROMPT for n in LENGTHS[number : number + 2]))
        )
        completions = [Completion(ids, [0.0] * len(ids), "", "stop") for ids in answers]
        rollout = Rollout(Problem(f"problem-{number}", prompt), completions, seed, 1.0)
        groups.append(Graded(rollout, [1.0, 0.0], [{"accuracy": 1.0}, {"accuracy": 0.0}]))
    return groups


def take_step(learner: AnyLearner, step: int) -> None:
    """Both forwards and an update of two mini-batches."""
    batch = learner.deal(make_groups(step), torch.arange(len(LENGTHS)), 1, step)
    corrected = learner.correct(learner.recompute(batch, step))
    learner.update(learner.compare(corrected, ESTIMATORS["grpo"]), step)


def copy_weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def largest_gap(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """NaN if a weight is."""
    gaps = [(found[name] - weight).abs().max() for name, weight in expected.items()]
    return float(torch.stack(gaps).max())


def judge_gap(name: str, gap: float) -> Finding:
    found = f"weights differ by {gap:.1g} at most"
    if gap < CLOSE:
        return Finding("ok", name, found)
    return Finding("FAIL", name, f"{found}, where {CLOSE:g} is allowed", f"do not train; {ADVICE}")


def check_sync(group: LearnerGroup) -> Finding:
    """An engine on the driver's device takes the codes of all ranks; a wrong copy raises."""
    options = {"device": group.device, "is_empty": True}
    engine = build_engine("local", group.policy.model, quant="int8", **options)
    gap = engine.sync(group.source(engine), version=1).canary_gap
    found = f"INT8 copy of the gathered codes is {gap:.2g} from its model (log-probs)"
    return Finding("ok", "sync to an engine", found)


def _process_ids(post: Post) -> list[int]:
    return post.ranks.pool(os.getpid())


def check_kill(workers: Workers, group: LearnerGroup) -> Finding:
    """Kill rank 1 between two commands; the next one must say so."""
    name = "kill -9 of rank 1"
    os.kill(workers.run(_process_ids)[1], signal.SIGKILL)
    start = time.perf_counter()
    try:
        group.whole_model()
    except TrainingError as error:
        seconds = time.perf_counter() - start
        if "trainer rank 1 was killed by signal 9" in str(error):
            return Finding("ok", name, f"noticed after {seconds:.1f} s")
        return Finding("FAIL", name, f"reported as {str(error)!r}", ADVICE)
    return Finding("FAIL", name, "nobody noticed", ADVICE)
