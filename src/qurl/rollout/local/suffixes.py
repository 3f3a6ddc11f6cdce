"""An index of earlier responses, which drafts what may come next.

    pattern  the last 7 tokens of the sequence, or fewer: the longest end that goes on in the index
    draft    from there the most frequent next token, again and again, while the product of their
             shares is at least 0.1

The constants are those of the code that HistoSpec's authors released.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from qurl.types import TokenIds

END = -1
"""Stands behind each text of an index; no token has this id."""
LONGEST_PATTERN = 7
SMALLEST_SHARE = 0.1
NUM_LEADING = 5
"""Prompt tokens before each response, so that its beginning is found too."""


class SuffixIndex:
    """A prompt and earlier responses to it, searchable by any run of tokens.

    Its suffixes are sorted, so those that begin with the same tokens lie side by side, and the
    number of them is how often these tokens occur. A tree of suffixes has the same counts.
    """

    def __init__(self, prompt: Sequence[int], responses: Sequence[TokenIds], depth: int) -> None:
        """`depth` is the longest run of tokens that is looked up."""
        texts = [list(prompt), [END]]
        for response in responses:
            texts += [texts[0][-NUM_LEADING:], np.asarray(response), [END]]
        text = np.concatenate([np.asarray(part, np.int64) for part in texts])
        self._text = array("q", text.tobytes())
        self._order = array("q", sort_suffixes(text, depth).tobytes())

    def draft(self, tail: Sequence[int], length: int, shortest: int) -> list[int]:
        """Up to `length` tokens that may follow `tail`, by its longest end that goes on here."""
        for size in range(min(LONGEST_PATTERN, len(tail)), shortest - 1, -1):
            first, last = self.find(tail[-size:])
            if draft := self._extend(first, last, size, length):
                return draft
        return []

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """The range of the suffixes that begin with these tokens: one for each occurrence."""
        first, last = 0, len(self._order)
        for depth, token in enumerate(pattern):
            first, last = self._narrow(first, last, depth, token)
            if first == last:
                break
        return first, last

    def _extend(self, first: int, last: int, depth: int, length: int) -> list[int]:
        draft: list[int] = []
        share = 1.0
        while first < last and len(draft) < length:
            children = self._children(first, last, depth + len(draft))
            token, start, stop = max(children, key=lambda child: child[2] - child[1])
            share *= (stop - start) / (last - first)
            if token == END or share < SMALLEST_SHARE:
                break
            first, last = start, stop
            draft.append(token)
        return draft

    def _children(self, first: int, last: int, depth: int) -> Iterator[tuple[int, int, int]]:
        """Each next token of a range, with the part of the range that has it."""
        while first < last:
            token = self._text[self._order[first] + depth]
            _, stop = self._narrow(first, last, depth, token)
            yield token, first, stop
            first = stop

    def _narrow(self, first: int, last: int, depth: int, token: int) -> tuple[int, int]:
        text, order = self._text, self._order

        def at(start: int) -> int:
            return text[start + depth]

        # Sorted, so equal ends mean that all are equal: the usual case beyond the first tokens.
        if at(order[first]) == token == at(order[last - 1]):
            return first, last
        first = bisect_left(order, token, first, last, key=at)
        return first, bisect_right(order, token, first, last, key=at)


def sort_suffixes(text: np.ndarray, depth: int) -> np.ndarray:
    """The starts of all suffixes, in the order of their first `depth` tokens at least.

    By doubling: the order by 2n tokens is that by n tokens, then by the n tokens behind them.
    """
    _, rank = np.unique(text, return_inverse=True)
    length = 1
    while length < depth:
        behind = np.zeros_like(rank)
        behind[:-length] = rank[length:] + 1
        _, rank = np.unique(rank * (len(text) + 1) + behind, return_inverse=True)
        length *= 2
    return np.argsort(rank, kind="stable").astype(np.int64)
