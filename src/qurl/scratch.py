"""A tiny model made from scratch, warm-started on worked answers: RL for a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl.config import Config, ScratchConfig
from qurl.errors import ConfigError
from qurl.seeds import derive_seed, generator
from qurl.tasks import load_task
from qurl.tasks.generated import GeneratedTask
from qurl.tasks.tokenizer import build_tokenizer

IGNORED = -100  # of cross_entropy: prompt and padding are not learned


def make_scratch_model(config: Config, folder: Path, device: torch.device) -> None:
    """Build the tiny model, teach it the task a little, and save both it and its tokenizer."""
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
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.seed, "scratch"))
        model = build_tiny_llama(config.model.scratch, tokenizer).to(device)
    warm_start_(model, task, tokenizer, config)
    disable_progress_bar()  # it would garble the run's own progress line
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tiny_llama(config: ScratchConfig, tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=1024,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def warm_start_(model: Any, task: GeneratedTask, tokenizer: Any, config: Config) -> None:
    """A short supervised pass over worked answers."""
    scratch = config.model.scratch
    optimizer = torch.optim.AdamW(model.parameters(), lr=scratch.warm_start_lr, weight_decay=0.0)
    for step in range(scratch.warm_start_steps):
        draw = generator(config.seed, "warm start", step)
        rows = torch.randint(len(task), (scratch.warm_start_batch,), generator=draw)
        tokens, labels = _examples(task, rows.tolist(), tokenizer)
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten().to(model.device),
            ignore_index=IGNORED,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _examples(task: GeneratedTask, rows: list[int], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Prompt, worked answer and end token, right-padded; labels on the answer only."""
    examples = []
    for row in rows:
        problem = task[row]
        answer = tokenizer.encode(task.worked_answer(problem), add_special_tokens=False)
        examples.append((list(problem.prompt_ids), [*answer, tokenizer.eos_token_id]))
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    tokens = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (prompt, answer) in enumerate(examples):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return tokens, labels
