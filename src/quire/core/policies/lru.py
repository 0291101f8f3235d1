"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.policies.base import WHOLE, Capacity, Entry, Policy, Tick


class Lru(Policy):
    """Evicts what was used longest ago.

    All cached entries stand in one linked list, oldest first, and a release appends from the
    deepest entry upwards. So a parent is never older than its child and the head of the list
    is always evictable: every step is O(1), with no heap and no search. On prefix chains
    this is exact block-wise LRU, and a stack algorithm. `uses` holds the tick of the release.
    Source: Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems
    Journal 9(2), 1970, doi:10.1147/sj.92.0078.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._ends = Entry()
        self._ends.older = self._ends.newer = self._ends
        self._returned = self._ends  # where the last entry came back: the next is near

    def released(self, entry: Entry) -> None:
        ends = self._ends
        newest = ends.older
        assert newest is not None
        entry.older = newest
        entry.newer = ends
        newest.newer = entry
        ends.older = entry
        entry.uses = self.tick()

    def returned(self, entry: Entry) -> None:
        hint = self._returned
        newer = (hint if hint.uses <= entry.uses else self._ends).newer
        assert newer is not None
        while newer is not self._ends and newer.uses <= entry.uses:
            newer = newer.newer
            assert newer is not None
        older = newer.older
        assert older is not None
        entry.older, entry.newer = older, newer
        older.newer = newer.older = entry
        self._returned = entry

    def referenced(self, entry: Entry) -> None:
        older, newer = entry.older, entry.newer
        assert older is not None
        assert newer is not None
        older.newer = newer
        newer.older = older
        entry.older = entry.newer = None
        if entry is self._returned:
            self._returned = self._ends

    def split(self, upper: Entry, lower: Entry) -> None:
        newer = lower.newer
        assert newer is not None
        upper.older = lower
        upper.newer = newer
        lower.newer = upper
        newer.older = upper

    def victim(self) -> tuple[Entry, int] | None:
        oldest = self._ends.newer
        return None if oldest is self._ends or oldest is None else (oldest, WHOLE)

    def order(self) -> Iterator[Entry]:
        entry = self._ends.newer
        while entry is not None and entry is not self._ends:
            yield entry
            entry = entry.newer
