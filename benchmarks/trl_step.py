"""TRL's GRPOTrainer with vLLM in its process, on the steps of `qurl bench step`.

`qurl bench step --against trl` runs this once for each setting and kind of lengths: the same
weights, prompts, lengths, rewards, loss and number of optimizer updates. TRL recomputes the
log-probs of vLLM's completions as we do. Its settings, both with FP32 masters and BF16 compute:

    defaults   as GRPOConfig has them: 8 sequences a pass, gradient checkpointing, no Liger
    tuned      no checkpointing, Liger's kernels, passes as long as ours

Without a GPU, transformers samples in FP32 instead of vLLM, and Liger is left out: that shows that
the script works, not how fast TRL is. Run with TRL 1.16, on an H200 with vLLM 0.25.1.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.scripts import run_command
from benchmarks.vllm_rollout import ENVIRONMENT
from qurl.bench.record import Record
from qurl.bench.shapes import SHAPES
from qurl.bench.step import (
    WARM_UP,
    LetterTask,
    StepBench,
    StepFigures,
    alternate,
    end_ids,
    save_figures,
)
from qurl.errors import ConfigError, EngineError
from qurl.ops.device import pick_device
from qurl.tasks.tokenizer import build_tokenizer

DEFAULT_PASS = 8
"""Sequences per pass (per_device_train_batch_size) of TRL's defaults."""


@dataclass(frozen=True)
class TrlStep(StepBench):
    """TRL's side of `qurl bench step`: one model, one kind of lengths, one setting."""

    folder: Path = Path("model")
    """The model, as `qurl bench step` saved it."""
    setting: Literal["defaults", "tuned"] = "tuned"
    """TRL's own defaults, or what makes it comparable and fast."""


def trl_options(bench: TrlStep, device: torch.device) -> dict[str, Any]:
    """Arguments of GRPOConfig. TRL's steps are optimizer updates; ours have several."""
    num_updated, left = divmod(bench.sequences, bench.minibatches)
    if left:
        raise ConfigError(f"TRL needs --sequences in {bench.minibatches} equal mini-batches")
    length = bench.prompt_tokens + bench.tokens
    is_tuned = bench.setting == "tuned"
    most = max(1, bench.microbatch_tokens // length) if is_tuned else DEFAULT_PASS
    size = max(n for n in range(1, num_updated + 1) if num_updated % n == 0 and n <= most)
    ends = end_ids(SHAPES[bench.model], bench.tokens, bench.lengths)
    options: dict[str, Any] = {
        "max_steps": (WARM_UP + bench.repeats) * bench.minibatches,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": num_updated // size,
        "steps_per_generation": bench.sequences // size,
        "num_generations": bench.group,
        "num_iterations": 1,
        "beta": 0.0,
        "loss_type": "grpo",
        "max_completion_length": bench.tokens,
        "temperature": 1.0,
        "seed": bench.seed,
        **{"report_to": "none", "logging_strategy": "no", "save_strategy": "no"},
        "disable_tqdm": True,
    }
    if is_tuned:
        options["gradient_checkpointing"] = False
    if device.type == "cpu":
        # Without an end, transformers takes the tokenizer's; it must not come too early.
        kept = {"eos_token_id": ends} if ends else {"min_new_tokens": bench.tokens}
        return options | {"use_cpu": True, "bf16": False, "generation_kwargs": kept}
    return options | {
        "use_liger_kernel": is_tuned,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": length,
        # Tokens that our tokenizer does not know cannot be spelled.
        "generation_kwargs": {"ignore_eos": True, "stop_token_ids": ends, "detokenize": False},
    }


def run(bench: TrlStep) -> None:
    """Train, and save the seconds of each generation with its updates."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise EngineError(f"{error}; install TRL with pip install 'trl[vllm,liger]'") from error

    device = pick_device(bench.device)
    is_cuda = device.type == "cuda"
    ends: list[tuple[float, int]] = []  # of our steps: time, tokens so far

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % bench.minibatches == 0:
                if is_cuda:
                    torch.cuda.synchronize()
                now, num_tokens = time.perf_counter(), int(state.num_input_tokens_seen)
                if ends:  # the first has no beginning; its time includes the start of vLLM
                    print(f"step {len(ends) + 1}: {now - ends[-1][0]:.1f} s", file=sys.stderr)
                ends.append((now, num_tokens))

    tokenizer: Any = build_tokenizer()
    task = LetterTask(tokenizer, bench.prompt_tokens, bench.seed)
    num_prompts = (WARM_UP + bench.repeats) * bench.sequences // bench.group
    options = trl_options(bench, device)
    trainer = GRPOTrainer(
        model=str(bench.folder),
        reward_funcs=lambda completions, **_: alternate(completions),
        args=GRPOConfig(output_dir=str(bench.folder.with_name("trl")), **options),
        train_dataset=Dataset.from_dict({"prompt": [task.text(i) for i in range(num_prompts)]}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    figures = summarize(ends, bench, peak_gib)
    record = Record("step", bench.out, device)
    shape, arm = SHAPES[bench.model], f"trl-{bench.setting}"
    save_figures(record, bench, shape, arm, bench.lengths, figures)


def summarize(ends: list[tuple[float, int]], bench: TrlStep, peak_gib: float | None) -> StepFigures:
    """Figures of the steps after the warm-up; raises if they had other lengths than ours."""
    times, counts = zip(*ends[WARM_UP - 1 :], strict=True)
    seconds = tuple(b - a for a, b in pairwise(times))
    num_tokens = counts[-1] - counts[0]
    if bench.lengths == "equal" and num_tokens != len(seconds) * bench.num_tokens:
        expected = len(seconds) * bench.num_tokens
        raise EngineError(f"TRL trained on {num_tokens} tokens instead of {expected}")
    return StepFigures(
        seconds=seconds,
        step_s=statistics.median(seconds),
        parts={},
        tokens_per_s=num_tokens / sum(seconds),
        peak_gib=peak_gib,
    )


if __name__ == "__main__":
    sys.exit(run_command("trl_step", TrlStep, run))
