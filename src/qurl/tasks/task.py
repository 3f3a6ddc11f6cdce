"""What a task is, and how a question becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qurl.types import Problem

Content = str | Sequence[Mapping[str, str]]
"""A question, or chat messages of `role` and `content`."""


class Task(Protocol):
    """A sequence of problems and the reward that grades their answers."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> str:
        """What `GradingPool` grades this task with."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Warnings for the user, such as how many rows were left out and why."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem:
        """The problem at `index`, tokenised now; IndexError past the end."""
        ...


@dataclass(frozen=True)
class Prompts:
    """How questions become prompts, and how long those may be."""

    tokenizer: Any
    instruction: str
    """Added to each question; `auto` leaves it to the task."""
    max_tokens: int
    limited_by: str
    """The setting that limits them, for errors."""
    skip_long: bool
    """Leave out prompts that are too long instead of raising an error."""

    @property
    def limit(self) -> str:
        return f"{self.limited_by} = {self.max_tokens}"

    @property
    def is_chat(self) -> bool:
        """Does the tokenizer have a chat template?"""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, content: Content, default_instruction: str) -> tuple[str, tuple[int, ...]]:
        """The text and the token ids of a prompt; no ids without a tokenizer.

        A chat template renders the content as a conversation that the assistant continues. Other
        tokenizers read it as plain text.
        """
        content = self.instruct(content, default_instruction)
        if not self.is_chat:
            text = text_of(content, "\n\n")
            return text, tuple(self.tokenizer(text).input_ids) if self.tokenizer else ()
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        # The template writes the special tokens itself.
        return text, tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def instruct(self, content: Content, default: str) -> Content:
        """Put the instruction on a line after the question or the last message."""
        instruction = default if self.instruction == "auto" else self.instruction
        if not instruction:
            return content
        if isinstance(content, str):
            return f"{content}\n{instruction}"
        *first, last = content
        return [*first, {**last, "content": f"{last['content']}\n{instruction}"}]


def text_of(content: Content, separator: str) -> str:
    return content if isinstance(content, str) else separator.join(m["content"] for m in content)
