"""An index of the prompts that servers were sent, where no events tell what they hold.

Prompts of a few kilobytes are a few dozen keys: dictionaries find them in microseconds, where the arrays of
`ClusterIndex` cost a hundred for any prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

from quire.config import check_count
from quire.errors import InvariantError
from quire_router.index import Held

PIECE = 64
"""Bytes of a prompt that are looked at as one block."""


class SentIndex:
    """The pieces of prompts by the servers that were sent them, `capacity` over all servers.

    A key stands for a piece and all before it. Each server's pieces are in the order of their last use, the end of a
    prompt before its beginning: a server that has a piece has all before it. Where there is no room, the server with
    most pieces loses its first ones. Raises `ConfigError`.

    After every call: the pieces of all servers together are `num_blocks` <= `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = check_count("capacity", capacity, limit=1 << 28)
        self.num_blocks = 0
        self._held: dict[str, dict[int, None]] = {}

    @property
    def replicas(self) -> dict[str, bool]:
        """The servers that were sent something, as `ClusterIndex` lists them: none missed an event."""
        return dict.fromkeys(self._held, False)

    def found(self, keys: Sequence[int]) -> Held:
        """Return the bytes of a prompt that servers were sent, by their names."""
        if not keys:
            return {}
        return {
            name: (PIECE * bisect_left(keys, True, key=lambda key: key not in held), 0, 0)
            for name, held in self._held.items()
            if keys[0] in held
        }

    def add(self, name: str, keys: Sequence[int]) -> None:
        """Note that a server was sent a prompt."""
        held = self._held.setdefault(name, {})
        before = len(held)
        for key in reversed(keys[: self.capacity]):
            held.pop(key, None)
            held[key] = None
        self.num_blocks += len(held) - before
        while self.num_blocks > self.capacity:
            most = max(self._held.values(), key=len)
            gone = [*islice(most, max(self.capacity // 16, 1))]
            for key in gone:
                del most[key]
            self.num_blocks -= len(gone)

    def forget(self, name: str) -> None:
        """Forget a server; an unknown one is ignored."""
        self.num_blocks -= len(self._held.pop(name, ()))

    def check(self) -> None:
        """Raise `InvariantError` unless the law of this class holds."""
        num = sum(map(len, self._held.values()))
        if not num == self.num_blocks <= self.capacity:
            raise InvariantError(
                f"{num} pieces are held, {self.num_blocks} counted, {self.capacity} have room"
            )


def keys_of_pieces(scope: Hashable, pieces: Iterable[bytes | str]) -> list[int]:
    """Return the key of each piece of a prompt; prompts of different scopes share none.

    A key is the hash of the one before it and of its piece, by a secret of this process.
    """
    key, keys = hash(scope), list[int]()
    for piece in pieces:
        key = hash((key, piece))
        keys.append(key)
    return keys
