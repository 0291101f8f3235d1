"""Media: images, audio and video as a part of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.errors import MediaError

MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
"""So short that two contents do not meet by chance; so long as the longest digest in use, SHA-512's."""


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


NO_MEDIA: Sequence[MediaItem] = ()
"""The media of a prompt without any."""


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
