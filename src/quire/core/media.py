"""Media: images, audio and video as a part of prompts, and which of them are in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
        """Return what `encode` would, without giving out numbers (unknown content gets 2**31's)."""
        return _replace(key, media, lambda content: self.numbers.get(content, UNKNOWN_MEDIA))

    def counts(self, key: Key | bytearray) -> dict[int, int]:
        """Return how many tokens of a key stand for which media number."""
        tokens = np.frombuffer(key, INT32)
        numbers, counts = np.unique(tokens[tokens < 0], return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def use(self, counts: Mapping[int, int]) -> None:
        """Count so many more uses of these numbers."""
        for number, count in counts.items():
            self.uses[number] = self.uses.get(number, 0) + count
            self.idle.pop(number, None)
        self._forget()

    def release(self, counts: Mapping[int, int]) -> None:
        """Count so many uses of these numbers less."""
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
