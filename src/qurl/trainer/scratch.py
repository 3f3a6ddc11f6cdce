"""A tiny model from scratch, warm-started on worked answers: RL on a laptop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qurl.config import ScratchConfig
from qurl.seeds import generator

IGNORED = -100  # for cross_entropy: prompt and padding are not learned
Example = tuple[list[int], list[int]]  # tokens of a prompt and of its answer with its end


def build_tiny_llama(config: ScratchConfig, tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    own = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=1024,
        **{name: getattr(tokenizer, name) for name in special},
    )
    return LlamaForCausalLM(own)


def warm_start_(
    model: Any, example: Callable[[int], Example], count: int, config: ScratchConfig, seed: int
) -> None:
    """Train briefly on worked answers; `example(row)` returns one of `count`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_lr, weight_decay=0.0)
    for step in range(config.warm_start_steps):
        draw = generator(seed, "warm start", step)
        rows = torch.randint(count, (config.warm_start_batch,), generator=draw)
        tokens, labels = _pad([example(row) for row in rows.tolist()], model.config.pad_token_id)
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits[:, :-1]
        labels = labels[:, 1:].flatten().to(model.device)
        F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _pad(examples: list[Example], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Right-padded tokens, and labels on the answers only."""
    tokens = [torch.tensor(prompt + answer) for prompt, answer in examples]
    labels = [torch.tensor([IGNORED] * len(prompt) + answer) for prompt, answer in examples]
    return pad_sequence(tokens, True, pad_token_id), pad_sequence(labels, True, IGNORED)
