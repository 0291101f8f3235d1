"""2Q."""

from __future__ import annotations

from quire0.core.policies.base import Capacity, Entry, Tick
from quire0.core.policies.queues import Ghosts, QueuedPolicy, lost, seam

NEW, MAIN = range(2)

NEW_SHARE = 0.25
GHOST_SHARE = 0.5


class TwoQ(QueuedPolicy):
    """Keeps for long only what is asked for again after it had to go.

    New entries stand in a first queue, first in, first out, whatever happens to them there. It
    gives the victim while it is above a quarter of the capacity; the names of its blocks are
    remembered, up to half of the capacity. A remembered block that is stored again enters the main
    queue, least recently used first.
    Source: Johnson, Shasha, 2Q: a low overhead high performance buffer management replacement
    algorithm, VLDB 1994, pages 439-450 (Kin = 25 %, Kout = 50 %).
    Left out: nothing. Memory: one name for every two blocks of the capacity.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._gone = Ghosts()

    def seam(self, entry: Entry) -> int:
        return seam(entry.names(), self._gone)

    def added(self, entry: Entry) -> None:
        entry.queue = MAIN if self._gone.take(entry.names()) else NEW
        entry.rank = (self.tick(),)

    def touched(self, entry: Entry) -> None:
        pass

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        both_used_now = upper.queue == lower.queue == MAIN
        return both_used_now or super().joinable(upper, lower)

    def released(self, entry: Entry) -> None:
        if entry.queue == MAIN:
            entry.rank = (self.tick(),)
        super().released(entry)

    def victim(self) -> Entry | None:
        new, main = self.first(NEW), self.first(MAIN)
        full = self.sizes[NEW] > NEW_SHARE * self.capacity()
        return (new or main) if full else (main or new)

    def evicting(self, entry: Entry, num_blocks: int) -> None:
        super().evicting(entry, num_blocks)
        if entry.queue == NEW:
            self._gone.add(lost(entry, num_blocks))
            self._gone.trim(GHOST_SHARE * self.capacity())
