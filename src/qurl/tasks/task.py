"""What a task is, and how a question becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qurl.errors import ConfigError, DataError, ModelError
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
    system: str = ""  # a system message for chats that have none
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        template = getattr(self.tokenizer, "chat_template", None) or ""
        texts = list(template.values()) if isinstance(template, dict) else [template]
        for name in self.template_arguments if self.tokenizer is not None else ():
            if not any(name in text for text in texts):
                has = "does not read it" if self.is_chat else "is missing"
                raise ConfigError(
                    f"task.chat_template_kwargs.{name}: the model's chat template {has}; remove it"
                )

    @property
    def is_chat(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, messages: Messages, default_instruction: str) -> tuple[str, tuple[int, ...]]:
        """The text and the token ids of a prompt; no ids without a tokenizer."""
        messages = self.instruct(messages, default_instruction)
        if not self.is_chat:
            text = "\n\n".join(message["content"] for message in messages)
            return text, tuple(self.tokenizer(text).input_ids) if self.tokenizer else ()
        text = self._render(messages)
        # The template writes the special tokens itself.
        return text, tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _render(self, messages: Messages) -> str:
        from jinja2 import TemplateError

        causes = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
        options = {"tokenize": False, "add_generation_prompt": True, **self.template_arguments}
        try:
            text = self.tokenizer.apply_chat_template(messages, **options)
        # A template is a program: it raises errors of its own, or fails on what it gets.
        except (TemplateError, RecursionError, *causes) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(
                f"the model's chat template fails on messages of the roles {roles}: "
                f"{type(error).__name__}: {error}; fix chat_template in its tokenizer, or the "
                "messages"
            ) from error
        if not text.strip():
            raise ModelError("the model's chat template makes an empty prompt; fix chat_template")
        return text

    def instruct(self, messages: Messages, default: str) -> Messages:
        """Put the system message first, and the instruction on a line after the last message."""
        instruction = default if self.instruction == "auto" else self.instruction
        if self.system and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
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
