"""Prompts as keys: token ids, checked, with media as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.core.media import MediaTable
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds, array_of, check_sign, key_of
from quire.errors import TokensError
from quire.media import MediaItem, check_media
from quire.scope import NO_SCOPE, Scope, check_scope

MAX_SLOT_MEDIA = 1024
"""Beyond so many media contents, those that no slot holds any more are forgotten."""


class SlotMedia(MediaTable):
    """Numbers of media contents; those that nothing holds are forgotten when there are many."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = MAX_SLOT_MEDIA

    def read(
        self, tokens: TokenIds, scope: Scope | None, media: Sequence[MediaItem]
    ) -> tuple[Key, Scope]:
        """Return the key and scope to look up. Pure.

        Raises `TokensError` for an empty prompt and wrong tokens, `ScopeError`, `MediaError`.
        """
        key = key_of(tokens)
        if not key:
            raise TokensError("the prompt is empty; it needs at least one token")
        if scope is not None:
            check_scope(scope)
        check_sign(key)
        if media:
            check_media(media, len(key) // TOKEN_BYTES)
            key = self.peek(key, media)
        return key, scope or NO_SCOPE

    def forget(self, keys: Iterable[bytes | bytearray]) -> None:
        """Where there are many, forget those that stand in none of these keys."""
        if len(self) >= self._limit:
            held = {number for key in keys for number in set(array_of(key).tolist())}
            self.contents = {n: each for n, each in self.contents.items() if n in held}
            self.numbers = {each: n for n, each in self.contents.items()}
            self.idle = dict.fromkeys(self.contents)
            self._limit = max(MAX_SLOT_MEDIA, 2 * len(self))
