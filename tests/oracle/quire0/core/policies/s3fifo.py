"""S3-FIFO."""

from __future__ import annotations

from quire0.core.policies.base import Capacity, Entry, Tick
from quire0.core.policies.queues import Ghosts, QueuedPolicy, leaf, lost, seam

SMALL, MAIN = range(2)

SMALL_SHARE = 0.1
MAX_USES = 3
PROMOTED_USES = 2


class S3Fifo(QueuedPolicy):
    """Three first-in-first-out queues: a small one to prove oneself in, a main one, and ghosts.

    A use only counts, up to three. While the small queue is above a tenth of the capacity its oldest entry
    goes, to the main queue if it was used twice or more, out otherwise; its blocks'
    names are remembered. A remembered block that is stored again enters the main queue, whose oldest
    entry goes back to its end as often as it was used, and out when it was not.
    Source: Yang, Zhang, Qiu, Yue, Rashmi, FIFO queues are all you need for cache eviction, SOSP
    2023, doi:10.1145/3600006.3613147.
    The queues hold entries with others below them too: one that has to go gives up a leaf below
    it, and starts anew when that was the last one. A scan of leaves only would peel a dead chain and find
    every exposed parent used.
    Left out: nothing. Memory: nine names for ten blocks of the capacity.
    """

    interior = (SMALL, MAIN)

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._gone = Ghosts()

    def seam(self, entry: Entry) -> int:
        return seam(entry.names(), self._gone)

    def added(self, entry: Entry) -> None:
        entry.queue = MAIN if self._gone.take(entry.names()) else SMALL
        entry.rank = (self.tick(),)

    def touched(self, entry: Entry) -> None:
        entry.uses = min(entry.uses + 1, MAX_USES)

    def exposed(self, entry: Entry) -> None:
        entry.uses = 0  # they were uses of what hung below, which had to go all the same

    def victim(self) -> Entry | None:
        while True:
            small = self.sizes[SMALL] >= SMALL_SHARE * self.capacity() or not self.sizes[MAIN]
            entry = self.first(SMALL if small else MAIN)
            if entry is None:
                return None
            if small and entry.uses >= PROMOTED_USES:
                entry.uses = 0
            elif not small and entry.uses:
                entry.uses -= 1
            else:
                return leaf(entry)
            entry.rank = (self.tick(),)
            self.move(entry, MAIN)

    def evicting(self, entry: Entry, num_blocks: int) -> None:
        super().evicting(entry, num_blocks)
        if entry.queue == SMALL:
            self._gone.add(lost(entry, num_blocks))
            self._gone.trim((1 - SMALL_SHARE) * self.capacity())
