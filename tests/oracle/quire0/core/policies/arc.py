"""Adaptive replacement."""

from __future__ import annotations

from quire0.core.policies.base import Capacity, Entry, Tick
from quire0.core.policies.queues import Ghosts, QueuedPolicy, lost, seam

RECENT, FREQUENT = range(2)


class Arc(QueuedPolicy):
    """Balances what was used once against what was used again, by its own mistakes.

    Entries used once and entries used again stand in two queues, least recently used first; the
    names of blocks evicted from either are remembered. A remembered block that is stored
    again counts as used again, and moves the target size of the first queue: up if it had gone
    from there, down otherwise. The first queue gives the victim while it is above its target.
    Source: Megiddo, Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003;
    Computer 37(4), 2004, doi:10.1109/MC.2004.1297303.
    Left out: the tie |T1| = p of a request in B2, as the victim is chosen for many blocks at once.
    Memory: at most two names for each block of the capacity.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._gone = (Ghosts(), Ghosts())
        self._target = 0.0

    def seam(self, entry: Entry) -> int:
        return seam(entry.names(), *self._gone)

    def added(self, entry: Entry) -> None:
        names = entry.names()
        recent, frequent = self._gone
        sizes = len(recent), len(frequent)
        came_back = recent.take(names)
        self._target += came_back * max(1.0, sizes[1] / max(sizes[0], 1))
        self._target = min(self._target, self.capacity())
        if came_back_again := frequent.take(names):
            self._target -= came_back_again * max(1.0, sizes[0] / max(sizes[1], 1))
            self._target = max(self._target, 0.0)
        known = entry.uses or came_back or came_back_again
        entry.queue = FREQUENT if known else RECENT

    def touched(self, entry: Entry) -> None:
        entry.uses = 1
        entry.queue = FREQUENT

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        return upper.queue == lower.queue  # its place is that of its release, which is the same

    def released(self, entry: Entry) -> None:
        entry.rank = (self.tick(),)
        super().released(entry)

    def victim(self) -> Entry | None:
        once, again = self.first(RECENT), self.first(FREQUENT)
        return (once or again) if self.sizes[RECENT] > self._target else (again or once)

    def evicting(self, entry: Entry, num_blocks: int) -> None:
        super().evicting(entry, num_blocks)
        recent, frequent = self._gone
        self._gone[entry.queue].add(lost(entry, num_blocks))
        limit = self.capacity()
        recent.trim(limit - self.sizes[RECENT])
        frequent.trim(2 * limit - sum(self.sizes) - len(recent))
