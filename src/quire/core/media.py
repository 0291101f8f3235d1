"""Media in use: contents that stand in keys of the tree, or in prompts of open requests and restores."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.core.scope import MediaTable
from quire.core.tokens import INT32, Key

MAX_MEDIA = 4096
"""Beyond so many media contents, those that nothing uses any more are forgotten, the oldest first."""


class UsedMedia(MediaTable):
    """Media contents with their uses, so that what is in use is never forgotten and nothing is searched.

    A content is used once for every token of the tree that its number stands for, and once for
    every open request or restore in whose prompt it is:

        uses[number] == tokens in the tree + holders, in no entry 0
        idle == the numbers without uses, the one used longest ago first
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}
        self.idle: dict[int, None] = {}

    def hold(self, key: Key) -> tuple[int, ...]:
        """Use what stands in an encoded prompt until `release`; return the numbers."""
        numbers = tuple(self.counts(key))
        self.hold_again(numbers)
        self._forget()
        return numbers

    def hold_again(self, numbers: Iterable[int]) -> None:
        """Use these numbers once more."""
        for number in numbers:
            self._change(number, 1)

    def release(self, numbers: Iterable[int]) -> None:
        """Use these numbers once less."""
        for number in numbers:
            self._change(number, -1)

    def stored(self, key: Key | bytearray) -> None:
        """Use what stands in a key that enters the tree."""
        for number, count in self.counts(key).items():
            self._change(number, count)

    def removed(self, key: bytearray) -> None:
        """A key, or a part of one, left the tree."""
        for number, count in self.counts(key).items():
            self._change(number, -count)

    def counts(self, key: Key | bytearray) -> dict[int, int]:
        """Return how many tokens of a key stand for which media number."""
        tokens = np.frombuffer(key, INT32)
        numbers, counts = np.unique(tokens[tokens < 0], return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def check(self, uses: dict[int, int]) -> str:
        """Return what is wrong with the uses, of which these were recounted, or nothing."""
        if self.uses != uses:
            return f"media are used {uses}, counted {self.uses}"
        if self.idle.keys() | uses.keys() != self._content.keys() or self.idle.keys() & uses.keys():
            return "media contents are not either used or idle"
        if {number: content for content, number in self._number.items()} != self._content:
            return "media numbers and contents differ"
        if self.idle and len(self._content) > MAX_MEDIA:
            return f"{len(self.idle)} idle contents among {len(self._content)} are remembered"
        return ""

    def _change(self, number: int, change: int) -> None:
        uses = self.uses.get(number, 0) + change
        if uses:
            self.uses[number] = uses
            self.idle.pop(number, None)
            return
        del self.uses[number]
        self.idle[number] = None
        self._forget()

    def _numbered(self, digest: bytes, placeholders: bytes) -> int:
        number = super()._numbered(digest, placeholders)
        if number not in self.uses:
            self.idle[number] = None
        return number

    def _forget(self) -> None:
        while len(self._content) > MAX_MEDIA and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            del self._number[self._content.pop(oldest)]
