"""Drafts from earlier responses to the same problem (HistoSpec): who gets one, and what counts.

One decode step takes the newest token of a request together with its draft, and draws a token after
each of them. The draft counts as far as it is what was drawn. So a draft token x is accepted with
probability p(x), and where it is not, the drawn token is distributed like p without x: the rule of
speculative sampling for a draft that is certain of itself. Each place has the random number that it
would have had without drafts, so the tokens are those of plain decoding, not only their
distribution.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median

import numpy as np

from qurl.errors import ConfigError, DataError
from qurl.rollout.local.patterns import LONGEST_PATTERN, PatternIndex
from qurl.rollout.local.requests import FIRST_WINDOW, Group, Request
from qurl.types import Problem, TokenIds


@dataclass(frozen=True)
class Window:
    """How the draft of a request grows and shrinks, and how short its pattern may be."""

    doubles: bool
    longest: int
    shortest_pattern: int

    def resize(self, window: int, num_drafted: int, num_accepted: int) -> int:
        """The next window of a request.

        The released code halves it also after a draft that was right but shorter than the window.
        """
        if self.doubles:
            is_larger = num_accepted >= window
            return min(2 * window, self.longest) if is_larger else max(FIRST_WINDOW, window // 2)
        return min(window + 2, self.longest) if num_accepted == num_drafted else FIRST_WINDOW


WINDOWS = {
    "double_halve": Window(doubles=True, longest=16, shortest_pattern=4),
    "add_reset": Window(doubles=False, longest=32, shortest_pattern=3),
}
"""The released code's rule, and what is known of the paper's."""


@dataclass
class DraftCounts:
    """What drafts did for an engine so far."""

    steps: int = 0
    """Decode steps, with drafts or without."""
    draft_steps: int = 0
    """Steps in which a request had a draft."""
    rows: int = 0
    """Requests in all steps, each as often as it took part."""
    tokens: int = 0
    """Tokens that they got and kept: none behind an end."""
    drafts: int = 0
    drafted: int = 0
    """Draft tokens."""
    accepted: int = 0
    index_seconds: float = 0.0
    """For building indices."""

    def since(self, before: DraftCounts) -> DraftCounts:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return DraftCounts(*(now - then for now, then in pairs))

    def metrics(self) -> dict[str, float]:
        return {
            "draft/accept_frac": self.accepted / max(self.drafted, 1),
            "draft/accepted_length": self.accepted / max(self.drafts, 1),
            "draft/tokens_per_step": self.tokens / max(self.rows, 1),
            "draft/step_frac": self.draft_steps / max(self.steps, 1),
            "draft/hit_frac": self.drafts / max(self.rows, 1),
            "perf/draft_index_seconds": self.index_seconds,
        }


class Pace:
    """Whether drafts save time, as measured, for batches of about the same size.

    A step with drafts gives more tokens and takes longer: its host looks for them and waits for the
    result. That pays if the model is large and the drafts are good.
    """

    NUM_TRIED = 16
    """Steps of either kind before one of them is preferred; the median of the newest counts."""
    NUM_BEFORE_RETRY = 1024
    """Steps of one kind before the other is tried again: contexts and answers change."""

    def __init__(self) -> None:
        newest = partial(deque[float], maxlen=self.NUM_TRIED)
        self._seconds: dict[tuple[int, bool], deque[float]] = defaultdict(newest)
        self._num_alike: Counter[tuple[int, bool]] = Counter()

    def record(self, num_rows: int, seconds: float, *, num_tokens: float, has_drafts: bool) -> None:
        """A step of so many rows, each of which got `num_tokens` on average."""
        size = num_rows.bit_length()
        kind, other = (size, has_drafts), (size, not has_drafts)
        self._seconds[kind].append(seconds / num_tokens)
        self._num_alike[kind] += 1
        self._num_alike[other] = 0
        if self._num_alike[kind] == self.NUM_BEFORE_RETRY:
            self._num_alike[kind] = 0
            self._seconds[other].clear()

    def favours_drafts(self, num_rows: int) -> bool:
        plain, drafted = (self._seconds[num_rows.bit_length(), kind] for kind in (False, True))
        if min(len(plain), len(drafted)) < self.NUM_TRIED:
            return len(drafted) < self.NUM_TRIED
        return median(drafted) < median(plain)


class Drafter:
    """Decides who gets a draft, and of how many tokens."""

    def __init__(self, step_tokens: int, window: str, pace: Pace | None = None) -> None:
        """`step_tokens` of a decode step, draft tokens included; 0 = never a draft.

        Up to that many tokens, a step takes about the time that reading the weights takes, so that
        draft tokens are nearly free. From there on each token costs time, accepted or not. Without
        a `pace` nothing is timed, and there are drafts whenever they fit.
        """
        if window not in WINDOWS:
            raise ConfigError(f"draft_window = {window!r} is not one of {', '.join(WINDOWS)}")
        if step_tokens < 0:
            raise ConfigError(f"draft_tokens = {step_tokens} must be at least 0 (0 = no drafts)")
        self.step_tokens, self.window, self.pace = step_tokens, WINDOWS[window], pace
        self.counts = DraftCounts()

    def room(self, num_rows: int) -> int:
        """Draft tokens that each of so many requests can have; 0 if they are not worth it."""
        room = self.step_tokens // max(num_rows, 1) - 1
        if room < FIRST_WINDOW or not (self.pace is None or self.pace.favours_drafts(num_rows)):
            return 0
        return room

    def draft(self, request: Request, room: int) -> list[int]:
        """What may follow the request's tokens."""
        group = request.group
        # The last token is drawn behind the draft, never out of it.
        length = min(request.window, room, request.num_left - 1)
        if length < 1 or not group.earlier:
            return []
        return self._index(group).draft(request.tail(LONGEST_PATTERN), length)

    def accept(self, request: Request, draft: Sequence[int], drawn: Sequence[int]) -> int:
        """How many of the drawn tokens count; the request's window follows."""
        num_accepted = next((i for i, x in enumerate(draft) if x != drawn[i]), len(draft))
        if draft:
            request.window = self.window.resize(request.window, len(draft), num_accepted)
            self.counts.drafts += 1
            self.counts.drafted += len(draft)
            self.counts.accepted += num_accepted
        return num_accepted + 1

    def count(self, num_rows: int, *, has_draft: bool = False) -> None:
        """Another decode step."""
        self.counts.steps += 1
        self.counts.draft_steps += has_draft
        self.counts.rows += num_rows

    def _index(self, group: Group) -> PatternIndex:
        """Built when the first draft is wanted: in a large batch most problems never want one."""
        if group.index is None:
            start = time.perf_counter()
            shortest = self.window.shortest_pattern
            group.index = PatternIndex(group.problem.prompt_ids, group.earlier, shortest)
            self.counts.index_seconds += time.perf_counter() - start
        return group.index


def check_earlier(problem: Problem, responses: Sequence[TokenIds], vocabulary: int) -> None:
    """Raise if an earlier response has a token that the model cannot draw."""
    for response in responses:
        tokens = np.asarray(response)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise DataError(
                f"problem {problem.id!r}: an earlier response has tokens from {tokens.min()} to "
                f"{tokens.max()}, outside the model's vocabulary [0, {vocabulary}); was it sampled "
                "by another model?"
            )
