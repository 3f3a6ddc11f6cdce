"""Short measurements of one recipe's step on this GPU, with random weights of its model's shape.

Rollouts: a call of few tokens, which has the prefill, then the seconds of a decode step at the
workload's mean context, as the difference of two calls: a step's time is linear in the context.
Updates: two mini-batches of two micro-batches. `qurl.bench.advise` scales both to a whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from qurl.bench.arms import Arm
from qurl.bench.forecast import StepSeconds, Work
from qurl.bench.judge import logprob_gap
from qurl.bench.record import free_memory, paused_gc, time_call
from qurl.bench.shapes import build_model
from qurl.bench.train import TrainBench, Trial
from qurl.bench.workload import EngineContender, Setup, Workload
from qurl.config import Config, ModelConfig
from qurl.rollout import build_engine
from qurl.run.shape import Shape
from qurl.tasks.task import Task
from qurl.trainer.batches import pad
from qurl.trainer.policy import load_policy
from qurl.types import Graded, SamplingParams

FEW_TOKENS, MORE_TOKENS = 8, 136
MISMATCH_PROBLEMS, MISMATCH_TOKENS = 16, 64


def measure_rollouts(
    shape: Shape, arms: Sequence[Arm], work: Work, group_size: int, device: torch.device
) -> dict[str, float]:
    """Seconds by arm of rollouts of `work.together` sequences of equal length.

    Engines with wrong log-probs raise.
    """
    model = build_model(shape, device)
    num_prompts = max(1, int(work.together) // group_size)
    workload = Workload("probe", num_prompts, group_size, work.prompt_tokens, FEW_TOKENS)
    seconds = {}
    for arm in arms:
        setup = Setup("local", shape, arm.format, arm.kv)
        contender = EngineContender(setup, model, workload.num_sequences)
        found = _rollout_seconds(contender, workload, work, model, device)
        seconds[arm.name] = found * work.together / workload.num_sequences
        del contender
        free_memory()
    del model
    free_memory()
    return seconds


def _rollout_seconds(
    contender: EngineContender, workload: Workload, work: Work, judge: Any, device: torch.device
) -> float:
    vocabulary = contender.setup.shape.vocabulary

    def seconds_of(workload: Workload) -> float:
        problems = workload.problems(vocabulary, seed=0)
        with paused_gc():
            return time_call(lambda: contender.generate(problems, workload.params(0)), device)[0]

    problems = workload.problems(vocabulary, seed=0)
    groups = contender.read(contender.generate(problems, workload.params(0)))
    logprob_gap(judge, contender.setup, problems, groups)
    prefill = seconds_of(workload)
    middle = max(1, round(work.prompt_tokens + (work.new_tokens - MORE_TOKENS) / 2))
    few, more = (
        replace(workload, prompt_tokens=middle, new_tokens=n) for n in (FEW_TOKENS, MORE_TOKENS)
    )
    seconds_of(more)  # captures the graphs of these contexts
    # The fastest of three: on a busy machine a difference of two times can be negative.
    fastest = {length: min(seconds_of(length) for _ in range(3)) for length in (few, more)}
    step = (fastest[more] - fastest[few]) / (MORE_TOKENS - FEW_TOKENS)
    return prefill + max(0, work.new_tokens - FEW_TOKENS) * step


def measure_training(
    shape: Shape, arms: Sequence[Arm], work: Work, config: Config, device: torch.device
) -> tuple[Work, dict[str, StepSeconds]]:
    """What was trained on, and its seconds by arm; there are no rollouts in them."""
    length, group = work.prompt_tokens + work.new_tokens, 2
    sequences = max(2 * group, 4 * config.batch.microbatch_tokens // length // group * group)
    same = ("logits_chunk", "keep_logits", "gradient_checkpointing")
    model = {key: getattr(config.model, key) for key in same}
    bench = TrainBench(
        device=device.type,  # type: ignore[arg-type]
        sequences=sequences,
        group=group,
        prompt_tokens=work.prompt_tokens,
        tokens=work.new_tokens,
        minibatches=2,
        microbatch_tokens=config.batch.microbatch_tokens,
    )
    found = {}
    for arm in arms:
        trial = Trial(bench, bench.config(arm, model=model), shape, device)
        trial.run()  # compiles and allocates
        update, prox = trial.run()
        found[arm.name] = StepSeconds(rollout=0.0, forwards=prox, update=update)
        del trial
        free_memory()
    done = Work(sequences, work.prompt_tokens, work.new_tokens, sequences, num_updates=2)
    done = replace(done, num_forwards=0.5, has_checkpointing=work.has_checkpointing)
    return done, found


def measure_mismatch(
    path: str, task: Task, arms: Sequence[Arm], temperature: float, device: torch.device
) -> dict[str, float]:
    """Mean |log-prob gap| between engine and trainer, of tokens that the engine samples."""
    policy = load_policy(path, ModelConfig(), device).freeze_()
    problems = [task[i] for i in range(min(MISMATCH_PROBLEMS, len(task)))]
    params = SamplingParams(max_tokens=MISMATCH_TOKENS, temperature=temperature)
    gaps = {}
    for arm in arms:
        engine = build_engine("local", policy.model, policy.tokenizer, quant=arm.format, kv=arm.kv)
        rollouts = engine.generate(problems, params)
        batch = pad([Graded(r, [0.0], [{"accuracy": 0.0}]) for r in rollouts]).to(device)
        with torch.no_grad():
            logp = policy.score(batch).logp
        gap = ((logp - batch.logp_behav).abs() * batch.mask).sum() / batch.mask.sum()
        gaps[arm.name] = float(gap)
        del engine
        free_memory()
    return gaps
