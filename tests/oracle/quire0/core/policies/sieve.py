"""SIEVE."""

from __future__ import annotations

from quire0.core.policies.base import Capacity, Entry, Tick
from quire0.core.policies.queues import QueuedPolicy, leaf


class Sieve(QueuedPolicy):
    """One queue, first in, first out, and a hand that passes over what was used.

    A use marks an entry and moves nothing. The hand goes from the oldest entry to the newest: where
    an entry is marked it takes the mark off and goes on, the first one without goes. Then it waits
    there; after the newest entry it begins again at the oldest.
    Source: Zhang, Yang, Yue, Vigfusson, Rashmi, SIEVE is simpler than LRU: an efficient
    turn-key eviction algorithm for web caches, NSDI 2024, pages 1229-1246.
    The queue holds entries with others below them too: one that has to go gives up a leaf below
    it. A hand that stops at leaves only would find every exposed parent of a dead chain marked.
    Left out: nothing. The two queues here are what lies before the hand and what behind it.
    """

    interior = (0, 1)

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._ahead = 0

    def added(self, entry: Entry) -> None:
        entry.queue = self._ahead
        entry.rank = (self.tick(),)

    def touched(self, entry: Entry) -> None:
        entry.uses = 1

    def victim(self) -> Entry | None:
        while self._num_cached:
            entry = self.first(self._ahead)
            if entry is None:
                self._ahead = 1 - self._ahead
            elif entry.uses:
                entry.uses = 0
                self.move(entry, 1 - self._ahead)
            else:
                return leaf(entry)
        return None
