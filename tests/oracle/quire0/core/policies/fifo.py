"""First in, first out."""

from __future__ import annotations

from quire0.core.policies.base import Entry, RankedPolicy


class Fifo(RankedPolicy):
    """Evicts what was stored longest ago, however often it was used since.

    An entry counts from when the request that stored its tail let go of it, since the tail
    is what goes first. Heads are stored before their tails, so a finished chain goes as a
    whole, tail first.
    Source: Belady, Nelson, Shedler, An anomaly in space-time characteristics of certain
    programs running in a paging machine, CACM 12(6), 1969, doi:10.1145/363011.363155.
    """

    def added(self, entry: Entry) -> None:
        entry.rank = (self.tick(),)

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        return upper.rank == lower.rank

    def touched(self, entry: Entry) -> None:
        pass
