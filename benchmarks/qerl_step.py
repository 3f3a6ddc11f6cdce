"""A whole GRPO step of LoRA beside a frozen base in NVFP4 (QeRL), at the size of a large model.

    python -m benchmarks.qerl_step --model 32B --sequences 32 --tokens 512

Random weights are made in codes one layer at a time, so the model is never whole in BF16, neither
on the GPU nor on disk. A step is what the loop does: sync, rollouts, rewards, advantages, loss,
optimizer step. Rewards are 0 and 1 in turn. Adds to benchmarks/results/qerl_step.json.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.scripts import run_command
from qurl.bench.arms import Arm, BatchBench
from qurl.bench.record import Record, time_call
from qurl.bench.shapes import SHAPES, model_config
from qurl.bench.step import alternate
from qurl.bench.train import check_update, prepare
from qurl.bench.workload import Workload
from qurl.config import Config
from qurl.losses import SURROGATES
from qurl.objectives import ADVANTAGES
from qurl.ops.device import pick_device
from qurl.quant.coded_linear import CodedLinear
from qurl.quant.formats import get_format
from qurl.quant.linear import projections
from qurl.rollout import build_engine
from qurl.run.shape import Shape
from qurl.trainer.batches import pad
from qurl.trainer.learner import Learner
from qurl.trainer.policy import Policy
from qurl.types import Graded

WARM_UP = 1
CHECKED = 4
"""Sequences on which engine and trainer are compared; that takes no time of the step."""
ROW = "{part:8}  {seconds:8.2f} s"


@dataclass(frozen=True)
class QerlStep(BatchBench):
    """Seconds of the parts of a GRPO step, and the memory that it takes."""

    model: str = "32B"
    """A shape of Qwen2.5."""
    sequences: int = 32
    """Sequences of a step."""
    tokens: int = 512
    """Tokens of a completion."""
    microbatch_tokens: int = 4224
    """Most tokens per forward and backward pass."""
    minibatches: int = 1
    """Optimizer updates per step."""
    rank: int = 32
    """Of the adapters."""
    repeats: int = 2
    """Measured steps; the median counts."""


def build_coded_model(shape: Shape, device: torch.device, seed: int) -> Any:
    """A transformers model with projections in NVFP4, and all else in FP32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(**model_config(shape))
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config)
    for name, layer in list(projections(model)):
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        random = nn.Linear(*sizes, device=device, dtype=torch.bfloat16)
        nn.init.normal_(random.weight, std=config.initializer_range)
        model.set_submodule(name, CodedLinear(random, get_format("nvfp4"), device))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                numbers = torch.empty(parameter.shape, device=device)
                is_norm = parameter.dim() == 1
                numbers.fill_(1.0) if is_norm else numbers.normal_(std=config.initializer_range)
                module._parameters[name] = nn.Parameter(numbers)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    model.generation_config.eos_token_id = config.eos_token_id = None
    return model


class Step:
    """What a step needs, and its parts."""

    def __init__(self, bench: QerlStep, config: Config, device: torch.device) -> None:
        self.bench, self.device = bench, device
        shape = SHAPES[bench.model]
        model = build_coded_model(shape, device, bench.seed)
        self.policy = Policy(model, None, config.model, device).adapt_(config.model, config.seed)
        self.engine = build_engine(
            *("local", model, None),
            quant="nvfp4",
            max_batch=bench.sequences,
            release_kv=True,
            compute_dtype=self.policy.compute_dtype,
        )
        parts = (SURROGATES[config.algo.objective], ADVANTAGES[config.algo.advantage])
        self.learner = Learner(self.policy, config, objective=parts[0], advantage=parts[1])
        groups = bench.sequences // bench.group
        self.workload = Workload("qerl", groups, bench.group, bench.prompt_tokens, bench.tokens)
        self.vocabulary = shape.vocabulary

    def run(self, number: int) -> dict[str, float]:
        """Seconds of each part, and the mismatch between engine and trainer."""
        model, problems = self.policy.model, self.workload.problems(self.vocabulary, number)
        sync_s, _ = time_call(lambda: self.engine.sync(model, version=number), self.device)
        params = self.workload.params(number)
        rollout_s, rollouts = time_call(lambda: self.engine.generate(problems, params), self.device)
        graded = [
            Graded(r, alternate(r.completions), [{"accuracy": x} for x in alternate(r.completions)])
            for r in rollouts
        ]
        batch = pad(graded).to(self.device)
        few = batch.select(torch.arange(min(len(batch.lengths), CHECKED), device=self.device))
        with torch.no_grad():
            gaps = (self.policy.score(few).logp - few.logp_behav)[few.mask.bool()].abs()
        # A step of one mini-batch needs no prox forward: its prox is the detached training forward.
        scored = self.learner.recompute(batch, number)
        trainable = prepare(self.learner, scored)
        update_s, (_, metrics) = time_call(
            lambda: self.learner.update(trainable, number), self.device
        )
        check_update(metrics)
        seconds = {"sync": sync_s, "rollout": rollout_s, "update": update_s}
        return seconds | {"step": sum(seconds.values()), "mean_gap": float(gaps.mean())}


def run(bench: QerlStep) -> None:
    bench.check()
    device = pick_device(bench.device)
    record = Record("qerl_step", bench.out, device)
    settings = {"base": "nvfp4", "lora_rank": bench.rank, "gradient_checkpointing": True}
    config = bench.config(Arm.of("nvfp4"), model=settings)
    step = Step(bench, config, device)
    rows = [step.run(number) for number in range(WARM_UP + bench.repeats)][WARM_UP:]
    figures = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for part in ("sync", "rollout", "update", "step"):
        print(ROW.format(part=part, seconds=figures[part]))
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(f"peak {figures['peak_gib']:.1f} GiB")
    print(f"mean |gap| between engine and trainer {figures['mean_gap']:.2g}")
    key = f"{bench.model} nvfp4 lora-{bench.rank} {bench.batch}"
    record.add(key, settings=bench.settings(SHAPES[bench.model], "nvfp4"), figures=figures)


if __name__ == "__main__":
    sys.exit(run_command("qerl_step", QerlStep, run))
