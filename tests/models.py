"""Tiny models, rollouts and batches that several test files share."""

from __future__ import annotations

import atexit
import dataclasses
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qurl.config import Config, ModelConfig, ScratchConfig
from qurl.config.schema import TaskConfig
from qurl.correction import importance_weights
from qurl.losses import SURROGATES
from qurl.objectives import ADVANTAGES
from qurl.run.assembly import initial_model
from qurl.run.directory import read_jsonl
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.learner import Learner
from qurl.trainer.policy import Policy
from qurl.types import Batch, Completion, Graded, Problem, Rollout, Scored, Trainable

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of a tiny model of any family, with weights large enough to matter."""
TINY_RUN = {
    "threads": 1,
    "device": "cpu",
    "model.scratch.hidden_size": 32,
    "model.scratch.warm_start_steps": 40,
    "task.difficulty": 2,
    "batch.problems": 8,
    "batch.minibatches": 2,
    "sampling.max_tokens": 4,
    "sampling.group_size": 4,
    "optim.lr": 1e-3,
}
"""Keys of a run whose steps take a moment."""
CLOCKS = ("timing_s/", "perf/", "sync/seconds")
"""How names of metrics begin that are of one run alone."""


def as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Keys of a recipe as words of a command line."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def logged_rows(run_dir: Path, without: tuple[str, ...] = CLOCKS) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, but for metrics whose names begin like this."""
    found = read_jsonl(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(without)} for row in found]


def completions(rollouts: Sequence[Rollout]) -> list[Completion]:
    return [c for r in rollouts for c in r.completions]


def tokens_of(rollouts: Sequence[Rollout]) -> list[Sequence[int]]:
    return [c.token_ids for c in completions(rollouts)]


def largest_gap(a: Sequence[Rollout], b: Sequence[Rollout]) -> float:
    """Of the log-probs of two times the same completions."""
    pairs = zip(completions(a), completions(b), strict=True)
    return max(abs(x - y) for c, d in pairs for x, y in zip(c.logprobs, d.logprobs, strict=True))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Two layers of width 32 over the character tokenizer, with weights large enough to matter."""
    torch.manual_seed(seed)
    own = {"vocab_size": len(build_tokenizer()), "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | own | changes))).eval()


def tiny_policy(seed: int = 0, model=None, **config) -> Policy:
    return Policy(model or tiny_llama(seed), build_tokenizer(), ModelConfig(**config), CPU)


def from_a_start(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run with a warm-started model, made once, in place of one from scratch."""
    prefix = "model.scratch."
    scratch = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    others = {k: v for k, v in settings.items() if not k.startswith(prefix)}
    start = _start(ScratchConfig(**scratch), settings["task.difficulty"])
    return {"model.path": start, **others}


@cache
def _start(scratch: ScratchConfig, difficulty: int) -> Path:
    """The folder of a warm-started model, removed when the test process ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    config = Config(model=ModelConfig(scratch=scratch), task=TaskConfig(difficulty=difficulty))
    return Path(initial_model(config, Path(folder.name), CPU))


def group(prompt, responses, rewards, *, accuracies=None, id="p", temperature=1.0) -> Graded:
    """A graded rollout; the log-prob of the i-th token of the g-th response is -(g + i / 10)."""
    completions = [
        Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(-(g + i / 10) for i in range(len(tokens))),
            text=f"answer {g}",
            finish="stop",
        )
        for g, tokens in enumerate(responses)
    ]
    problem = Problem(id=id, prompt_ids=tuple(prompt), answer="42", extra={"prompt": "6*7="})
    details = [{"accuracy": float(a)} for a in (rewards if accuracies is None else accuracies)]
    return Graded(Rollout(problem, completions, 0, temperature), list(rewards), details)


def random_batch(
    policy: Policy, *, seed: int = 0, rows: int = 6, longest: int = 11, temperature: float = 1.0
) -> Trainable:
    """Rows of different lengths with advantages, and log-probs near those of the policy."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, longest + 1, (rows,), generator=draw)
    prompts = torch.randint(1, 4, (rows,), generator=draw)
    positions = torch.arange(int(lengths.max()))
    mask = ((positions >= prompts[:, None]) & (positions < lengths[:, None])).float()
    tokens = torch.randint(4, 99, mask.shape, generator=draw) * (positions < lengths[:, None])
    batch = Batch(
        token_ids=tokens,
        lengths=lengths,
        mask=mask,
        logp_behav=torch.zeros_like(mask),
        rewards=torch.rand(rows, generator=draw),
        accuracies=torch.arange(rows).remainder(2).float(),
        group=torch.arange(rows) // 2,
        problem_ids=[f"problem-{row // 2}" for row in range(rows)],
        temperature=temperature,
    )
    with torch.no_grad():
        prox = policy.score(batch).logp
    noise = 0.3 * torch.randn(mask.shape, generator=draw) * mask
    weight, shrink = importance_weights(-noise, 2.0)
    return batch.replace(logp_behav=prox + noise).into(
        Trainable,
        logp_prox=prox,
        logp_ref=prox,
        values=torch.zeros_like(mask),
        entropy=torch.zeros_like(mask),
        has_prox=torch.ones(rows, dtype=torch.bool),
        weight=weight,
        shrink=shrink,
        advantages=torch.randn(mask.shape, generator=draw) * mask,
        returns=torch.zeros_like(mask),
    )


def score(batch: Batch, **tensors: torch.Tensor) -> Scored:
    """The batch as a trainer without critic and reference scores it: prox is behav by default."""
    prox = tensors.pop("logp_prox", batch.logp_behav)
    zeros = torch.zeros_like(batch.mask)
    defaults = {"logp_ref": prox, "values": zeros, "entropy": zeros}
    defaults["has_prox"] = torch.ones(len(batch), dtype=torch.bool)
    return batch.into(Scored, logp_prox=prox, **(defaults | tensors))


def build_learner(
    config: Config, policy: Policy, reference: Policy | None = None, *, needs_prox: bool = False
) -> Learner:
    """A learner with the objective and the advantage of a recipe.

    With `needs_prox` all rows get their prox before the update, as if the advantage read it.
    """
    algo = config.algo
    return Learner(
        policy,
        config,
        reference=reference,
        objective=SURROGATES[algo.objective],
        advantage=dataclasses.replace(ADVANTAGES[algo.advantage], needs_prox=needs_prox),
    )


def recompute(learner: Learner, batch: Trainable, step: int = 0) -> Trainable:
    """A trainable batch with what the forwards of a learner add."""
    sampled = Batch(**{f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)})
    scored = learner.recompute(sampled, step)
    return batch.replace(**{f.name: getattr(scored, f.name) for f in dataclasses.fields(Scored)})


def first_quick(names, count):
    """The names as parameters; `make test` leaves out all but the first `count`."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=[slow] * (i >= count)) for i, n in enumerate(names)]
