"""Makes the model of `model.path = "scratch"` and teaches it the task a little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qurl.config import Config
from qurl.errors import ConfigError
from qurl.seeds import derive_seed
from qurl.tasks import load_task
from qurl.tasks.generated import GeneratedTask
from qurl.tasks.tokenizer import build_tokenizer
from qurl.trainer.scratch import Example, build_tiny_llama, warm_start_


def make_scratch_model(config: Config, folder: Path, device: torch.device) -> None:
    """Build the tiny model, warm-start it, and save it with its tokenizer."""
    from transformers.utils.logging import disable_progress_bar

    tokenizer = build_tokenizer()
    task = load_task(
        config.task.name,
        path=config.task.path,
        tokenizer=tokenizer,
        seed=config.seed,
        difficulty=config.task.difficulty,
    )
    if not isinstance(task, GeneratedTask):
        raise ConfigError(
            f"model.path = 'scratch' needs a generated task to learn from, not {task.name!r}; set "
            "model.path to a pretrained model, or task.name to arithmetic or countdown"
        )

    def example(row: int) -> Example:
        problem = task[row]
        answer: Any = tokenizer.encode(task.worked_answer(problem), add_special_tokens=False)
        end: Any = tokenizer.eos_token_id
        return list(problem.prompt_ids), [*answer, end]

    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.seed, "scratch"))
        model = build_tiny_llama(config.model.scratch, tokenizer).to(device)
    warm_start_(model, example, len(task), config.model.scratch, config.seed)
    disable_progress_bar()  # it would garble the run's own progress line
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
