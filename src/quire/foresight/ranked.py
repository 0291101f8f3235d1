"""Policies that keep their candidates in a heap: base class, FIFO and LFU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from quire.core.policy import ENDLESS, Capacity, Entry, Policy, Tick
from quire.heaps import LazyHeap

Rank: TypeAlias = tuple[float, int]
"""A value, and the tick at which an entry got it: no two are equal."""


class RankedPolicy(Policy):
    """A policy that evicts the evictable entry of the lowest rank, kept in a heap.

    `note` holds an entry's rank; subclasses set it. An item of the heap counts only if its entry is evictable and has that
    very rank, which each push makes anew. An entry that becomes a candidate costs one push.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._heap = LazyHeap(_counts)

    def released(self, entry: Entry) -> None:
        if entry.evictable:
            self._push(entry)

    def returned(self, entry: Entry) -> None:
        RankedPolicy.released(self, entry)

    def exposed(self, entry: Entry) -> None:
        self._push(entry)

    def victim(self) -> tuple[Entry, int] | None:
        first = self._heap.first()
        return (first[2], ENDLESS) if first is not None else None

    def order(self) -> Iterator[Entry]:
        return (item[2] for item in sorted(self._heap.items) if _counts(item))

    def _push(self, entry: Entry) -> None:
        value, tick = entry.note
        entry.note = rank = (value, tick)  # another object: what stands in a heap counts no more
        self._heap.push((rank, self.tick(), entry))


class Fifo(RankedPolicy):
    """Evicts the block stored longest ago, however often it was used since.

    An entry counts from when the request that stored its tail let go of it, since the tail
    is what goes first. Heads are stored before their tails, so a finished chain goes as a
    whole, tail first. `uses` holds where the entry ended when it was last referenced.
    Source: Belady, Nelson, Shedler, An anomaly in space-time characteristics of certain
    programs running in a paging machine, CACM 12(6), 1969, doi:10.1145/363011.363155.
    """

    def released(self, entry: Entry) -> None:
        if entry.note is None or entry.end > entry.uses:
            tick = self.tick()
            entry.note = (tick, tick)
        entry.uses = entry.end  # as when it is referenced next: who only waits leaves it as it was
        super().released(entry)

    def referenced(self, entry: Entry) -> None:
        entry.uses = entry.end


class Lfu(RankedPolicy):
    """Evicts the leaf of the lowest value; among equals, the least recently used one.

    The value of an entry is how often it was used, plus the age of the cache at its last use.
    The age is the value of the last victim: it rises as long as blocks are evicted, so what is used no
    more is caught up with, however often it was used before. An entry that comes back starts anew.
    Source: Arlitt, Cherkasova, Dilley, Friedrich, Jin, Evaluating content management techniques
    for web proxy caches (LFU with dynamic ageing), SIGMETRICS Perform. Eval. Rev. 27(4), 2000,
    doi:10.1145/346000.346003.
    Left out: periodic halving of all counts, which needs a period and touches every entry.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self.age = 0.0

    def touched(self, entry: Entry) -> None:
        entry.uses += 1
        entry.note = (self.age + entry.uses, self.tick())

    def released(self, entry: Entry) -> None:
        if entry.note is None:
            self.touched(entry)
        super().released(entry)

    def victim(self) -> tuple[Entry, int] | None:
        found = super().victim()
        if found is not None:
            self.age = max(self.age, found[0].note[0])
        return found


def _counts(item: tuple[Rank, int, Entry]) -> bool:
    rank, _, entry = item
    return entry.note is rank and entry.evictable
