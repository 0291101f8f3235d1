"""A shadow of LRU: the hits that LRU would have had, from sizes alone."""

from __future__ import annotations

from quire.foresight.reentry import Record

MIN_SLOTS = 1024

GROUP = 128
"""Records whose blocks are summed up together."""


class LruShadow:
    """The stack of LRU as records in order of their end, each with the blocks it used last.

    The blocks of a record lie in one piece of the stack, the ones nearer to the root above the
    others, and below all blocks of newer records. LRU holds what lies within the capacity.
    Records that lie beyond it altogether are dropped. Sums of groups make a count one of some hundred numbers at most.

    sum of a group's records == the group's sum; a record's slot is -1 when it is not there
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._blocks: list[int] = []
        self._sums: list[int] = []
        self._limit = MIN_SLOTS

    def push(self, record: Record, num_blocks: int, capacity: int) -> None:
        """Put a record on top, with its number of blocks."""
        if len(self._records) == self._limit:
            self._compact(capacity)
        self._add(record, num_blocks)

    def take(self, record: Record, num_blocks: int) -> None:
        """A newer request used so many blocks of a record."""
        slot = record.slot
        if slot >= 0:
            taken = min(num_blocks, self._blocks[slot])
            self._blocks[slot] -= taken
            self._sums[slot // GROUP] -= taken

    def above(self, record: Record, capacity: int) -> int:
        """Return the blocks of newer records; the capacity for a record that was dropped."""
        slot = record.slot
        if slot < 0:
            return capacity
        group = slot // GROUP + 1
        return sum(self._blocks[slot + 1 : group * GROUP]) + sum(self._sums[group:])

    def _add(self, record: Record, num_blocks: int) -> None:
        record.slot = len(self._records)
        if record.slot % GROUP == 0:
            self._sums.append(0)
        self._records.append(record)
        self._blocks.append(num_blocks)
        self._sums[-1] += num_blocks

    def _compact(self, capacity: int) -> None:
        """Drop the records beyond the capacity, and leave room for as many again."""
        kept: list[tuple[Record, int]] = []
        depth = 0
        for record, num_blocks in zip(reversed(self._records), reversed(self._blocks), strict=True):
            record.slot = -1
            if num_blocks and depth < capacity:
                kept.append((record, num_blocks))
                depth += num_blocks
        self._limit = max(MIN_SLOTS, 2 * len(kept))
        self._records, self._blocks, self._sums = [], [], []
        for record, num_blocks in reversed(kept):
            self._add(record, num_blocks)
