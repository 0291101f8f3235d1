"""Media: images, audio and video as a part of prompts, and which of them are in use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from quire.core.tokens import INT32, IntArray, Key, check_sign
from quire.errors import MediaError

MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
"""So short that two contents do not meet by chance; so long as the longest digest in use, SHA-512's."""

UNKNOWN_MEDIA = -(2**31)
"""Stands for content that was never stored; no stored key holds it."""

MAX_MEDIA = 4096
"""Beyond so many media contents, those that nothing uses any more are forgotten, the oldest first."""


NO_MEDIA: Sequence[MediaItem] = ()
"""The media of a prompt without any."""


class MediaItem(msgspec.Struct, frozen=True):
    """An image, audio or video span of a prompt: the digest of its content and where it stands.

    `digest` is any content digest (16 to 64 bytes; SHA-256 of the processed pixels is a good
    one), `start` the index of its first token in the prompt, `length` its number of tokens.
    Raises `MediaError` for parts of other types, and for a digest of another length.
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        numbers = type(self.start) is int and type(self.length) is int
        if type(self.digest) is not bytes or not numbers:
            msg = (
                "a media item is a content digest in bytes, an integer start and an integer "
                f"length, got digest {self.digest!r}, start {self.start!r}, length {self.length!r}"
            )
            raise MediaError(msg)
        if not MIN_DIGEST_BYTES <= len(self.digest) <= MAX_DIGEST_BYTES:
            msg = (
                f"a content digest has {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes, this one has "
                f"{len(self.digest)}: a shorter one may name two contents; use hashlib.sha256(...).digest()"
            )
            raise MediaError(msg)


class MediaTable:
    """Numbers for media contents, so that the tree can compare media as it compares tokens.

    Every distinct pair of (digest, placeholder tokens) gets a negative number, which stands
    in the key at each position of the span. Token ids are never negative, and the numbers are
    given out in order of first use, so two contents never meet, whatever their placeholders.
    """

    def __init__(self) -> None:
        self._number: dict[tuple[bytes, bytes], int] = {}
        self._content: dict[int, tuple[bytes, bytes]] = {}
        self._next = -1

    def __len__(self) -> int:
        return len(self._number)

    def encode(self, key: Key, media: Sequence[MediaItem]) -> Key:
        """Return a copy of a prompt's key with each media span replaced by its number."""
        check_sign(key)
        tokens: IntArray = np.frombuffer(key, INT32).copy()
        for item in media:
            span = tokens[item.start : item.start + item.length]
            span[:] = self._numbered(item.digest, span.tobytes())
        return tokens.data.cast("B")

    def peek(self, key: Key, media: Sequence[MediaItem]) -> Key:
        """Return what `encode` would, without giving out numbers (unknown content gets 2**31's)."""
        check_sign(key)
        tokens: IntArray = np.frombuffer(key, INT32).copy()
        for item in media:
            span = tokens[item.start : item.start + item.length]
            span[:] = self._number.get((item.digest, span.tobytes()), UNKNOWN_MEDIA)
        return tokens.data.cast("B")

    def content(self, number: int) -> tuple[bytes, bytes]:
        """Return (digest, placeholder token bytes) of a number that stands in a key."""
        return self._content[number]

    def keep(self, live: set[int]) -> None:
        """Forget every content whose number stands in no key any more."""
        self._content = {n: c for n, c in self._content.items() if n in live}
        self._number = {c: n for n, c in self._content.items()}

    def _numbered(self, digest: bytes, placeholders: bytes) -> int:
        content = (digest, placeholders)
        number = self._number.get(content)
        if number is None:
            number = self._next
            self._next -= 1
            self._number[content] = number
            self._content[number] = content
        return number


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


def check_media(media: Sequence[MediaItem], num_tokens: int) -> None:
    """Raise `MediaError` unless the items lie inside the prompt, in order, without overlap."""
    if not isinstance(media, tuple | list):
        raise MediaError(f"media must be a list or tuple of quire.MediaItem, got {media!r}")
    end = 0
    for item in media:
        if not isinstance(item, MediaItem):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MediaError(f"media items must be quire.MediaItem, got {item!r}")
        if item.length < 1 or item.start < end or item.start + item.length > num_tokens:
            msg = (
                f"media item [{item.start}, {item.start + item.length}) must not be empty, must "
                f"start at or after {end} and end by the prompt's {num_tokens} tokens"
            )
            raise MediaError(msg)
        end = item.start + item.length
