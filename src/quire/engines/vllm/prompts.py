"""Prompts: the names of a request's blocks, as its tokens become known."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core import MediaItem, Scope
from quire.core.media import MediaTable
from quire.core.tokens import key_of
from quire.exchange.hashing import chain, root_digest
from quire.media import check_media


class PromptNames:
    """FileDigests of the whole blocks of one request, each over all before it; see `quire.exchange.hashing`."""

    def __init__(
        self, tokens: Sequence[int], block_size: int, scope: Scope, media: Sequence[MediaItem] = ()
    ) -> None:
        self._bytes = block_size * 4
        self._media = MediaTable()
        key = key_of(tokens)
        if media:
            check_media(media, len(tokens))
            key = self._media.encode(key, media)
        self._key = bytearray(key)
        self._root = root_digest(scope)
        self.digests: list[bytes] = []
        self._name()

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self._key) // 4

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens behind those that are known."""
        self._key += key_of(tokens)
        self._name()

    def _name(self) -> None:
        done = len(self.digests)
        if len(self._key) // self._bytes > done:
            parent = self.digests[-1] if done else self._root
            self.digests += chain(parent, self._key[done * self._bytes :], self._bytes, self._media)
