"""Batches: the reserved places that one call writes at once, and the runs of neighbours among them."""

from __future__ import annotations

from itertools import pairwise

from quire.tiers.disk.records import Written
from quire.tiers.disk.slab import Slab

RUN_BYTES = 1 << 20
"""Neighbouring places are written by one call of the system, about so many bytes at once."""

_RUN_RECORDS = 256


class WriteBatch:
    """Places that a call has reserved for its records, by their index in the call."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.indices: list[int] = []
        self.places: list[Written] = []
        self.num_bytes = 0

    def add(self, index: int, written: Written) -> None:
        """Take a place for the record with this index."""
        self.keys.add(written.key)
        self.indices.append(index)
        self.places.append(written)
        self.num_bytes += written.slab.record_bytes

    def runs(self) -> list[range]:
        """Return the runs of neighbours in a slab, up to `RUN_BYTES` each, as ranges in `places`."""
        starts = [0] if self.places else []
        for at, (last, each) in enumerate(pairwise(self.places), 1):
            count = at - starts[-1]
            is_next = each.slab is last.slab and each.place == last.place + 1
            if not is_next or count >= _RUN_RECORDS or count * each.slab.record_bytes >= RUN_BYTES:
                starts.append(at)
        return [range(*pair) for pair in pairwise([*starts, len(self.places)])]


class Spare:
    """Places of one size that a call has reserved and given to no record yet; the last goes first."""

    slab: Slab

    def __init__(self) -> None:
        self.places: list[int] = []

    def has(self, record_bytes: int) -> bool:
        """Return whether there is one for a record of this size."""
        return bool(self.places) and self.slab.record_bytes == record_bytes
