"""Residencies: what lies in tiers, told once when it comes and once when it goes, for KV events."""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from quire.tiers.base import Tier

MOST_REMEMBERED = 1 << 20
"""Records of which is remembered that they were told; the oldest are forgotten first."""

Came = TypeVar("Came")
Mark = TypeVar("Mark")


class StoredRecord(NamedTuple, Generic[Came, Mark]):
    """A record that lies in tiers: its key, what is told of it, and what is told when it goes."""

    key: bytes
    came: Came
    mark: Mark


class Residencies(Generic[Came, Mark]):
    """Records that came into tiers and left them since the last `take`; any thread may call `stored`.

    Ends are those of `last`, the slowest tier. One that others write to (Redis, a bucket) tells none.

    `tells_ends`  whether ends are told
    """

    def __init__(self, last: Tier) -> None:
        self.tells_ends = last.is_local
        self._held: dict[bytes, Mark] = {}
        self._stored: SimpleQueue[list[StoredRecord[Came, Mark]]] = SimpleQueue()
        self._left: SimpleQueue[list[bytes]] = SimpleQueue()
        if self.tells_ends:
            last.evicting, last.evicting_of = _nobody_reads, self._leaving

    def stored(self, records: Iterable[StoredRecord[Came, Mark]]) -> None:
        """Note records that lie in the tiers; those that were told already are not told again."""
        self._stored.put([*records])

    def take(self) -> tuple[list[Came], list[Mark]]:
        """Return what came and what has gone since the last call. One thread calls this."""
        came: list[Came] = []
        while not self._stored.empty():
            for each in self._stored.get_nowait():
                if each.key not in self._held:
                    self._held[each.key] = each.mark
                    came.append(each.came)
        while len(self._held) > MOST_REMEMBERED:
            del self._held[next(iter(self._held))]
        gone: list[Mark] = []
        while not self._left.empty():
            keys = [key for key in self._left.get_nowait() if key in self._held]
            gone += [self._held.pop(key) for key in keys]
        return came, gone

    def _leaving(self, keys: list[bytes]) -> list[int]:
        """Note records that make room; none of them is to be read."""
        self._left.put(keys)
        return []


def _nobody_reads(keys: list[bytes], records: list[memoryview]) -> None:
    """Take no record: `Residencies` wants keys alone."""
