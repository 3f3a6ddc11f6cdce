"""What a task is, and how a question becomes the prompt of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qurl.types import Problem

Content = str | Sequence[Mapping[str, str]]
"""A question, or chat messages of `role` and `content`."""


class Task(Protocol):
    """A sequence of problems and the grader of their answers."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> str:
        """What `GradingPool` grades this task with."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a user must be told, such as how many rows were left out and why."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem:
        """The problem at `index`, tokenised now; IndexError past the end."""
        ...


def encode_prompt(content: Content, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
    """The text and the token ids of a prompt; no ids without a tokenizer.

    A tokenizer with a chat template renders the content as a conversation that the assistant is
    to continue. Any other reads it as plain text.
    """
    text = _render(content, tokenizer)
    if tokenizer is None:
        return text, ()
    # A chat template writes the special tokens itself.
    ids = tokenizer(text, add_special_tokens=not has_chat_template(tokenizer)).input_ids
    return text, tuple(ids)


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def add_instruction(content: Content, instruction: str) -> Content:
    """Put the instruction on a line after the question, or after the last message."""
    if not instruction:
        return content
    if isinstance(content, str):
        return f"{content}\n{instruction}"
    *first, last = content
    return [*first, {**last, "content": f"{last['content']}\n{instruction}"}]


def _render(content: Content, tokenizer: Any) -> str:
    if not has_chat_template(tokenizer):
        return content if isinstance(content, str) else "\n\n".join(m["content"] for m in content)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
