"""Media in keys: numbers for images, audio and video, and which of them are in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quire.core.tokens import INT32, IntArray, Key, check_sign
from quire.media import MediaItem

UNKNOWN_MEDIA = -(2**31)
"""Stands for content that was never stored; no stored key holds it."""

MAX_MEDIA = 4096
"""Beyond so many media contents, those that nothing uses any more are forgotten, the oldest first."""


class MediaTable:
    """Numbers for media contents, so that the tree can compare media as it compares tokens.

    Every distinct pair of (digest, placeholder tokens) gets a negative number, which stands
    in the key at each position of the span. Token ids are never negative, and the numbers are
    given out in order of first use, so two contents never meet, whatever their placeholders.

    A content is used once for every token of the tree that its number stands for, and once for
    every open request or restore in whose prompt it is; what is in use is never forgotten:

        contents[number] == (digest, placeholder token bytes), and numbers the other way round
        uses[number] == tokens in the tree + holders, in no entry 0
        idle == the numbers without uses, the one used longest ago first
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[bytes, bytes], int] = {}
        self.contents: dict[int, tuple[bytes, bytes]] = {}
        self.uses: dict[int, int] = {}
        self.idle: dict[int, None] = {}
        self._next = -1

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, key: Key, media: Sequence[MediaItem]) -> Key:
        """Return a copy of a prompt's key with each media span replaced by its number."""
        return _replace(key, media, self._numbered)

    def peek(self, key: Key, media: Sequence[MediaItem]) -> Key:
        """Return the result of `encode` without giving out numbers (unknown content gets 2**31's)."""
        return _replace(key, media, lambda content: self.numbers.get(content, UNKNOWN_MEDIA))

    def counts(self, key: Key | bytearray) -> dict[int, int]:
        """Return how many tokens of a key stand for which media number."""
        tokens = np.frombuffer(key, INT32)
        numbers, counts = np.unique(tokens[tokens < 0], return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def use(self, counts: Mapping[int, int]) -> None:
        """Add uses of these numbers."""
        for number, count in counts.items():
            self.uses[number] = self.uses.get(number, 0) + count
            self.idle.pop(number, None)
        self._forget()

    def release(self, counts: Mapping[int, int]) -> None:
        """Subtract uses of these numbers."""
        for number, count in counts.items():
            self.uses[number] -= count
            if not self.uses[number]:
                del self.uses[number]
                self.idle[number] = None
        self._forget()

    def _numbered(self, content: tuple[bytes, bytes]) -> int:
        number = self.numbers.get(content)
        if number is None:
            number = self.numbers[content] = self._next
            self._next -= 1
            self.contents[number] = content
            self.idle[number] = None
        return number

    def _forget(self) -> None:
        while len(self.contents) > MAX_MEDIA and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            del self.numbers[self.contents.pop(oldest)]


def _replace(
    key: Key, media: Sequence[MediaItem], number_of: Callable[[tuple[bytes, bytes]], int]
) -> Key:
    check_sign(key)
    tokens: IntArray = np.frombuffer(key, INT32).copy()
    for item in media:
        span = tokens[item.start : item.start + item.length]
        span[:] = number_of((item.digest, span.tobytes()))
    return tokens.data.cast("B")
