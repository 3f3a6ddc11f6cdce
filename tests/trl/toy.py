"""A toy task for TRL: completions are better the more of their tokens lie below HALF."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from qurl.integrations.trl import QurlGRPOTrainer, QurlOptions
from qurl.tasks.tokenizer import build_tokenizer
from tests.models import tiny_llama

HALF = 50
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def share_below_half(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < HALF for token in ids) / len(ids) for ids in completion_ids]


def config(folder: Path | str, **changes: Any) -> GRPOConfig:
    """Two updates per generation, two micro-batches of six rows per update."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 4,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    with warnings.catch_warnings():  # of transformers, about its own names
        warnings.simplefilter("ignore", FutureWarning)
        return GRPOConfig(**(settings | changes))


def trainer(
    folder: Path | str,
    kind: type[QurlGRPOTrainer] = QurlGRPOTrainer,
    options: QurlOptions | None = None,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> QurlGRPOTrainer:
    """A trainer of the toy task; `given` replaces its arguments, `changes` its config's."""
    prompts = [f"{i}+{i}=" for i in range(24)]
    arguments: dict[str, Any] = {
        "model": tiny_llama(),
        "reward_funcs": share_below_half,
        "args": config(folder, **changes),
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": build_tokenizer(),
    }
    return kind(**(arguments | (given or {})), options=options)
