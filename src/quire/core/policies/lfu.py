"""Least frequently used."""

from __future__ import annotations

from quire.core.policies.base import Entry, RankedPolicy


class Lfu(RankedPolicy):
    """Evicts what was used least often; among equals, what was used longest ago.

    A use counts for the whole path, so a parent was never used less often than its child.
    Counts do not age: a finished conversation of many turns stays until it is alone.
    Source: Aho, Denning, Ullman, Principles of optimal page replacement, JACM 18(1), 1971,
    doi:10.1145/321623.321632.
    """

    def added(self, entry: Entry) -> None:
        entry.uses = max(entry.uses, 1)
        entry.rank = (entry.uses, self.tick())

    def extendable(self, entry: Entry) -> bool:
        return entry.uses <= 1

    def touched(self, entry: Entry) -> None:
        entry.uses += 1
        entry.rank = (entry.uses, self.tick())
