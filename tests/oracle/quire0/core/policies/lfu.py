"""Least frequently used, with ageing."""

from __future__ import annotations

from quire0.core.policies.base import Capacity, Entry, RankedPolicy, Tick


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

    remembers = True

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self.age = 0.0

    def added(self, entry: Entry) -> None:
        entry.uses = max(entry.uses, 1)
        entry.rank = (self.age + self.value(entry), self.tick())

    def touched(self, entry: Entry) -> None:
        entry.uses += 1
        entry.rank = (self.age + self.value(entry), self.tick())

    def extendable(self, entry: Entry) -> bool:
        return entry.uses <= 1

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        return upper.uses <= 2 * lower.uses  # so that a path of n uses has log n entries at most

    def evicting(self, entry: Entry, num_blocks: int) -> None:  # noqa: ARG002 - its value is per block
        self.age = max(self.age, entry.rank[0])

    def value(self, entry: Entry) -> float:
        """What a block of this entry is worth, before ageing."""
        return entry.uses
