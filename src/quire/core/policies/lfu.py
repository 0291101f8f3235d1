"""Least frequently used, with ageing."""

from __future__ import annotations

from quire.core.policies.base import Capacity, Entry, RankedPolicy, Tick, rank_of


class Lfu(RankedPolicy):
    """Evicts the leaf of the lowest value; among equals, what was used longest ago.

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
            self.age = max(self.age, rank_of(found[0])[0])
        return found
