"""What a task is, and how a question becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qurl.errors import DataError
from qurl.types import Problem

Messages = Sequence[Mapping[str, str]]
"""A chat: `role` and `content` of each message."""


class Task(Protocol):
    """A sequence of problems and the reward that grades their answers."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> str: ...  # what `GradingPool` grades this task with

    @property
    def notes(self) -> Sequence[str]: ...  # warnings for the user: which rows were left out, why

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...  # tokenised now; IndexError past the end


@dataclass(frozen=True)
class Prompts:
    """How questions become prompts, and how long those may be."""

    tokenizer: Any
    instruction: str  # added to each question; `auto` leaves it to the task
    max_tokens: int
    limit: str  # the setting that limits them and its value, for errors
    skip_long: bool  # leave out prompts that are too long instead of raising an error

    @property
    def is_chat(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, messages: Messages, default_instruction: str) -> tuple[str, tuple[int, ...]]:
        """The text and the token ids of a prompt; no ids without a tokenizer."""
        messages = self.instruct(messages, default_instruction)
        if not self.is_chat:
            text = "\n\n".join(message["content"] for message in messages)
            return text, tuple(self.tokenizer(text).input_ids) if self.tokenizer else ()
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        # The template writes the special tokens itself.
        return text, tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def instruct(self, messages: Messages, default: str) -> Messages:
        """Put the instruction on a line after the last message."""
        instruction = default if self.instruction == "auto" else self.instruction
        if not instruction:
            return messages
        *first, last = messages
        return [*first, {**last, "content": f"{last['content']}\n{instruction}"}]

    def admit(self, ids: Sequence[int], where: str) -> bool:
        """Is a prompt short enough? Raises if it is not and long ones are not skipped."""
        if len(ids) > self.max_tokens and not self.skip_long:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, more than {self.limit}; change that, "
                "or set task.skip_long_prompts"
            )
        return len(ids) <= self.max_tokens
