"""When a completion ends, and what its text is: the same rules in every engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from qurl.errors import EngineError, ModelError
from qurl.types import Completion, SamplingParams

_TOKENS_PER_CHARACTER = 4
"""A byte-level tokenizer may spell one character with this many tokens."""


@dataclass(frozen=True)
class StopRule:
    """Ends a completion at a token, at a string, or when it has all tokens that it may have."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: Any

    @staticmethod
    def of(model: nn.Module, tokenizer: Any, params: SamplingParams) -> StopRule:
        """The model's and tokenizer's end-of-sequence tokens and the stops of `params`."""
        if params.ignore_eos:
            return StopRule(frozenset(), (), tokenizer)
        strings = tuple(s for s in params.stop if isinstance(s, str))
        if strings and tokenizer is None:
            raise EngineError(
                f"stop strings {list(strings)} need a tokenizer, and this engine has none; "
                "build the engine with one, or stop on token ids"
            )
        if "" in strings:
            raise EngineError("stop holds an empty string, which every completion contains")
        ids = {s for s in params.stop if not isinstance(s, str)}
        special = special_tokens(tokenizer) if strings else {}
        ids.update(special[s] for s in strings if s in special)
        strings = tuple(s for s in strings if s not in special)
        for string in strings:
            if inner := next((token for token in special if token in string), None):
                raise EngineError(
                    f"stop = {string!r} holds the special token {inner!r}, which no text has; "
                    f"write {inner!r} alone, or its id"
                )
        check_stop_ids(ids, model)
        ends = frozenset(ids) | eos_ids(model, tokenizer)
        return StopRule(ends, strings, tokenizer)

    @property
    def tail_length(self) -> int:
        """How many last tokens decide the end: decoding all of them each time is quadratic."""
        longest = max((len(s) for s in self.strings), default=0)
        return _TOKENS_PER_CHARACTER * (longest + 1)

    def finish(self, token_ids: Sequence[int], num_left: int) -> Literal["stop", "length"] | None:
        """Why the completion ends with its last token, or None if it goes on.

        The last `tail_length` tokens suffice; `num_left` more may follow.
        """
        if token_ids[-1] in self.token_ids:
            return "stop"
        if self.strings:
            text = self._decode(token_ids[-self.tail_length :])
            if any(s in text for s in self.strings):
                return "stop"
        return None if num_left else "length"

    def complete(
        self, token_ids: Sequence[int], logprobs: Sequence[float], finish: Any, versions: Any
    ) -> Completion:
        """The finished record; its text is cut before the first stop string, its tokens are not."""
        text = "" if self.tokenizer is None else self._decode(token_ids)
        text = text[: min((i for s in self.strings if (i := text.find(s)) >= 0), default=None)]
        return Completion(tuple(token_ids), tuple(logprobs), text, finish, versions=tuple(versions))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that are left out of a completion's text, and their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {token.content: id for id, token in added.items() if token.special}
    names = getattr(tokenizer, "all_special_tokens", [])
    return found | dict(zip(names, getattr(tokenizer, "all_special_ids", []), strict=True))


def check_stop_ids(ids: Iterable[int], model: Any) -> None:
    """Refuse ids that the model cannot sample."""
    vocabulary = model.config.get_text_config().vocab_size
    if beyond := [id for id in sorted(ids) if not 0 <= id < vocabulary]:
        raise EngineError(
            f"stop id {beyond[0]} is not in the model's vocabulary of {vocabulary} tokens; see "
            "sampling.stop_ids"
        )


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence tokens of the generation config, else of the config; and the tokenizer's."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = getattr(model.config, "eos_token_id", None) if found is None else found
    ids = found if isinstance(found, (list, tuple)) else [found]
    ids = [i for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool) or abs(id) >= 2**31:
            raise ModelError(
                f"eos_token_id = {str(found)[:100]} of the model's config.json or "
                "generation_config.json is not a token id, nor a list of them"
            )
    return frozenset(id for id in ids if id >= 0)  # -1 stands for none in some configs
