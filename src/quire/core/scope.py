"""Scopes and media: who may share a prefix, and what is part of it beside token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from quire.core.tokens import INT32, IntArray, Key, check_sign
from quire.errors import MediaError, ScopeError

ScopePart: TypeAlias = "str | bytes | int | None"

MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
"""So short that two contents do not meet by chance; so long as the longest digest in use, SHA-512's."""


class Scope(msgspec.Struct, frozen=True, order=False):
    """The structured key under which prefixes are shared: equal parts share, others never do.

    `salt` names a tenant or a session, `lora` an adapter, `model` the fingerprint of weights
    and layout. Parts are compared one by one, never joined: LoRA "a" with salt "b" is not
    LoRA "ab". Raises `ScopeError` for a part that is not str, bytes, int or None.
    """

    salt: ScopePart = None
    lora: ScopePart = None
    model: ScopePart = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            part: object = getattr(self, name)
            if part is not None and type(part) not in (str, bytes, int):
                raise ScopeError(f"scope {name} must be str, bytes, int or None, got {part!r}")
            if isinstance(part, int) and not -(2**63) <= part < 2**63:
                raise ScopeError(
                    f"scope {name} must fit 64 bits, this one has {part.bit_length()} bits; use a str"
                )
            if isinstance(part, str) and not part.isascii():
                try:
                    part.encode()
                except UnicodeEncodeError:
                    msg = f"scope {name} {part!r} cannot be written as UTF-8; use bytes for it"
                    raise ScopeError(msg) from None

    def __repr__(self) -> str:
        parts = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"Scope({', '.join(f'{name}={part!r}' for name, part in parts if part is not None)})"


NO_SCOPE = Scope()
"""The scope of requests that name none."""


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


UNKNOWN_MEDIA = -(2**31)
"""Stands for content that was never stored; no stored key holds it."""


def check_scope(scope: object) -> None:
    """Raise `ScopeError` unless this is a `Scope`."""
    if not isinstance(scope, Scope):
        msg = (
            f"scope must be a quire.Scope, got {type(scope).__name__} {scope!r}; "
            "write Scope(salt=...) for a tenant, Scope(lora=...) for an adapter"
        )
        raise ScopeError(msg)


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
