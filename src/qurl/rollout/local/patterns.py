"""An index of earlier responses, which drafts what may come next.

    pattern  the last 7 tokens of the sequence, or fewer: the longest end that goes on in the index
    draft    from there the most frequent next token, again and again, while the product of their
             shares is at least 0.1

The constants are those of the code that HistoSpec's authors released.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from qurl.types import TokenIds

END = -1
"""Stands behind each text of an index; no token has this id."""
LONGEST_PATTERN = 7
SMALLEST_SHARE = 0.1
MOST_PLACES = 64
"""Places of one run that are kept."""
NUM_LEADING = 5
"""Prompt tokens before each response, so that its beginning is found too."""


class PatternIndex:
    """A prompt and earlier responses to it, searchable by runs of tokens.

    A table has the places behind every run of the shortest length. Longer runs are found by looking
    at the tokens before these places. The host does this for every sequence in every decode step,
    so a run that repeats over and over keeps only its first places.
    """

    def __init__(
        self, prompt: Sequence[int], responses: Sequence[TokenIds], shortest_pattern: int
    ) -> None:
        texts = [[END] * LONGEST_PATTERN, list(prompt), [END]]  # so that one can look back
        for response in responses:
            texts += [prompt[-NUM_LEADING:], np.asarray(response), [END]]
        text = np.concatenate([np.asarray(part, np.int32) for part in texts])
        self._shortest, self._text = shortest_pattern, text.tolist()
        self._places: dict[bytes, list[int]] = {}
        runs, size = text.tobytes(), shortest_pattern * text.itemsize
        for place in range(shortest_pattern, len(text)):
            start = (place - shortest_pattern) * text.itemsize
            places = self._places.setdefault(runs[start : start + size], [])
            if len(places) < MOST_PLACES:
                places.append(place)

    def draft(self, tail: Sequence[int], length: int) -> list[int]:
        """Up to `length` tokens that may follow `tail`, by its longest end that goes on here."""
        places = self.find(tail[-self._shortest :])
        if not places:
            return []
        found = [places]
        for size in range(self._shortest + 1, min(LONGEST_PATTERN, len(tail)) + 1):
            places = [place for place in places if self._text[place - size] == tail[-size]]
            if not places:
                break
            found.append(places)
        for places in reversed(found):
            if draft := self._follow(places, length):
                return draft
        return []

    def find(self, pattern: Sequence[int]) -> list[int]:
        """The places behind a run of the shortest length."""
        return self._places.get(array("i", pattern).tobytes(), [])

    def _follow(self, places: list[int], length: int) -> list[int]:
        text, draft, share = self._text, [], 1.0
        while places and len(draft) < length:
            following = [text[place] for place in places]
            token, count = following[0], len(places)
            if following.count(token) < count:
                counts = Counter(following)
                token = min(counts, key=lambda t: (-counts[t], t))
                share *= counts[token] / count
            if token == END or share < SMALLEST_SHARE:
                break
            draft.append(token)
            places = [p + 1 for p, other in zip(places, following, strict=True) if other == token]
        return draft
