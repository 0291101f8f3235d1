"""First in, first out."""

from __future__ import annotations

from quire.core.policies.base import Entry, RankedPolicy


class Fifo(RankedPolicy):
    """Evicts what was stored longest ago, however often it was used since.

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
        super().released(entry)

    def referenced(self, entry: Entry) -> None:
        super().referenced(entry)
        entry.uses = entry.end
